"""The program of each rank in the distributed rows: ``python -m matrix.ranks FOLDER`` with RANK and WORLD_SIZE set.

It trains all models one after another, so that the processes start only once. Each rank saves its result as
``FOLDER/<row>-<model>-<rank>.pt``. An error is saved there as text, and the next model follows.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.modules["torchvision"] = None  # type: ignore[assignment]  # it need not fit this torch; nothing here needs it

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import flexact
from flexact import FlexConfig, Policy
from flexact.routing.sites import sites_of
from matrix.models import COLUMNS, Batch, Column, logits_of, optimizer_of, scatter_logits
from matrix.synced_batch_norm import SyncedBatchNorm

STEPS = 6
BATCH = 12
POLICIES = {
    # With the usual step size, a logit of so short a run moves by ten in a step. At probabilities of 0 or 1 the
    # gradients are rounding errors. The weight of the KL is large enough to matter.
    "default": FlexConfig(policy=Policy(logit_step_size=0.2, alpha=100.0, noise=0.5)),
    "paper": FlexConfig.paper(commit_at=None),
    "sampled": FlexConfig.paper(commit_at=None, policy=Policy.paper(kl_on="p")),
    # Two warm-up steps.
    "warm-up": FlexConfig(
        init="original", init_probability=0.5, warmup=0.05, policy=Policy(logit_step_size=0.2, noise=0.5)
    ),
    "sampled, default": FlexConfig(policy=Policy(logit_step_size=0.2, noise=0.5, kl_on="p")),
}
COMPARED = ("default", "paper", "warm-up")
"""The runs that are also compared with one process. The ranks of the other runs are only compared with each other."""
COMMITTING = FlexConfig(policy=Policy(noise=0.5))


def synced(column: Column) -> nn.Module:
    """Returns the plain model, whose batch norms use the statistics of the whole batch."""
    model = column.unconverted()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                own = SyncedBatchNorm(child.num_features)
                own.load_state_dict(child.state_dict())
                setattr(module, name, own)
    return model


def part(batch: Batch, rank: int, ranks: int) -> Batch:
    """Returns a rank's share of a batch."""
    inputs, wanted = batch
    own = slice(rank * len(wanted) // ranks, (rank + 1) * len(wanted) // ranks)
    return tuple(one[own] for one in inputs), wanted[own]


def trained(column: Column, config: FlexConfig, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Returns logits, statistics and draw of every step and the final weights, for one process or one of several
    ranks.
    """
    model = scatter_logits(column.build(config, synced(column)), 0.5)
    run = model if ranks == 1 else DistributedDataParallel(model)
    optimizer = optimizer_of(model)
    schedule = flexact.Schedule(model, 40, optimizer)
    kept: dict[str, Any] = {"logits": [], "statistics": [], "noise": []}
    for step in range(STEPS):
        loss = column.loss(run, part(column.batch(step, BATCH), rank, ranks)) + flexact.penalty(model)
        if loss.requires_grad:  # a FlexAct by itself has nothing to train during the warm-up
            loss.backward()
        kept["statistics"].append(schedule.router.sensitivity().clone())
        kept["noise"].append(schedule.router.noise.clone())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        kept["logits"].append(logits_of(model).clone())
    kept["state"] = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return kept


def ddp(column: Column, rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """A run under each policy, and one that commits."""
    names = POLICIES if ranks == 2 else COMPARED
    found: dict[str, Any] = {name: trained(column, POLICIES[name], rank, ranks) for name in names}
    model = column.build(COMMITTING, synced(column))
    run, optimizer = DistributedDataParallel(model), optimizer_of(model)
    schedule = flexact.Schedule(model, STEPS, optimizer)
    for step in range(STEPS):
        loss = column.loss(run, part(column.batch(step, BATCH), rank, ranks)) + flexact.penalty(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {**found, "picks": flexact.selection(model).picks, "committed": schedule.committed}


def fsdp(column: Column, rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Trains sharded, saves, loads into a second sharded model, resumes with both, gathers the state, and extracts."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))

    def sharded(config: FlexConfig) -> nn.Module:
        model = scatter_logits(column.build(config, synced(column)), 0.5)
        for name, block in model.named_modules():
            if name in ("layer1", "layer2") or name.endswith(("layer.0", "layer.1")):
                fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: flexact.Schedule, count: int) -> None:
        for _ in range(count):
            batch = part(column.batch(schedule.steps_done, BATCH), rank, ranks)
            loss = column.loss(model, batch) + flexact.penalty(model)
            if loss.requires_grad:  # a committed FlexAct by itself has nothing to train
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def collected(model: nn.Module) -> dict[str, Tensor]:
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    found: dict[str, Any] = {}
    for name in COMPARED:
        model = sharded(POLICIES[name])
        optimizer = optimizer_of(model)
        steps(model, optimizer, flexact.Schedule(model, 40, optimizer), STEPS)
        found[name] = collected(model)
    found["half"], found["half, error"] = _in_half_precision(column, mesh)
    total = 12
    model = sharded(COMMITTING)
    optimizer = optimizer_of(model)
    schedule = flexact.Schedule(model, total, optimizer)
    steps(model, optimizer, schedule, 4)
    path = str(folder / f"fsdp-{column.name}")
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    other = sharded(COMMITTING)
    kinds = sorted({type(site.logits).__name__ for site in sites_of(other)})
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state["model"])
    other_optimizer = optimizer_of(other)
    other_schedule = flexact.Schedule(other, total, other_optimizer)
    other_schedule.load_state_dict(schedule.state_dict())
    steps(model, optimizer, schedule, total - 4)
    steps(other, other_optimizer, other_schedule, total - 4)
    message = ""
    try:
        flexact.extract(model)
    except flexact.FlexActError as error:
        message = str(error)
    inputs, _ = column.batch(99, 4)
    with torch.no_grad():
        answer = column.answer(model.eval(), inputs)
    return {
        **found,
        "kinds": kinds,
        "committed": schedule.committed and other_schedule.committed,
        "end": collected(model),
        "resumed": collected(other),
        "message": message,
        "answer": answer,
    }


def _in_half_precision(column: Column, mesh: Any) -> tuple[set[torch.dtype], str]:
    """Under a mixed-precision policy: the dtypes of logits where sites are sharded separately, and the warning
    otherwise.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen: set[torch.dtype] = set()
    message = ""
    for apart in (True, False):
        model = column.build(POLICIES["paper"], synced(column))
        for site in sites_of(model) if apart and not column.is_site else []:
            fully_shard(site, mesh=mesh)
            site.register_forward_hook(lambda site, inputs, x: seen.update({site.logits.dtype, site.router.p.dtype}))
        if not apart or not column.is_site:
            fully_shard(model, mesh=mesh, mp_policy=half)
        try:
            with torch.backends.mkldnn.flags(enabled=False):  # see test_autocast.py
                (column.loss(model, column.batch()) + flexact.penalty(model)).backward()
        except flexact.FlexActError as error:
            message += str(error)
    return seen, message


ROWS: dict[str, Callable[..., dict[str, Any]]] = {"ddp": ddp, "fsdp": fsdp}


def main(folder: str, *rows: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    where = Path(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{where / 'meeting'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    for row in rows:
        for column in COLUMNS.values():
            try:
                found: Any = ROWS[row](column, rank, ranks, where)
            except Exception:
                found = traceback.format_exc()
            torch.save(found, where / f"{row}-{column.name}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
