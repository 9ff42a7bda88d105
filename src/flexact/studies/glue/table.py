"""table.md of the text study: the paper's table of metrics, ours and the paper's, then gains and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from flexact.io.markdown_tables import PAPERS_ROW, counted, markdown
from flexact.studies.averages import mean_and_deviation
from flexact.studies.glue.data import OFFICIAL
from flexact.studies.glue.paper import GLUE
from flexact.studies.glue.protocol import BASELINE, METHODS, Cell, Protocol
from flexact.studies.glue.study import Result, Store
from flexact.studies.glue.tasks import TASKS
from flexact.studies.grid.statistics import Comparison, p_value, paired
from flexact.studies.grid.status import not_done, several_devices
from flexact.studies.grid.store import DONE

TITLES = {
    "fixed": "fixed activation",
    "flexact-penultimate": "Flex-Act (penultimate)",
    "flexact-all": "Flex-Act (all layers)",
}
_SHORT = {"matthews": "Mcc", "f1": "F1", "accuracy": "Acc", "pearson": "Prs", "spearman": "Spr"}
AVERAGE = "average"

Column = tuple[str, str]
"""A task and a metric of it."""


def columns_of(results: Sequence[Result]) -> list[Column]:
    """The metrics of the tasks that have a finished cell, in the paper's order."""
    tasks = {row.task for row in results if row.state == DONE}
    return [(name, metric) for name, task in TASKS.items() if name in tasks for metric in task.metrics]


def averaged(results: Sequence[Result]) -> list[Column]:
    """The columns that the average is over: those of tasks with the benchmark's own rows that have a figure."""
    own = [row for row in results if row.state == DONE and row.split == OFFICIAL]
    return [one for one in columns_of(results) if any(scores(own, method, one) for method in METHODS)]


def scores(results: Sequence[Result], method: str, column: Column) -> dict[int, float]:
    """One metric of a method, by seed; without the seeds on which it is not defined."""
    task, metric = column
    rows = (row for row in results if row.state == DONE and (row.task, row.method) == (task, method))
    return {row.seed: row.metrics[metric] for row in rows if not math.isnan(row.metrics[metric])}


def averages(results: Sequence[Result], method: str) -> dict[int, float]:
    """The average over all metrics, as the paper has it, by seed; of the seeds that have every task."""
    found = [scores(results, method, column) for column in averaged(results)]
    seeds = sorted(set.intersection(*(set(one) for one in found))) if found else []
    return {seed: fmean(one[seed] for one in found) for seed in seeds}


def table_of(store: Store) -> str:
    """Of a folder, as it stands."""
    return table(list(store.results().values()), store.protocol(), store.asked())


def table(results: Sequence[Result], protocol: Protocol, asked: Sequence[Cell]) -> str:
    """Markdown: what is done, and what is not."""
    done = [row for row in results if row.state == DONE]
    methods = [method for method in METHODS if any(row.method == method for row in done)]
    parts = [f"# GLUE with {protocol.model}", _explained(done, protocol)]
    if done:
        parts += [_metrics(done, methods), _gains(done, methods), _costs(done, methods)]
    parts += several_devices(results) + not_done(results, asked)
    return "\n\n".join(part for part in parts if part) + "\n"


def title(method: str) -> str:
    """A method as a person reads it."""
    return TITLES.get(method, method)


def heading(column: Column) -> str:
    """A column as the paper heads it."""
    return f"{TASKS[column[0]].title} {_SHORT[column[1]]}"


def _metrics(done: Sequence[Result], methods: Sequence[str]) -> str:
    columns, over = columns_of(done), averaged(done)
    rows = []
    for method in methods:
        seeds = {row.seed for row in done if row.method == method}
        cells = [_spread(scores(done, method, column)) for column in columns]
        rows.append([title(method), str(len(seeds)), *cells, _spread(averages(done, method))])
        paper = GLUE[method]
        told = [f"{paper[column]:.2f}" for column in columns]
        rows.append([PAPERS_ROW, "", *told, f"{fmean(paper[column] for column in over):.2f}" if over else "-"])
    return markdown(("method", "seeds", *map(heading, columns), AVERAGE), rows)


