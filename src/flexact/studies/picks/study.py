"""The benchmark as a grid study: its training, its data, its folder and its page."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError
from flexact.observe.figures import drawing
from flexact.observe.figures.drawing import Picture, style
from flexact.report.page import Section, markdown
from flexact.studies.cifar_data.data import Images, load
from flexact.studies.grid.report import finished
from flexact.studies.grid.store import Store as GridStore
from flexact.studies.grid.study import GridStudy
from flexact.studies.picks.protocol import ABLATED, CHOOSING, Grid, Protocol, Result
from flexact.studies.picks.table import ORIGINAL, TITLE, Summary, summaries, table
from flexact.studies.picks.tasks import TASKS
from flexact.studies.picks.train import FOLDER, train_cell


def _load(name: str, folder: Path, protocol: Protocol) -> Images:
    try:
        return load(name, folder, protocol.partial)
    except FlexActError as error:
        needing = ", ".join(task.name for task in TASKS.values() if task.dataset == name)
        raise FlexActError(
            f"{str(error).rstrip()} The tasks {needing} need it: give its folder with --data, or select other --tasks."
        ) from None


STUDY = GridStudy(
    name="picks",
    title="The benchmark of picks",
    grid=Grid,
    protocol=Protocol,
    row=Result,
    table=table,
    train=train_cell,
    load=_load,
    summary=lambda row: f"{row.score:.4g} {TASKS[row.task].unit}",
    folders=(FOLDER,),
)
Store = functools.partial(GridStore, study=STUDY)
"""The folder of one grid."""

_DRAWN = (*(method for method in CHOOSING if method not in ABLATED), ORIGINAL)
COLOURS = dict(zip(_DRAWN, ("#d55e00", "#e69f00", "#cc79a7", "#999999", "#009e73", "#0072b2"), strict=True))
"""One colour per method of the chart, distinct for colour-blind readers. Ablations are only in the tables."""
_SYMBOLS = dict(zip(_DRAWN, "oDsX^P", strict=True))


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Return the regrets and all tables. An unfinished grid shows its finished cells."""
    store = Store(folder)
    figure = regrets(summaries(finished(store)))
    text = store.table().removeprefix(TITLE)  # the page has it as its own title
    return [Section("Regret, scores and costs", markdown(text), [] if figure is None else [figure])]


@style()
def regrets(found: Sequence[Summary]) -> Picture | None:
    """Draw the regret of each method that chooses and of the original activation, with a row per task."""
    by_key = {(one.task, one.role): one.regret for one in found if math.isfinite(one.regret)}
    tasks = [name for name in TASKS if any((name, method) in by_key for method in COLOURS)]
    methods = [method for method in COLOURS if any((task, method) in by_key for task in tasks)]
    if not tasks:
        return None
    figure, (ax,) = drawing.panels(inches=drawing.row_inches(len(tasks), len(methods)))
    for number, method in enumerate(methods):
        values = [by_key.get((task, method), math.nan) for task in tasks]
        rows = drawing.side_by_side(len(tasks), number, len(methods))
        ax.plot(values, rows, _SYMBOLS[method], color=COLOURS[method], label=method)
    drawing.name_rows(ax, tasks)
    drawing.rule_rows(ax, len(tasks))
    ax.set_xlabel("regret: 0 best fixed, 1 median fixed")
    return Picture(
        "regret",
        "Regret by task",
        "The distance of each method from the best fixed activation in hindsight (0), relative to the distance from "
        "there to the median fixed activation (1). A method below 0 is better than every fixed activation.",
        drawing.finished(figure),
    )
