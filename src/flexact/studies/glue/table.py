"""table.md of the text study: our metrics and the paper's, then gains, statistics, a verdict and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from flexact.io.markdown_tables import PAPERS_ROW, counted, markdown
from flexact.studies.glue.data import OF_DEV, OFFICIAL, TASKS
from flexact.studies.glue.protocol import BASELINE, METHODS, Cell, Protocol, Result
from flexact.studies.grid import status
from flexact.studies.grid.statistics import (
    LEVEL,
    Comparison,
    effects_table,
    explained,
    gain_and_p,
    holm,
    p_value,
    paired,
    spread,
    step_costs,
)
from flexact.studies.grid.study import DONE

COLUMNS = [(name, metric) for name, task in TASKS.items() for metric in task.metrics]
"""Each task with each of its metrics, in the order of `TASKS`."""
_GLUE_ROWS = {
    "fixed": (56.53, 88.85, 84.07, 88.64, 88.48, 90.66, 65.70, 56.34),
    "flexact-penultimate": (60.08, 90.07, 85.78, 89.20, 88.82, 91.14, 66.43, 56.34),
    "flexact-all": (59.40, 90.78, 85.85, 89.70, 88.92, 91.22, 66.06, 61.97),
}
_PAPERS_COLUMNS = [column for column in COLUMNS if column[0] in ("cola", "mrpc", "stsb", "qnli", "rte", "wnli")]
GLUE = {method: dict(zip(_PAPERS_COLUMNS, row, strict=True)) for method, row in _GLUE_ROWS.items()}
"""The paper's tab:glue_results, for BERT: by method, then by task and metric. Its average is over all eight."""

TITLES = {
    "fixed": "fixed activation",
    "relu": "ReLU",
    "gelu": "GELU",
    "silu": "SiLU",
    "mish": "Mish",
    "flexact-penultimate": "Flex-Act (penultimate)",
    "flexact-all": "Flex-Act (all layers)",
}
"""The names of the methods for readers."""
ARTEFACT = "wnli"
"""The task whose dev rows contradict its training rows: a network that learns nothing scores best (docs/text.md)."""
_MAJORITY_OF_DEV = {"qnli": 100 * 528 / 1053}
"""The majority-class rates of dev rows that are part of a dev file."""
_SHORT = {"matthews": "Mcc", "f1": "F1", "accuracy": "Acc", "pearson": "Prs", "spearman": "Spr"}

Column = tuple[str, str]
"""A task and one of its metrics."""


def columns_of(results: Sequence[Result]) -> list[Column]:
    """The columns of the tasks with a finished cell."""
    tasks = {row.task for row in results if row.state == DONE}
    return [column for column in COLUMNS if column[0] in tasks]


def averaged(results: Sequence[Result]) -> list[Column]:
    """The columns of the average: those with a value, of tasks that use the benchmark's own rows."""
    own = [row for row in results if row.state == DONE and row.split == OFFICIAL]
    return [one for one in columns_of(results) if any(scores(own, method, one) for method in METHODS)]


def scores(results: Sequence[Result], method: str, column: Column) -> dict[int, float]:
    """One metric of a method by seed, without the seeds for which it is undefined."""
    task, metric = column
    rows = (row for row in results if row.state == DONE and (row.task, row.method) == (task, method))
    return {row.seed: row.metrics[metric] for row in rows if not math.isnan(row.metrics[metric])}


def averages(results: Sequence[Result], method: str, without: str = "") -> dict[int, float]:
    """The average over all metrics by seed, as in the paper, for the seeds that have every task.

    without: a task that is left out.
    """
    found = [scores(results, method, column) for column in averaged(results) if column[0] != without]
    seeds = sorted(set.intersection(*(set(one) for one in found))) if found else []
    return {seed: fmean(one[seed] for one in found) for seed in seeds}


def heading(column: Column) -> str:
    """The heading of a column, as in the paper."""
    return f"{TASKS[column[0]].title} {_SHORT[column[1]]}"


def table(results: Sequence[Result], protocol: Protocol, asked: Sequence[Cell]) -> str:
    """The table in Markdown, with a list of the cells that are not done."""
    done = [row for row in results if row.state == DONE]
    methods = [method for method in METHODS if any(row.method == method for row in done)]
    network = "a small encoder from random weights" if protocol.from_scratch else protocol.model
    parts = [f"# GLUE with {network}", _explained(done, protocol)]
    if done:
        parts += [_metrics(done, methods, protocol), _gains(done, methods), *_statistics(done, methods)]
        ordered = [BASELINE, *(method for method in methods if method != BASELINE)]
        parts.append(step_costs(done, ordered, lambda row: TASKS[row.task].title, lambda method: TITLES[method]))
    parts += status.notes(results, asked)
    return "\n\n".join(part for part in parts if part) + "\n"


def _metrics(done: Sequence[Result], methods: Sequence[str], protocol: Protocol) -> str:
    columns, over, rows = columns_of(done), averaged(done), []
    splits = {row.task: row.split for row in done}
    rates = [majority(*column, splits[column[0]]) for column in columns]
    if any(rates) and protocol.limit is None:
        rows.append(["majority class", "", *rates, ""])
    for method in methods:
        seeds = {row.seed for row in done if row.method == method}
        cells = [spread(scores(done, method, column)) for column in columns]
        rows.append([TITLES[method], str(len(seeds)), *cells, spread(averages(done, method))])
        if method in GLUE:
            rows.append([PAPERS_ROW, "", *_papers(GLUE[method], columns, over, "")])
    return markdown(("method", "seeds", *map(heading, columns), "average"), rows)


