"""Summaries of the cells: mean over seeds, a paired t-test against ReLU, and the cost of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flexact.studies.averages import mean_and_deviation
from flexact.studies.cifar.methods import BASELINE, USUAL
from flexact.studies.cifar.study import Result
from flexact.studies.cifar_data.data import NAMES
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.grid.statistics import Comparison, paired
from flexact.studies.grid.store import DONE


@dataclass(frozen=True)
class Summary:
    """One method on one model and data set."""

    dataset: str
    model: str
    method: str
    accuracies: Mapping[int, float]
    """In percent, by seed."""
    device: str
    """The device of the times, the same for all methods of a model and data set; empty if nothing was timed."""
    step_ms: float
    """The time of a training step, mean over seeds; NaN if it was not measured on that device."""
    against: Comparison | None
    """The comparison with ReLU; None for ReLU itself, and if no seed of ReLU is done."""
    cost: float
    """The time of a step relative to ReLU's; NaN if either is missing."""


def summaries(results: Iterable[Result]) -> list[Summary]:
    """One summary for each data set, model and method with a finished cell, in a fixed order."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for row in results:
        if row.state == DONE:
            groups.setdefault((row.dataset, row.model, row.method), []).append(row)
    return [_summary(key, groups) for key in sorted(groups, key=lambda key: in_order(*key))]


def in_order(dataset: str, model: str, method: str = BASELINE) -> tuple[int, int, int]:
    """The sort key of tables and figures."""
    place = USUAL.index(method) if method in USUAL else len(USUAL)
    return NAMES.index(dataset), list(BLOCKS).index(model), place


def _summary(key: tuple[str, str, str], groups: Mapping[tuple[str, str, str], list[Result]]) -> Summary:
    rows, baseline = groups[key], groups.get((*key[:2], BASELINE), [])
    device = _timed_on([row for other, its in groups.items() if other[:2] == key[:2] for row in its])
    accuracies = {row.seed: row.accuracy for row in sorted(rows, key=lambda row: row.seed)}
    comparison = None
    if key[2] != BASELINE:
        comparison = paired(accuracies, {row.seed: row.accuracy for row in baseline})
    step, reference = _step(rows, device), _step(baseline, device)
    cost = step / reference if reference > 0 else math.nan
    return Summary(*key, accuracies, device, step, comparison, cost)


def _timed_on(rows: list[Result]) -> str:
    """The device on which times are compared: the one with the most timings of ReLU, then with the most timings."""
    timed = [row for row in rows if math.isfinite(row.step_ms)]
    cells = Counter(row.device for row in timed)
    of_baseline = Counter(row.device for row in timed if row.method == BASELINE)
    return max(cells, key=lambda device: (of_baseline[device], cells[device]), default="")


def _step(rows: list[Result], device: str) -> float:
    times = [row.step_ms for row in rows if row.device == device and math.isfinite(row.step_ms)]
    return mean_and_deviation(times)[0] if times else math.nan
