"""ResNet-18 and -34 on a GPU, measured as in `flexact reproduce overhead`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

from sweeps import step

from cost_rows.row import Row
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.cuda_graph import study_stream
from flexact.studies.overhead import study
from flexact.studies.overhead.options import BASELINE, PEAK, TRAIN, Options
from flexact.studies.overhead.timing import Run, interleaved, ratios, release, spread

STEP, MEMORY = f"{TRAIN}, ratio", f"{PEAK}, ratio"
TO_FIVE = f"{TRAIN}, ratio to 5 candidates"
MODES: dict[str, tuple[str, ...]] = {"resnet18": ("eager", "compiled"), "resnet34": ("eager",)}
"""The compiled mode is measured for one network only, because compilation takes most of the time."""


_COUNTED = "resnet18, all, {}, {}, {} candidates"
FOURTEEN = _COUNTED.format("fused_bn", "graph", 14)


def case_of(network: str, placement: str, way: str, mode: str) -> str:
    """Return the name of a row's network.

    >>> case_of("resnet18", "all", "fused_bn", "eager")
    'resnet18, all, fused_bn, eager'
    """
    return f"{network}, {placement}, {way}, {mode}"


def rows(network: str, options: Options) -> Iterator[Row]:
    """Measure time and memory of a network in every way, relative to the network with ReLU in the same mode."""
    with study_stream(options.where):
        measured = study.measure(network, options)
    plain_ms = {row.cell: row.value for row in measured if row.quantity == TRAIN and row.value is not None}
    for row in measured:
        case, routed = case_of(*row.cell), row.placement != BASELINE
        if row.error:
            yield Row(case, STEP, error=row.error)
        elif row.quantity == TRAIN and routed and row.ratio is not None:
            low, high = row.ratio_p10 or math.nan, row.ratio_p90 or math.nan
            yield Row(case, STEP, row.ratio, low, high, plain_ms[row.cell.baseline])
        elif row.quantity == PEAK and routed and row.ratio is not None:
            yield Row(case, MEMORY, row.ratio)


def candidates(options: Options, way: str = "fused_bn", mode: str = "graph") -> Iterator[Row]:
    """Time a step of ResNet-18 with 14 candidates at all sites relative to five, and both relative to ReLU."""
    blocks = BLOCKS["resnet18"]
    with study_stream(options.where):
        runs: Mapping[int, Run] = {
            1: step(blocks, BASELINE, mode, 5, options),
            **{k: step(blocks, way, mode, k, options) for k in (5, 14)},
        }
        times, errors = interleaved(runs, options.repeats, options.where, burst_ms=20.0)
        for error in errors.values():
            raise error
        release(options.where)
    case = partial(_COUNTED.format, way, mode)
    plain_ms = spread(times[1]).median
    yield Row(case(5), STEP, *ratios(times[5], times[1]), plain_ms)
    yield Row(case(14), STEP, *ratios(times[14], times[1]), plain_ms)
    yield Row(case(14), TO_FIVE, *ratios(times[14], times[5]), plain_ms)