def _gains(done: Sequence[Result], methods: Sequence[str]) -> str:
    ours = [method for method in methods if method != BASELINE]
    if not ours or BASELINE not in methods:
        return ""
    columns, over = columns_of(done), averaged(done)
    base, rows = GLUE[BASELINE], []
    for method in ours:
        cells = [_gain(paired(scores(done, method, one), scores(done, BASELINE, one))) for one in columns]
        rows.append([title(method), *cells, _gain(paired(averages(done, method), averages(done, BASELINE)))])
        paper = GLUE[method]
        average = f"{fmean(paper[one] - base[one] for one in over):+.2f}" if over else "-"
        rows.append([PAPERS_ROW, *(f"{paper[one] - base[one]:+.2f}" for one in columns), average])
    explained = (
        "## Gains over the fixed activation\n\nIn points, on the same seeds; p of a two-sided paired t-test over them "
        "where there are two seeds or more."
    )
    return f"{explained}\n\n" + markdown(("method", *map(heading, columns), AVERAGE), rows)


def _costs(done: Sequence[Result], methods: Sequence[str]) -> str:
    rows = []
    for task in dict.fromkeys(row.task for row in done):
        for device in dict.fromkeys(row.device for row in done if row.task == task):
            times = {
                method: fmean(found)
                for method in methods
                if (
                    found := [
                        row.step_ms for row in done if (row.task, row.method, row.device) == (task, method, device)
                    ]
                )
            }
            rows.append([TASKS[task].title, device, *(_cost(times, method) for method in methods)])
    heading = "## What a training step costs\n\n"
    if all(math.isnan(row.step_ms) for row in done):
        return f"{heading}Nothing is said: cells shared a device."
    explained = (
        "Milliseconds, the mean over the run and over seeds; in brackets with the fixed activation's taken as 1."
    )
    return f"{heading}{explained}\n\n" + markdown(("task", "device", *map(title, methods)), rows)


def _cost(times: Mapping[str, float], method: str) -> str:
    if method not in times or math.isnan(times[method]):
        return "-"
    base = times.get(BASELINE, math.nan)
    ratio = "" if math.isnan(base) or method == BASELINE else f" ({times[method] / base:.2f}×)"
    return f"{times[method]:.2f}{ratio}"


def _spread(by_seed: Mapping[int, float]) -> str:
    if not by_seed:
        return "-"
    mean, deviation = mean_and_deviation(list(by_seed.values()))
    return f"{mean:.2f}" + (f" ± {deviation:.2f}" if len(by_seed) > 1 else "")


def _gain(found: Comparison | None) -> str:
    if found is None:
        return "-"
    return f"{found.gain:+.2f}" + ("" if found.p is None else f" (p {p_value(found.p)})")


def _explained(done: Sequence[Result], protocol: Protocol) -> str:
    words = (
        "In percent, of the extracted network on the dev rows, mean ± standard deviation over seeds. The average is "
        "over the metrics, as the paper's; the paper's is over the same columns. The paper fine-tunes BERT-base: its "
        "rows are another network's."
    )
    if protocol.limit is not None:
        words += f" Only the first {counted(protocol.limit, 'row')} of each file went in: these are no results."
    left_out = [TASKS[task].title for task in dict.fromkeys(row.task for row in done if row.split != OFFICIAL)]
    if left_out:
        words += (
            f" {', '.join(left_out)} has no training file here: it is trained and measured on two parts of its dev "
            "file, and is not in the average."
        )
    undefined = [row.cell.name for row in done if any(map(math.isnan, row.metrics.values()))]
    if undefined:
        words += (
            f" A correlation is not defined where all answers, or all labels, are the same, and is in no mean: "
            f"{', '.join(undefined)}."
        )
    return words
