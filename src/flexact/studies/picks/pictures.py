"""The figures of the benchmark: regret by task, and what Flex-Act picked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexact.observe.figures.description import Bars, Grid, Panel, candidate_colours
from flexact.observe.figures.picture import Picture
from flexact.report.page import picture
from flexact.studies.picks.methods import CHOOSING, fixed
from flexact.studies.picks.statistics import ORIGINAL, Summary
from flexact.studies.picks.study import Result
from flexact.studies.picks.tasks import TASKS

COLOURS = dict(
    zip(
        (*CHOOSING, ORIGINAL),
        (
            *("#d55e00", "#e69f00", "#cc79a7", "#56b4e9", "#f0e442", "#8c564b"),
            *("#bcbd22", "#999999", "#009e73", "#0072b2"),
        ),
        strict=True,
    )
)
"""One a method, which colour-blind readers tell apart."""


def regrets(found: Sequence[Summary]) -> Picture | None:
    """The regret of each method that chooses and of the original activation, a row a task."""
    by_key = {(one.task, _shown(one)): one.regret for one in found}
    tasks = [name for name in TASKS if any(math.isfinite(by_key.get((name, method), math.nan)) for method in COLOURS)]
    bars = [
        Bars(method, [by_key.get((task, method), math.nan) for task in tasks], colour)
        for method, colour in COLOURS.items()
        if any(math.isfinite(by_key.get((task, method), math.nan)) for task in tasks)
    ]
    panel = Panel("", "regret: 0 best fixed, 1 median fixed", rows=tasks, bars=bars) if tasks else None
    return picture(
        "regret",
        "Regret by task",
        "How far each method is from the best fixed activation in hindsight (0), in units of the distance from there "
        "to the median fixed activation (1). Below 0 it is better than every fixed activation.",
        [panel],
        across=1,
    )


def picks_maps(done: Sequence[Result]) -> Picture | None:
    """What Flex-Act picked: for each task the pick of every site and seed."""
    rows = [row for row in done if row.method == "flexact" and row.picks]
    panels = [_picks_map(name, [row for row in rows if row.task == name]) for name in TASKS]
    return picture(
        "picks",
        "What Flex-Act picked",
        "The pick of each site, the first layer on top, for every seed.",
        panels,
        across=3,
    )


def _picks_map(task: str, rows: Sequence[Result]) -> Panel | None:
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: row.seed)
    sites = list(dict.fromkeys(site for row in rows for site in row.picked))
    candidates = TASKS[task].candidates
    colours = candidate_colours(candidates)
    picked = [[row.picked.get(site, "") for row in rows] for site in sites]
    grid = Grid(
        [row.seed for row in rows],
        [[float(candidates.index(pick)) if pick in candidates else math.nan for pick in line] for line in picked],
        [(name, colours[name]) for name in candidates],
        picked,
    )
    return Panel(task, "seed", rows=sites, grid=grid)


def _shown(one: Summary) -> str:
    return ORIGINAL if one.method == fixed(TASKS[one.task].original) else one.method
