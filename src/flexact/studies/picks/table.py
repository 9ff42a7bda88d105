"""table.md of the benchmark: a summary over the tasks, then a table per task."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from flexact.io.markdown_tables import markdown
from flexact.studies.grid.fixed_methods import fixed
from flexact.studies.grid.statistics import figure, gain_and_p, spread, times
from flexact.studies.grid.status import not_done, several_devices
from flexact.studies.picks.cells import Cell
from flexact.studies.picks.protocol import Protocol
from flexact.studies.picks.statistics import ORIGINAL, Overall, Reference, Summary, overall, reference, summaries
from flexact.studies.picks.study import Result
from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks import TASKS

_EXPLAINED = (
    "Scores: mean ± standard deviation over seeds; higher is better. Difference and p (two-sided paired t-test): "
    "against the original activation, over the seeds that both have. Regret: 0 is the best fixed activation in "
    "hindsight, 1 the median one. Steps and time: relative to one plain run of the original activation on the same "
    "seed, including picking. Times are valid only if cells did not share a device (`--jobs 1`)."
)
_REGRETS = ("method", "tasks", "mean regret", "largest regret", "on")
_OVERALL = (*_REGRETS, "better than original", "significantly worse", "steps", "time")
_TASK = ("method", "seeds", "score", "difference", "p", "regret", "steps", "time")


def table(results: Sequence[Result], protocol: Protocol, asked: Sequence[Cell]) -> str:
    """Return Markdown with the finished cells, and the names of the others."""
    found = summaries(results)
    parts = ["# The benchmark of picks", _EXPLAINED]
    if protocol.steps is not None:
        parts.append(f"A quick test: every plain run has {protocol.steps} steps instead of its task's own number.")
    if every := overall(found):
        parts.append("## All tasks\n\n" + markdown(_OVERALL, [_overall_row(one) for one in every], words=["on"]))
    for name, group in groupby(found, key=lambda one: one.task):
        task = TASKS[name]
        parts.append(
            f"## {task.title} (`{name}`)\n\n"
            + markdown(_header(task), [_row(one, task) for one in group])
            + _notes(task, reference(task, results))
        )
    parts += several_devices(results) + not_done(results, asked)
    return "\n\n".join(parts) + "\n"


def _header(task: Task) -> list[str]:
    return [f"score in {task.unit}" if name == "score" else name for name in _TASK]


def _row(one: Summary, task: Task) -> tuple[str, ...]:
    name = one.method + (" (original)" if one.method == fixed(task.original) else "")
    cost = (times(one.steps_ratio), times(one.seconds_ratio))
    scores = (str(len(one.scores)), spread(one.scores, 3), *gain_and_p(one.against, 3))
    return name, *scores, figure(one.regret), *cost


def _overall_row(one: Overall) -> tuple[str, ...]:
    is_original = one.method == ORIGINAL
    return (
        one.method,
        str(one.tasks),
        figure(one.mean_regret),
        figure(one.largest_regret),
        one.worst_task,
        "-" if is_original else str(one.better),
        "-" if is_original else str(one.significantly_worse),
        times(one.steps_ratio),
        times(one.seconds_ratio),
    )


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
