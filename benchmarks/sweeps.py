"""Time the routed activation alone, and a training step by number of candidates and by depth.

    python benchmarks/sweeps.py [--out results/overhead]

Writes operation.csv, candidates.csv and depth.csv. All contenders of a table are in memory and run in turns. Times are
medians over rounds, with the 10th and 90th percentiles, and ratios to ReLU are computed within a round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexact.io.atomic_files import write_rows
from flexact.ops import dispatch, routed_activation
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.cuda_graph import study_stream
from flexact.studies.overhead.options import BASELINE, WAYS, Options, chosen
from flexact.studies.overhead.timing import Run, interleaved, ratios, spread
from flexact.studies.overhead.training import WARM_UP, Batch, Training, build, check_kernels, plain_blend
from flexact.studies.provenance import provenance

CANDIDATES = (
    *("relu", "sigmoid", "tanh", "leaky_relu", "identity", "gelu", "silu", "elu", "softplus", "mish", "selu"),
    *("hardswish", "relu6", "softsign", "relu_squared", "sine"),
)
"""The maximum number of candidates that the kernels support, the paper's five first. K candidates are the first K."""
TENSORS = {"forward": 2, "backward": 3, "both": 5}
"""The minimum number of tensors that a direction reads and writes: h and x forward; h, δ and ∂h backward."""
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "elements": 1 << 26,
        "ks": (2, 5, 8, 11, 14),
        "depths": ((1,), (1, 1), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3), (3, 4, 6, 3)),
    },
    "cpu": {"elements": 1 << 20, "ks": (2, 5, 14), "depths": ((1,), (1, 1))},
}

