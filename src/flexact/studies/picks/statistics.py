"""What the rows of a benchmark say together: scores, regrets, tests against the original activation, and costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from flexact.studies.averages import mean_and_deviation
from flexact.studies.grid.statistics import Comparison, paired
from flexact.studies.grid.store import DONE
from flexact.studies.picks.methods import CHOOSING, fixed, methods_of
from flexact.studies.picks.study import Result
from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks import TASKS

SIGNIFICANT = 0.05
ORIGINAL = "original"
"""In the overall summary: each task's own original activation."""


@dataclass(frozen=True)
class Reference:
    """What regret is measured against: the fixed candidates' scores on the seeds that all of them have."""

    scores: Mapping[str, Mapping[int, float]]
    """Candidate → seed → score, of the candidates that have finished cells; the best on average first."""
    seeds: frozenset[int]

    @property
    def candidates(self) -> tuple[str, ...]:
        return tuple(self.scores)

    @property
    def best(self) -> float:
        return max(self._means(self.seeds))

    @property
    def middle(self) -> float:
        return median(self._means(self.seeds))

    def regret(self, scores: Mapping[int, float]) -> float:
        """0 for the best fixed candidate, 1 for the median one, over the seeds that are shared; NaN without any.

        scores: by seed.
        """
        shared = self.seeds & scores.keys()
        means = self._means(shared) if shared else [math.nan]
        best, middle = max(means), median(means)
        return (best - fmean(scores[seed] for seed in shared)) / (best - middle) if best > middle else math.nan

    def _means(self, seeds: Iterable[int]) -> list[float]:
        return [fmean(own[seed] for seed in seeds) for own in self.scores.values()]


@dataclass(frozen=True)
class Summary:
    """One method on one task."""

    task: str
    method: str
    scores: Mapping[int, float]
    """By seed."""
    against: Comparison | None
    """With the original activation; None for that one itself, and where they share no seed."""
    regret: float
    steps_ratio: float
    """Steps relative to a plain run of the original activation, the mean over shared seeds."""
    seconds_ratio: float
    """Seconds likewise, of the seeds on which both ran on the same device."""

    @property
    def mean(self) -> float:
        return mean_and_deviation(list(self.scores.values()))[0]

    @property
    def deviation(self) -> float:
        return mean_and_deviation(list(self.scores.values()))[1]


@dataclass(frozen=True)
class Overall:
    """One method over all tasks on which it has a regret."""

    method: str
    tasks: int
    mean_regret: float
    largest_regret: float
    worst_task: str
    better: int
    """Tasks with a mean score above that of the original activation."""
    significantly_worse: int
    """Tasks below it with p < 0.05."""
    steps_ratio: float
    seconds_ratio: float


def reference(task: Task, rows: Iterable[Result]) -> Reference | None:
    """Of a task's rows; None where no seed has all of the fixed candidates that were run, or fewer than two were."""
    scores = _scores(row for row in rows if row.task == task.name)
    found = {name: scores[fixed(name)] for name in task.candidates if fixed(name) in scores}
    seeds = frozenset.intersection(*(frozenset(one) for one in found.values())) if found else frozenset()
    if len(found) < 2 or not seeds:
        return None
    order = sorted(found, key=lambda name: -fmean(found[name][seed] for seed in seeds))
    return Reference({name: found[name] for name in order}, seeds)


def summaries(rows: Sequence[Result]) -> list[Summary]:
    """One for each task and method that has a finished cell, in the order of the tasks and of their methods."""
    done = [row for row in rows if row.state == DONE]
    return [one for task in TASKS.values() for one in _of_task(task, [row for row in done if row.task == task.name])]


def overall(found: Sequence[Summary]) -> list[Overall]:
    """Each method that chooses, then the original activation; over the tasks on which it has a regret."""
    by_method = {method: [one for one in found if one.method == method] for method in CHOOSING}
    by_method[ORIGINAL] = [one for one in found if one.method == fixed(TASKS[one.task].original)]
    results = []
    for method, its in by_method.items():
        own = [one for one in its if math.isfinite(one.regret)]
        if own:
            results.append(_overall(method, own))
    return results


def _of_task(task: Task, rows: Sequence[Result]) -> list[Summary]:
    by_method = {method: {row.seed: row for row in rows if row.method == method} for method in methods_of(task)}
    original, scores, known = by_method[fixed(task.original)], _scores(rows), reference(task, rows)
    found = []
    for method, own in by_method.items():
        if own:
            is_original = method == fixed(task.original)
            found.append(
                Summary(
                    task.name,
                    method,
                    scores[method],
                    None if is_original else paired(scores[method], scores.get(fixed(task.original), {})),
                    math.nan if known is None else known.regret(scores[method]),
                    _mean(own[seed].steps / original[seed].steps for seed in own.keys() & original.keys()),
                    _mean(
                        own[seed].seconds / original[seed].seconds
                        for seed in own.keys() & original.keys()
                        if own[seed].device == original[seed].device and original[seed].seconds > 0
                    ),
                )
            )
    return found


def _overall(method: str, own: Sequence[Summary]) -> Overall:
    worst = max(own, key=lambda one: one.regret)
    tests = [one.against for one in own if one.against is not None]
    return Overall(
        method,
        len(own),
        fmean(one.regret for one in own),
        worst.regret,
        worst.task,
        sum(test.gain > 0 for test in tests),
        sum(test.gain < 0 and test.p is not None and test.p < SIGNIFICANT for test in tests),
        _mean(one.steps_ratio for one in own if math.isfinite(one.steps_ratio)),
        _mean(one.seconds_ratio for one in own if math.isfinite(one.seconds_ratio)),
    )


def _scores(rows: Iterable[Result]) -> dict[str, dict[int, float]]:
    """Method → seed → score, of finished cells."""
    found: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: row.seed):
        if row.state == DONE:
            found.setdefault(row.method, {})[row.seed] = row.score
    return found


def _mean(values: Iterable[float]) -> float:
    """NaN of nothing."""
    held = list(values)
    return fmean(held) if held else math.nan
