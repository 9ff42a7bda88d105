"""Cost against the number of candidates, and against depth."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flexact.studies.overhead.deadline import Deadline
from flexact.studies.overhead.networks import BASELINE, WAYS, build
from flexact.studies.overhead.operation import Operation, prepared, routed, tensors
from flexact.studies.overhead.options import CANDIDATES, NETWORKS, PAPERS_K, Options
from flexact.studies.overhead.rows import SweepRow, told, with_times
from flexact.studies.overhead.steps import Batch, Training
from flexact.studies.overhead.timing import FEWEST_ROUNDS, Run, interleaved, ratios, spread

STEP, OPERATION = "step", "operation"
_BLOCKS = NETWORKS["resnet18"]
"""Of the network whose step is timed against the number of candidates."""


@dataclass(frozen=True)
class _Point:
    what: str
    way: str
    mode: str
    k: int
    blocks: tuple[int, ...] = ()
    """Of the network whose step it is."""

    @property
    def is_baseline(self) -> bool:
        return self.way == BASELINE

    def row(self) -> SweepRow:
        depth = layers(self.blocks) if self.blocks else 0
        name = f"resnet{depth}" if self.blocks else ""
        return SweepRow(self.what, name, self.way, self.mode, self.k, depth, sum(self.blocks))


def against_candidates(options: Options, deadline: Deadline) -> list[SweepRow]:
    """The operation alone and a training step of all sites, for each K."""
    mode = options.sweep_modes[-1]
    alone = [way for way in options.sweep_ways if not WAYS[way].fuse]
    points = [_Point(OPERATION, BASELINE, mode, 1)] + [_Point(OPERATION, w, mode, k) for k in options.ks for w in alone]
    rows = _timed(points, options, deadline)
    routed_steps = [_Point(STEP, way, mode, k, _BLOCKS) for k in options.ks for way in options.sweep_ways]
    rows += _timed([_Point(STEP, BASELINE, mode, 1, _BLOCKS), *routed_steps], options, deadline)
    five = {(row.what, row.way): row.ms for row in rows if row.candidates == PAPERS_K}
    return [_to_five(row, five.get((row.what, row.way))) for row in rows]


def against_depth(options: Options, deadline: Deadline) -> list[SweepRow]:
    """A training step of networks from one block to the deepest, all sites; each against its own ReLU."""
    rows: list[SweepRow] = []
    for mode in options.sweep_modes:
        for blocks in options.depths:
            routed_steps = [_Point(STEP, way, mode, PAPERS_K, blocks) for way in options.sweep_ways]
            rows += _timed([_Point(STEP, BASELINE, mode, 1, blocks), *routed_steps], options, deadline)
    return rows


def layers(blocks: Sequence[int]) -> int:
    """As the names of ResNets count: two a block, the stem and the output.

    >>> layers((2, 2, 2, 2))
    18
    """
    return 2 * sum(blocks) + 2


def _timed(points: Sequence[_Point], options: Options, deadline: Deadline) -> list[SweepRow]:
    """Time points of one kind against each other, and against the ReLU among them."""
    runs: dict[_Point, Run] = {}
    errors: dict[_Point, Exception] = {}
    batch = Batch(options.batch, options.where, options.dtype)
    large = tensors(options) if any(point.what == OPERATION for point in points) else None
    for point in points:
        start = time.monotonic()
        try:
            deadline.check()
            runs[point] = _operation(point, options, *large) if large else _step(point, options, batch)
        except Exception as error:
            errors[point] = error
        deadline.took(time.monotonic() - start)
    repeats = max(FEWEST_ROUNDS, options.repeats // 2)
    times, failed = interleaved(runs, repeats, options.where, options.burst_ms / 2, deadline)
    errors |= failed
    relu = next((times[point] for point in times if point.is_baseline), None)
    rows = []
    for point in points:
        measured: dict[str, Any] = {}
        if point in times:
            measured = with_times(spread(times[point]), "ms")
            if relu:
                measured |= with_times(ratios(times[point], relu), "ratio")
        if point in errors:
            measured["error"] = told(errors[point])
        rows.append(dataclasses.replace(point.row(), **measured))
    return rows


def _operation(point: _Point, options: Options, h: Tensor, delta: Tensor) -> Run:
    operation = Operation(h, delta, F.relu) if point.is_baseline else routed(point.way, h, delta, point.k)
    return prepared(operation.both, point.way, point.mode, options.where)


def _step(point: _Point, options: Options, batch: Batch) -> Run:
    placement = BASELINE if point.is_baseline else "all"
    names = CANDIDATES[:PAPERS_K] if point.is_baseline else CANDIDATES[: point.k]
    network = build(point.blocks, options.width, placement, point.way, names, options.where)
    training = Training(network, point.way, batch, compiled=False)
    training.warm_up()
    if point.mode != "graph":
        return training.step
    training.capture()
    return training.replay


def _to_five(row: SweepRow, five: float | None) -> SweepRow:
    return dataclasses.replace(row, ratio_to_five=row.ms / five) if row.ms and five else row
