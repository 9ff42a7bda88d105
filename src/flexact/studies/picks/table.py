"""table.md of the benchmark: scores, regrets, tests against the original activation, and costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median

from flexact.io.markdown_tables import markdown
from flexact.studies.grid import status
from flexact.studies.grid.statistics import (
    LEVEL,
    Comparison,
    by_method,
    gain_and_p,
    paired,
    seconds_ratios,
    spread,
    times,
    two_decimals,
)
from flexact.studies.grid.study import fixed
from flexact.studies.picks.protocol import CHOOSING, Cell, Protocol, Result, methods_of
from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks import TASKS

ORIGINAL = "original"
"""The name of each task's original activation in the overall summary."""


@dataclass(frozen=True)
class Reference:
    """The scores of the fixed candidates, against which regret is measured."""

    scores: Mapping[str, Mapping[int, float]]
    """Candidate → seed → score for the candidates with finished cells. The best candidate on average comes first."""
    seeds: frozenset[int]
    """The seeds that all of these candidates have."""

    def means(self, seeds: Iterable[int]) -> list[float]:
        """Return the mean score of each candidate over some seeds."""
        return [fmean(own[seed] for seed in seeds) for own in self.scores.values()]

    def regret(self, scores: Mapping[int, float]) -> float:
        """Return the regret of scores by seed over the shared seeds: 0 is the best fixed candidate, 1 the median one.

        Returns NaN without a shared seed.
        """
        shared = self.seeds & scores.keys()
        means = self.means(shared) if shared else [math.nan]
        best, middle = max(means), median(means)
        return (best - fmean(scores[seed] for seed in shared)) / (best - middle) if best > middle else math.nan


@dataclass(frozen=True)
class Summary:
    """One method on one task."""

    task: str
    method: str
    scores: Mapping[int, float]
    """Score by seed."""
    against: Comparison | None
    """Comparison with the original activation. None for the original itself, and if no seed is shared."""
    regret: float
    steps_ratio: float
    """Steps relative to a plain run of the original activation, as the mean over shared seeds."""
    seconds_ratio: float
    """The same ratio of seconds, over the seeds on which both ran on the same device."""

    @property
    def role(self) -> str:
        """The method, or `ORIGINAL` if it is the task's original activation."""
        return ORIGINAL if self.method == fixed(TASKS[self.task].original) else self.method


def reference(task: Task, rows: Iterable[Result]) -> Reference | None:
    """Return the reference of a task; None if fewer than two fixed candidates were run, or if they share no seed."""
    done = by_method(row for row in rows if row.task == task.name)
    found = {name: _scores(done[fixed(name)]) for name in task.candidates if fixed(name) in done}
    seeds = frozenset.intersection(*(frozenset(one) for one in found.values())) if found else frozenset()
    if len(found) < 2 or not seeds:
        return None
    order = sorted(found, key=lambda name: -fmean(found[name][seed] for seed in seeds))
    return Reference({name: found[name] for name in order}, seeds)


def summaries(rows: Sequence[Result]) -> list[Summary]:
    """Return a summary per task and method with a finished cell, in the order of the tasks and of their methods."""
    return [one for task in TASKS.values() for one in _of_task(task, [row for row in rows if row.task == task.name])]


def _of_task(task: Task, rows: Sequence[Result]) -> list[Summary]:
    done, known, found = by_method(rows), reference(task, rows), []
    original = done.get(fixed(task.original), {})
    for method in (method for method in methods_of(task) if method in done):
        own, scores = done[method], _scores(done[method])
        pairs = [(row, original[seed]) for seed, row in own.items() if seed in original]
        found.append(
            Summary(
                task.name,
                method,
                scores,
                None if method == fixed(task.original) else paired(scores, _scores(original)),
                math.nan if known is None else known.regret(scores),
                _mean(row.steps / base.steps for row, base in pairs),
                _mean(seconds_ratios(pairs)),
            )
        )
    return found


