"""Count the kernel launches of a training step, and profile it on the device and on the host.

    python benchmarks/launches.py [--out results/overhead]

Writes launches.csv (launches of the draw, the policy, the schedule and the whole eager step against depth) and, on a
GPU, profile.csv (the longest kernels of a replayed step, and the longest Python functions of an eager one).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from flexact.config import PAPER_CANDIDATES as FIVE
from flexact.io.atomic_files import write_rows
from flexact.ops import dispatch
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.cuda_graph import autocast, study_stream
from flexact.studies.overhead.options import BASELINE, WAYS, Options, chosen
from flexact.studies.overhead.training import Batch, Training, build
from flexact.studies.provenance import provenance

DEPTHS = ((1,), (1, 1), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3), (3, 4, 6, 3))
FOURTEEN = (*FIVE, "gelu", "silu", "elu", "softplus", "mish", "selu", "hardswish", "relu6", "softsign")
MOST = 25
"""Maximum number of kernels or functions in a profile."""
RUNS = 10
"""Steps over which Python functions are profiled."""

Calls = dict[str, tuple[int, float]]
"""Name → calls and microseconds."""


def count(run: Callable[[], object], device: torch.device) -> int:
    """Return the number of launches of one run; without a GPU, the number of torch operators that access data."""
    return sum(calls for calls, _ in kernels_of_run(run, device).values())


def kernels_of_run(run: Callable[[], object], device: torch.device) -> Calls:
    """Return the kernels that one run launches."""
    found = _traced(run, device) if device.type == "cuda" else _dispatched(run)
    calls, times = Counter(name for name, _ in found), Counter[str]()
    for name, duration in found:
        times[name] += duration  # type: ignore[assignment]
    return {name: (calls[name], float(times[name])) for name in calls}


def functions_of_run(run: Callable[[], object]) -> Calls:
    """Return the Python functions of one run with their own times. The profiler slows Python, so compare shares."""
    found = cProfile.Profile()
    for _ in range(RUNS):
        found.runcall(run)
    return {
        f"{Path(file).parent.name}/{Path(file).name}:{line} {name}" if file != "~" else name: (
            round(calls / RUNS),
            own * 1e6 / RUNS,
        )
        for (file, line, name), (_, calls, own, _, _) in pstats.Stats(found).stats.items()  # type: ignore[attr-defined]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/overhead"), help="the folder for the CSV files")
    given = parser.parse_args()
    options = chosen()
    ways = [way for way in options.ways if way.startswith("fused")] or list(options.ways[-1:])
    depths = DEPTHS if options.where.type == "cuda" else DEPTHS[:2]
    batch = Batch(options.batch, options.where, options.dtype)
    with study_stream(options.where):
        rows = [_launches(blocks, way, batch, options) for blocks in depths for way in ways]
        write_rows(given.out / "launches.csv", rows)
        if options.where.type == "cuda":
            cases = [(BASELINE, FIVE), *((way, FIVE) for way in ways), (ways[-1], FOURTEEN)]
            points = [(network, *case) for network in options.models for case in cases]
            write_rows(given.out / "profile.csv", [row for one in points for row in _profile(*one, batch, options)])


def _training(
    blocks: tuple[int, ...], way: str, batch: Batch, options: Options, candidates: tuple[str, ...] = FIVE
) -> Training:
    placement = BASELINE if way == BASELINE else "all"
    network = build(blocks, options.width, placement, way, options.where, candidates)
    training = Training(network, way, batch, compiled=False)
    training.warm_up()
    return training


def _launches(blocks: tuple[int, ...], way: str, batch: Batch, options: Options) -> dict[str, Any]:
    """Return the number of launches of one eager step and of its parts."""
    device = options.where
    relu, training = _training(blocks, BASELINE, batch, options), _training(blocks, way, batch, options)
    schedule, router = training.schedule, sites_of(training.network)[0].router
    assert schedule is not None
    count(relu.step, device)  # the first session of a profiler may miss its first events
    dispatch.use(WAYS[way].kernels)
    step, draw = count(training.step, device), count(lambda: router.refresh(True), device)
    with autocast(batch.device, batch.dtype == torch.bfloat16):
        out = training.network(batch.images)
    out.float().square().mean().backward()  # the policy needs gradients of the logits
    act = schedule._action(training.optimizer)  # the hook of the optimizer's step
    assert act is not None
    policy = count(lambda: act(False), device)
    parts = {"draw": draw, "policy": policy, "schedule": count(schedule.step, device), "step": step}
    depth = {"layers": 2 * sum(blocks) + 2, "sites": sum(blocks), "way": way}
    return depth | parts | {"relu_step": count(relu.step, device)} | provenance()


def _profile(
    network: str, way: str, candidates: tuple[str, ...], batch: Batch, options: Options
) -> list[dict[str, Any]]:
    training = _training(BLOCKS[network], way, batch, options, candidates)
    found = {"eager, on the host": functions_of_run(training.step)}
    training.capture()
    found["graph"] = kernels_of_run(training.step, options.where)
    rows = []
    for mode, calls in found.items():
        longest = sorted(calls.items(), key=lambda one: -one[1][1])
        rest = [one for _, one in longest[MOST:]]
        others = [("(others)", (sum(n for n, _ in rest), sum(time for _, time in rest)))] if rest else []
        for name, (number, microseconds) in [*longest[:MOST], *others]:
            row = {"network": network, "way": way, "candidates": len(candidates), "mode": mode}
            row |= {"kernel": name[:160], "calls": number, "microseconds": microseconds}
            rows.append(row | provenance())
    return rows


def _traced(run: Callable[[], object], device: torch.device) -> list[tuple[str, float]]:
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize(device)
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [(event["name"], float(event.get("dur", 0.0))) for event in events if event.get("cat") in kinds]


def _dispatched(run: Callable[[], object]) -> list[tuple[str, float]]:
    names: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            free = func.name() in ("aten::detach", "aten::alias")
            if not func.is_view and "empty" not in func.name() and not free:
                names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        run()
    return [(name, 0.0) for name in names]


if __name__ == "__main__":
    main()
