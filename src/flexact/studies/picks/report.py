"""The section of the benchmark's page: its tables, and a figure of the regrets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexact.observe.figures.description import Bars, Panel
from flexact.observe.figures.picture import Picture
from flexact.report.page import Section, markdown
from flexact.studies.grid.report import finished
from flexact.studies.grid.study import fixed
from flexact.studies.picks.protocol import CHOOSING
from flexact.studies.picks.study import Store
from flexact.studies.picks.table import ORIGINAL, Summary, summaries, table
from flexact.studies.picks.tasks import TASKS

_COLOURS = (
    *("#d55e00", "#e69f00", "#cc79a7", "#56b4e9", "#f0e442", "#8c564b"),
    *("#bcbd22", "#999999", "#009e73", "#0072b2"),
)
COLOURS = dict(zip((*CHOOSING, ORIGINAL), _COLOURS, strict=True))
"""One colour per method, distinct for colour-blind readers."""


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Return the regrets and all tables. An unfinished grid shows its finished cells."""
    store = Store(folder)
    figure = regrets(summaries(finished(store)))
    return [Section("Regret, scores and costs", markdown(store.shown(table)), [] if figure is None else [figure])]


def regrets(found: Sequence[Summary]) -> Picture | None:
    """Draw the regret of each method that chooses and of the original activation, with a row per task."""
    by_key = {
        (one.task, ORIGINAL if one.method == fixed(TASKS[one.task].original) else one.method): one.regret
        for one in found
        if math.isfinite(one.regret)
    }
    tasks = [name for name in TASKS if any((name, method) in by_key for method in COLOURS)]
    if not tasks:
        return None
    bars = [
        Bars(method, [by_key.get((task, method), math.nan) for task in tasks], colour)
        for method, colour in COLOURS.items()
        if any((task, method) in by_key for task in tasks)
    ]
    return Picture(
        "regret",
        "Regret by task",
        "The distance of each method from the best fixed activation in hindsight (0), relative to the distance from "
        "there to the median fixed activation (1). A method below 0 is better than every fixed activation.",
        [Panel("", "regret: 0 best fixed, 1 median fixed", rows=tasks, bars=bars, marks=True)],
        across=1,
    )