def _gains(done: Sequence[Result], methods: Sequence[str]) -> str:
    ours = [method for method in methods if method != BASELINE]
    if not ours or BASELINE not in methods:
        return ""
    columns, over, rows = columns_of(done), averaged(done), []
    for method in ours:
        cells = [_gain(scores(done, method, one), scores(done, BASELINE, one)) for one in columns]
        rows.append([TITLES[method], *cells, _gain(averages(done, method), averages(done, BASELINE))])
        if method in GLUE:
            gains = {one: GLUE[method][one] - GLUE[BASELINE][one] for one in GLUE[method]}
            rows.append([PAPERS_ROW, *_papers(gains, columns, over, "+")])
    explained = (
        "## Gains over the fixed activation\n\nIn points, on the same seeds; p of a two-sided paired t-test over them "
        "if there are two seeds or more."
    )
    return f"{explained}\n\n" + markdown(("method", *map(heading, columns), "average"), rows)


def majority(task: str, metric: str, split: str) -> str:
    """The accuracy in percent of always answering a task's more frequent class; empty for another metric.

    >>> majority("wnli", "accuracy", "official"), majority("mrpc", "f1", "official")
    ('56.34', '')
    """
    rate = {OFFICIAL: TASKS[task].majority, OF_DEV: _MAJORITY_OF_DEV.get(task)}.get(split)
    return "" if metric != "accuracy" or rate is None else f"{rate:.2f}"


def _statistics(done: Sequence[Result], methods: Sequence[str]) -> list[str]:
    """The statistics of the average, with and without the task that is an artefact, and a verdict."""
    average, without = (
        {
            TITLES[method]: paired(averages(done, method, task), averages(done, BASELINE, task))
            for method in methods
            if method != BASELINE
        }
        for task in ("", ARTEFACT)
    )
    if not any(without.values()):
        return []
    artefact = TASKS[ARTEFACT].title
    if all(row.task != ARTEFACT for row in done):
        tables, verdict = [effects_table(without)], f"**Verdict.** {_verdict(without)}"
    else:
        both = {"All tasks.": effects_table(average), f"Without {artefact}.": effects_table(without)}
        tables = [f"{about}\n\n{shown}" for about, shown in both.items() if shown]
        verdict = (
            f"**Verdict, without {artefact}.** {_verdict(without)} {artefact} is left out, because its dev rows "
            "contradict its training rows: a network that has learned nothing scores higher than one that has learned "
            "its training rows."
        )
    meaning = [explained("the fixed activation")] if any(tables) else []
    return ["## Statistics of the average", *meaning, *tables, verdict]


def _verdict(effects: Mapping[str, Comparison | None]) -> str:
    known = {title: one for title, one in effects.items() if one is not None}
    adjusted = holm([one.p for one in known.values()])
    return " ".join(_sentence(title, one, p) for (title, one), p in zip(known.items(), adjusted, strict=True))


def _sentence(title: str, one: Comparison, p: float | None) -> str:
    if p is None:
        return f"{title}: {one.gain:+.2f} points, without a test."
    found = "no significant difference" if p >= LEVEL else "a gain" if one.gain > 0 else "a loss"
    return f"{title}: {one.gain:+.2f} points (p {p_value(p)} after Holm's correction), {found}."


def _papers(figures: Mapping[Column, float], columns: Sequence[Column], over: Sequence[Column], sign: str) -> list[str]:
    """The paper's figures in these columns, and their average; "-" for what the paper does not have."""
    average = f"{fmean(figures[one] for one in over):{sign}.2f}" if over and figures.keys() >= set(over) else "-"
    return [*(f"{figures[one]:{sign}.2f}" if one in figures else "-" for one in columns), average]


def _gain(ours: Mapping[int, float], baseline: Mapping[int, float]) -> str:
    gain, p = gain_and_p(paired(ours, baseline))
    return gain if p == "-" else f"{gain} (p {p})"


def _explained(done: Sequence[Result], protocol: Protocol) -> str:
    words = (
        "In percent, of the extracted network on the dev rows, mean ± standard deviation over seeds. The average is "
        "over the metrics, as in the paper; the paper's is over the same columns. The fixed activation is the "
        "encoder's own, which is GELU in BERT; the other fixed ones replace it in all layers, but not in the pooler. "
        "The paper fine-tunes BERT-base, so its rows are from another network."
    )
    if protocol.from_scratch:
        words += " Here a small encoder of 4 layers of 256 units was trained from random weights."
    if protocol.limit is not None:
        words += f" Only the first {counted(protocol.limit, 'row')} of each file were used, so these are not results."
    left_out = [TASKS[task].title for task in dict.fromkeys(row.task for row in done if row.split != OFFICIAL)]
    if left_out:
        words += (
            f" {', '.join(left_out)} has no training file here: it is trained and evaluated on two parts of its dev "
            "file, and is not in the average."
        )
    undefined = [row.cell.name for row in done if any(map(math.isnan, row.metrics.values()))]
    if undefined:
        words += (
            " A correlation is undefined if all answers or all labels are the same, and is then excluded from means: "
            f"{', '.join(undefined)}."
        )
    return words