def _scores(rows: Mapping[int, Result]) -> dict[int, float]:
    return {seed: row.score for seed, row in rows.items()}


def _mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    held = [value for value in values if math.isfinite(value)]
    return fmean(held) if held else math.nan


TITLE = "# The benchmark of picks"
_EXPLAINED = (
    "Scores: mean ± standard deviation over seeds; higher is better. Difference and p (two-sided paired t-test): "
    "against the original activation, over the seeds that both have. Regret: 0 is the best fixed activation in "
    "hindsight, 1 the median one. Steps and time: relative to one plain run of the original activation on the same "
    "seed, including picking. Times are valid only if cells did not share a device (`--jobs 1`)."
)
_REGRETS = ("method", "tasks", "mean regret", "largest regret", "on")
_OVERALL_HEADER = (*_REGRETS, "better than original", "significantly worse", "steps", "time")
_TASK_HEADER = ("method", "seeds", "score", "difference", "p", "regret", "steps", "time")


def table(results: Sequence[Result], protocol: Protocol, asked: Sequence[Cell]) -> str:
    """Return Markdown with the finished cells, and the names of the others."""
    found = summaries(results)
    parts = [TITLE, _EXPLAINED]
    if protocol.steps is not None:
        parts.append(f"A quick test: every plain run has {protocol.steps} steps instead of its task's own number.")
    if every := _overall(found):
        parts.append("## All tasks\n\n" + markdown(_OVERALL_HEADER, every, words=["on"]))
    for name, group in groupby(found, key=lambda one: one.task):
        task = TASKS[name]
        parts.append(
            f"## {task.title} (`{name}`)\n\n"
            + markdown(_header(task), [_row(one, task) for one in group])
            + _notes(task, reference(task, results))
        )
    return "\n\n".join(parts + status.notes(results, asked)) + "\n"


def _header(task: Task) -> list[str]:
    return [f"score in {task.unit}" if name == "score" else name for name in _TASK_HEADER]


def _row(one: Summary, task: Task) -> tuple[str, ...]:
    name = one.method + (" (original)" if one.role == ORIGINAL else "")
    cost = (times(one.steps_ratio), times(one.seconds_ratio))
    scores = (str(len(one.scores)), spread(one.scores, 3), *gain_and_p(one.against, 3))
    return name, *scores, two_decimals(one.regret), *cost


def _overall(found: Sequence[Summary]) -> list[tuple[str, ...]]:
    """Return a row for each method that chooses and for the original, over the tasks on which it has a regret."""
    rows: list[tuple[str, ...]] = []
    for method in (*CHOOSING, ORIGINAL):
        own = [one for one in found if one.role == method and math.isfinite(one.regret)]
        if not own:
            continue
        worst = max(own, key=lambda one: one.regret)
        regrets = two_decimals(fmean(one.regret for one in own)), two_decimals(worst.regret), worst.task
        tests = [one.against for one in own if one.against is not None]
        better = sum(test.gain > 0 for test in tests)
        worse = sum(test.gain < 0 and test.p is not None and test.p < LEVEL for test in tests)
        counts = ("-", "-") if method == ORIGINAL else (str(better), str(worse))
        costs = times(_mean(one.steps_ratio for one in own)), times(_mean(one.seconds_ratio for one in own))
        rows.append((method, str(len(own)), *regrets, *counts, *costs))
    return rows


def _notes(task: Task, known: Reference | None) -> str:
    """Return notes on a task's regrets."""
    if known is None:
        return "\n\nNo regrets: they need at least two fixed activations that share a seed."
    missing = [name for name in task.candidates if name not in known.scores]
    means = known.means(known.seeds)
    left_out = f" Excluded for lack of a finished run: {', '.join(missing)}." if missing else ""
    seeds = f"over seeds {', '.join(map(str, sorted(known.seeds)))}"
    return (
        f"\n\nBest fixed: {next(iter(known.scores))}, {max(means):.3f}; median {median(means):.3f}; {seeds}.{left_out}"
    )
