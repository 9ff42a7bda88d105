"""What the cells say together: mean and deviation over seeds, a paired t-test against ReLU, the cost of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flexact.errors import missing_extra
from flexact.studies.averages import mean_and_deviation
from flexact.studies.images.methods import BASELINE, METHODS, MODELS
from flexact.studies.images.store import DONE, Result


@dataclass(frozen=True)
class Comparison:
    """Two methods over the seeds that both have. p is None where no test can be made, and `why` says why."""

    seeds: int
    gain: float
    """Mean difference in points."""
    p: float | None
    why: str = ""


@dataclass(frozen=True)
class Summary:
    """One method on one model and data set."""

    dataset: str
    model: str
    method: str
    accuracies: Mapping[int, float]
    """By seed, in percent."""
    step_ms: float
    """Of a training step, the mean over seeds; NaN where none was measured."""
    against: Comparison | None
    """With ReLU; None for ReLU itself, and where no seed of it is done."""
    cost: float
    """Time of a step, ReLU's on the same kind of device taken as 1; NaN where either is not there."""

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
    ordered = sorted(groups, key=lambda key: (key[0] != "cifar10", key[0], list(MODELS).index(key[1]), _place(key[2])))
    return [_summary(key, groups[key], groups.get((key[0], key[1], BASELINE), [])) for key in ordered]


def paired(ours: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison | None:
    """A two-sided paired t-test over the seeds that both have; None where there is no such seed.

    >>> paired({0: 71.0, 1: 72.0}, {0: 70.0})
    Comparison(seeds=1, gain=1.0, p=None, why='one seed: a test needs two')
    """
    shared = sorted(set(ours) & set(baseline))
    if not shared:
        return None
    first, second = [ours[seed] for seed in shared], [baseline[seed] for seed in shared]
    gains = [a - b for a, b in zip(first, second, strict=True)]
    gain = mean_and_deviation(gains)[0]
    if not all(map(math.isfinite, gains)):
        return Comparison(len(shared), gain, None, "an accuracy is not a number")
    if len(shared) < 2:
        return Comparison(1, gain, None, "one seed: a test needs two")
    if not any(gains):
        return Comparison(len(shared), 0.0, 1.0)
    if max(gains) - min(gains) <= 1e-9 * max(map(abs, first + second)):
        return Comparison(len(shared), gain, None, "the same difference on every seed: no spread to test against")
    try:
        from scipy.stats import ttest_rel
    except ImportError:
        raise missing_extra("scipy", "studies") from None
    return Comparison(len(shared), gain, float(ttest_rel(first, second).pvalue))


def _summary(key: tuple[str, str, str], rows: list[Result], baseline: list[Result]) -> Summary:
    accuracies = {row.seed: row.accuracy for row in sorted(rows, key=lambda row: row.seed)}
    comparison = None
    if key[2] != BASELINE:
        comparison = paired(accuracies, {row.seed: row.accuracy for row in baseline})
    devices = {row.device for row in rows}
    step, reference = _step(rows), _step([row for row in baseline if row.device in devices])
    return Summary(*key, accuracies, step, comparison, step / reference if reference > 0 else math.nan)


def _step(rows: list[Result]) -> float:
    times = [row.step_ms for row in rows if math.isfinite(row.step_ms)]
    return mean_and_deviation(times)[0] if times else math.nan


def _place(method: str) -> int:
    return METHODS.index(method) if method in METHODS else len(METHODS)
