"""What the cells say together: mean and deviation over seeds, a paired t-test against ReLU, the cost of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flexact.studies.averages import mean_and_deviation
from flexact.studies.cifar.methods import BASELINE, METHODS, MODELS
from flexact.studies.cifar.study import Result
from flexact.studies.cifar_data.data import NAMES
from flexact.studies.grid.statistics import Comparison, paired
from flexact.studies.grid.store import DONE


@dataclass(frozen=True)
class Summary:
    """One method on one model and data set."""

    dataset: str
    model: str
    method: str
    accuracies: Mapping[int, float]
    """By seed, in percent."""
    device: str
    """That the times are of: one for all methods of a model and data set; empty where none was measured."""
    step_ms: float
    """Of a training step, the mean over seeds; NaN where none was measured there."""
    against: Comparison | None
    """With ReLU; None for ReLU itself, and where no seed of it is done."""
    cost: float
    """Time of a step, ReLU's taken as 1; NaN where either is not there."""

    @property
    def mean(self) -> float:
        return mean_and_deviation(list(self.accuracies.values()))[0]

    @property
    def deviation(self) -> float:
        return mean_and_deviation(list(self.accuracies.values()))[1]


def summaries(results: Iterable[Result]) -> list[Summary]:
    """One for each data set, model and method that has a finished cell, in a fixed order."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for row in results:
        if row.state == DONE:
            groups.setdefault((row.dataset, row.model, row.method), []).append(row)
    ordered = sorted(groups, key=lambda key: (in_order(key[0], key[1]), _place(key[2])))
    return [_summary(key, groups) for key in ordered]


def in_order(dataset: str, model: str) -> tuple[int, int]:
    """By this, data sets and models are sorted in the table and in figures."""
    return NAMES.index(dataset), list(MODELS).index(model)


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
    """The device to compare times on: the one that most cells of ReLU were timed on, and of several the most used."""
    timed = [row for row in rows if math.isfinite(row.step_ms)]
    cells = Counter(row.device for row in timed)
    of_baseline = Counter(row.device for row in timed if row.method == BASELINE)
    return max(cells, key=lambda device: (of_baseline[device], cells[device]), default="")


def _step(rows: list[Result], device: str) -> float:
    times = [row.step_ms for row in rows if row.device == device and math.isfinite(row.step_ms)]
    return mean_and_deviation(times)[0] if times else math.nan


def _place(method: str) -> int:
    return METHODS.index(method) if method in METHODS else len(METHODS)
