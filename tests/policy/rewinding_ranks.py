"""The program of each rank in the rewinding tests: ``python -m policy.rewinding_ranks FOLDER`` with RANK and
WORLD_SIZE set.

Each rank saves its result as ``FOLDER/<row>-<rank>.pt``. An error is saved there as text.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import flexact

STEPS = 16
CONFIG = flexact.FlexConfig(candidates=("relu", "gelu", "tanh"), rewind=True, commit_at=0.5)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU())
    return nn.Sequential(first, nn.Sequential(nn.Linear(10, 7), nn.Tanh()), nn.Linear(7, 2))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def train(
    run: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: int,
    schedule: flexact.Schedule | None = None,
    model: nn.Module | None = None,
) -> list[float]:
    losses = []
    begin = 0 if schedule is None else schedule.steps_done
    for step in range(begin, begin + steps):
        x, y = batch(step - ((schedule.rewound_at or 0) if schedule is not None else 0), rank)
        loss = nn.functional.cross_entropy(run(x), y)
        total = loss if model is None else loss + flexact.penalty(model)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


def state_of(model: nn.Module) -> dict[str, Tensor]:
    own = ("logits", "dropped_at", "evidence", "temperature", "signature")
    return {name: t.detach().clone() for name, t in model.state_dict().items() if not name.endswith(own)}


def ddp(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Trains a run with a rewind, and the plain network with its picks, both under DistributedDataParallel."""
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        model = flexact.convert(network(), config=CONFIG)
        run = DistributedDataParallel(model, gradient_as_bucket_view=name == "AdamW")
        optimizer = make(flexact.param_groups(model))
        schedule = flexact.Schedule(model, STEPS, optimizer)
        losses = train(run, optimizer, rank, STEPS, schedule, model)[8:]
        plain = flexact.load_picks(network(), flexact.selection(model))
        expected = train(DistributedDataParallel(plain), make(plain.parameters()), rank, 8)
        found[name] = {
            "rewound_at": schedule.rewound_at,
            "losses": (losses, expected),
            "state": state_of(model),
            "plain": state_of(plain),
        }
    return found


def fsdp(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """The same with `fully_shard`, and a run that is saved before its rewind by torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))

    def sharded(model: nn.Module) -> nn.Module:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model[1], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def collected(model: nn.Module) -> dict[str, Tensor]:
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        own = ("logits", "dropped_at", "evidence", "temperature", "signature")
        return {name: tensor for name, tensor in whole.items() if not name.endswith(own)}

    def begun(make: Any, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, flexact.Schedule]:
        plain = network()
        torch.manual_seed(seed)
        for parameter in plain.parameters() if seed else ():
            nn.init.normal_(parameter)
        model = sharded(flexact.convert(plain, config=CONFIG))
        optimizer = make(flexact.param_groups(model))
        return model, optimizer, flexact.Schedule(model, STEPS, optimizer)

    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        model, optimizer, schedule = begun(make)
        start = schedule.state_dict()["start"]["tensors"]
        kinds = {type(start[one]).__name__ for one in ("0.0.weight", "2.weight")}
        losses = train(model, optimizer, rank, 5, schedule, model)
        with torch.no_grad():
            model(batch(99, rank)[0])  # an evaluation leaves unsharded parameters
        losses += train(model, optimizer, rank, 3, schedule, model)
        optimizer.step()  # a step without gradients
        rest = train(model, optimizer, rank, 8, schedule, model)
        plain = sharded(flexact.load_picks(network(), flexact.selection(model)))
        expected = train(plain, make(plain.parameters()), rank, 8)
        found[name] = {
            "rewound_at": schedule.rewound_at,
            "kinds": kinds,
            "losses": (rest, expected),
            "state": collected(model),
            "plain": collected(plain),
        }
    found["resumed"] = _resumed(begun, collected, rank, folder, dcp)
    return found


def _resumed(begun: Any, collected: Any, rank: int, folder: Path, dcp: Any) -> dict[str, Any]:
    make = OPTIMIZERS["Adagrad"]
    model, optimizer, schedule = begun(make)
    train(model, optimizer, rank, 4, schedule, model)
    dcp.save({"model": model.state_dict(), "schedule": schedule.state_dict()}, checkpoint_id=str(folder / "saved"))
    held = copy.deepcopy(optimizer.state_dict())
    ends = {}
    for name in ("as it was saved", "with whole tensors"):
        other, other_optimizer, other_schedule = begun(make, seed=3)
        state = {"model": other.state_dict(), "schedule": other_schedule.state_dict()}
        dcp.load(state, checkpoint_id=str(folder / "saved"))
        other.load_state_dict(state["model"])
        other_optimizer.load_state_dict(copy.deepcopy(held))
        if name == "with whole tensors":
            tensors = state["schedule"]["start"]["tensors"]
            for key, tensor in tensors.items():
                tensors[key] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        other_schedule.load_state_dict(state["schedule"])
        train(other, other_optimizer, rank, STEPS - 4, other_schedule, other)
        ends[name] = collected(other)
    train(model, optimizer, rank, STEPS - 4, schedule, model)
    return {"whole": collected(model), **ends}


def main(folder: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    where = Path(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{where / 'meeting'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    for row in (ddp, fsdp):
        try:
            found: Any = row(rank, ranks, where)
        except Exception:
            found = traceback.format_exc()
        torch.save(found, where / f"{row.__name__}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