Key = tuple[Any, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/overhead"), help="the folder for the CSV files")
    parser.add_argument("--repeats", type=int, help="rounds")
    given = parser.parse_args()
    options = chosen(repeats=given.repeats)
    sizes = SIZES[options.where.type]
    modes = ("eager", "graph") if options.where.type == "cuda" else ("eager",)
    with study_stream(options.where):
        write_rows(given.out / "operation.csv", operations(options, sizes["elements"], modes))
        write_rows(given.out / "candidates.csv", against_candidates(options, sizes, modes[-1]))
        write_rows(given.out / "depth.csv", against_depth(options, sizes["depths"], modes))


def operations(options: Options, elements: int, modes: Sequence[str]) -> list[dict[str, Any]]:
    """Time ReLU, GELU, a copy and every way of the routed activation, in each direction."""
    h, delta = tensors(elements, options)
    target = torch.empty_like(delta)
    named: dict[str, Callable[[], Operation]] = {
        BASELINE: partial(Operation, h, delta, F.relu),
        "gelu": partial(Operation, h, delta, F.gelu),
    }
    named |= {way: partial(routed, way, h, delta, 5) for way in options.ways if not WAYS[way].fuse}
    runs: dict[Key, Callable[[], Run]] = {}
    for mode in modes:
        runs["copy", "forward", mode] = partial(prepared, partial(target.copy_, delta), "copy", mode, options)
        for name, make in named.items():
            for direction in TENSORS:
                runs[name, direction, mode] = partial(prepared_operation, make, direction, name, mode, options)
    rows = timed(runs, options, lambda key: (BASELINE, *key[1:]), ("operation", "direction", "mode"))
    for row in rows:
        if row["ms"] != "":
            row["gb_per_s"] = TENSORS[row["direction"]] * elements * options.dtype.itemsize / (row["ms"] * 1e6)
    return rows


def against_candidates(options: Options, sizes: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """Time the operation alone, and a training step of ResNet-18 with all sites routed, for each K."""
    h, delta = tensors(sizes["elements"], options)
    ways = [way for way in options.ways if way.startswith("fused")] or list(options.ways[-1:])
    columns = ("what", "way", "mode", "candidates")
    relu = partial(Operation, h, delta, F.relu)
    alone: dict[Key, Callable[[], Run]] = {
        ("operation", BASELINE, mode, 1): partial(prepared_operation, relu, "both", BASELINE, mode, options)
    }
    for k in sizes["ks"]:
        for way in (way for way in ways if not WAYS[way].fuse):
            make = partial(routed, way, h, delta, k)
            alone["operation", way, mode, k] = partial(prepared_operation, make, "both", way, mode, options)
    rows = timed(alone, options, lambda key: ("operation", BASELINE, mode, 1), columns)
    blocks = BLOCKS["resnet18"]
    steps: dict[Key, Callable[[], Run]] = {
        ("step", BASELINE, mode, 1): partial(step, blocks, BASELINE, mode, 5, options)
    }
    steps |= {("step", way, mode, k): partial(step, blocks, way, mode, k, options) for k in sizes["ks"] for way in ways}
    rows += timed(steps, options, lambda key: ("step", BASELINE, mode, 1), columns)
    five = {(row["what"], row["way"]): row["ms"] for row in rows if row["candidates"] == 5}
    for row in rows:
        base = five.get((row["what"], row["way"]))
        row["ratio_to_five"] = row["ms"] / base if base and row["ms"] != "" else ""
    return rows


def against_depth(options: Options, depths: Any, modes: Sequence[str]) -> list[dict[str, Any]]:
    """Time a training step of networks of different depth with all sites routed, relative to ReLU at that depth."""
    ways = [BASELINE, *([way for way in options.ways if way.startswith("fused")] or options.ways[-1:])]
    rows = []
    for mode in modes:
        for blocks in depths:
            depth = (2 * sum(blocks) + 2, sum(blocks))
            runs: dict[Key, Callable[[], Run]] = {
                (way, mode, *depth): partial(step, blocks, way, mode, 5, options) for way in ways
            }
            rows += timed(runs, options, lambda key: (BASELINE, *key[1:]), ("way", "mode", "layers", "sites"))
    return rows


class Operation:
    """An activation of one tensor, with the calls to time: `forward`, `backward` and `both`."""

    def __init__(self, h: Tensor, delta: Tensor, blend: Callable[[Tensor], Any], *parameters: Tensor) -> None:
        self.h, self.delta, self.blend, self.inputs = h, delta, blend, (h, *parameters)
        self.kept: Tensor | None = None

    def forward(self) -> Tensor:
        out = self.blend(self.h)
        x: Tensor = out[0] if isinstance(out, tuple) else out
        return x

    def backward(self) -> None:
        if self.kept is None:
            self.kept = self.forward()
        torch.autograd.grad(self.kept, self.inputs, self.delta, retain_graph=True)

    def both(self) -> None:
        torch.autograd.grad(self.forward(), self.inputs, self.delta)


def routed(way: str, h: Tensor, delta: Tensor, k: int) -> Operation:
    """Return a routed activation of the first k candidates, with the statistics of the default policy."""
    names = CANDIDATES[:k]
    logits = torch.zeros(k, device=h.device, requires_grad=True)
    temperature = torch.ones((), device=h.device)
    if WAYS[way].plain:
        noise = torch.zeros(k, device=h.device)
        return Operation(h, delta, lambda h: plain_blend(h, logits, noise, temperature, names), logits)
    p = torch.full((1, k), 1 / k, device=h.device)

    def blend(h: Tensor) -> Any:
        dispatch.use(WAYS[way].kernels)
        return routed_activation(h, logits, p, p, temperature, names, range(k), statistics=True)

    return Operation(h, delta, blend, logits)


def tensors(elements: int, options: Options) -> tuple[Tensor, Tensor]:
    """Return h, which requires a gradient, and δ, with 64 channels of 32×32 in channels-last layout."""
    generator = torch.Generator().manual_seed(0)

    def random() -> Tensor:
        host = torch.randn((elements // (64 * 32 * 32), 64, 32, 32), generator=generator)
        return host.to(options.where, options.dtype, memory_format=torch.channels_last)

    return random().requires_grad_(), random()


def step(blocks: tuple[int, ...], way: str, mode: str, k: int, options: Options) -> Run:
    """Return a training step after its warm-up, captured if the mode is "graph"."""
    placement = BASELINE if way == BASELINE else "all"
    network = build(blocks, options.width, placement, way, options.where, CANDIDATES[:k])
    training = Training(network, way, Batch(options.batch, options.where, options.dtype), compiled=False)
    training.warm_up()
    if mode == "graph":
        training.capture()
    return training.step


def prepared(run: Callable[[], Any], way: str, mode: str, options: Options) -> Run:
    """Return an operation after its warm-up, captured if the mode is "graph"."""
    if way in WAYS:
        dispatch.use(WAYS[way].kernels)
    for _ in range(WARM_UP):
        run()
    if way in WAYS:
        check_kernels(way, options.where)
    return captured(run, options.where) if mode == "graph" else run


def prepared_operation(make: Callable[[], Operation], direction: str, way: str, mode: str, options: Options) -> Run:
    """Make an operation, and return its call for one of the directions of `TENSORS` after its warm-up."""
    return prepared(getattr(make(), direction), way, mode, options)


def captured(run: Callable[[], Any], device: torch.device) -> Run:
    """Capture an operation, which must have run on this stream before, and return a function that replays it."""
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        run()
    torch.cuda.synchronize(device)
    return graph.replay


def timed(
    makers: dict[Key, Callable[[], Run]], options: Options, base: Callable[[Key], Key], columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Time contenders in turns. Return one row each, with its ratio to the baseline, or its error."""
    runs: dict[Key, Run] = {}
    errors: dict[Key, Exception] = {}
    for key, make in makers.items():
        try:
            runs[key] = make()
        except Exception as error:
            errors[key] = error
    times, failed = interleaved(runs, options.repeats, options.where, burst_ms=20.0)
    errors |= failed
    made, rows = provenance(), []
    for key in makers:
        row: dict[str, Any] = dict(zip(columns, key, strict=True))
        row |= dict.fromkeys(("ms", "ms_p10", "ms_p90", "ratio", "ratio_p10", "ratio_p90", "gb_per_s", "error"), "")
        if key in times:
            own = spread(times[key])
            row |= {"ms": own.median, "ms_p10": own.low, "ms_p90": own.high}
            if base(key) in times:
                ratio = ratios(times[key], times[base(key)])
                row |= {"ratio": ratio.median, "ratio_p10": ratio.low, "ratio_p90": ratio.high}
        if key in errors:
            row["error"] = str(errors[key])
        rows.append(row | {"dtype": str(options.dtype)[6:]} | made)
    return rows


if __name__ == "__main__":
    main()
