"""The text study as a grid: its training, its data, its folder and its page."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flexact.io.markdown_tables import PAPERS_ROW
from flexact.observe.figures import drawing
from flexact.observe.figures.drawing import Picture, style
from flexact.report.page import Section, markdown
from flexact.studies.glue.data import TASKS, TextData, check_rows, load
from flexact.studies.glue.encoder import check_encoder
from flexact.studies.glue.protocol import BASELINE, FIXED, METHODS, PLACEMENTS, Cell, Grid, Protocol, Result
from flexact.studies.glue.table import TITLES, columns_of, heading, scores, table
from flexact.studies.glue.train import train_cell
from flexact.studies.grid import report
from flexact.studies.grid.store import Store as GridStore
from flexact.studies.grid.study import GridStudy


def _summary(row: Result) -> str:
    return ", ".join(f"{name} {'-' if math.isnan(value) else f'{value:.2f}'}" for name, value in row.metrics.items())


def _load(name: str, folder: Path, protocol: Protocol) -> TextData:
    data = load(name, folder).first(protocol.limit)
    check_rows(data)
    check_encoder(protocol.folder, protocol.length)
    return data


STUDY = GridStudy(
    name="glue",
    title="GLUE with a pretrained encoder: metrics by activation",
    grid=Grid,
    protocol=Protocol,
    row=Result,
    table=table,
    train=train_cell,
    load=_load,
    summary=_summary,
    data=Path("data/glue"),
    operational=("keep", "folder"),
)
Store = functools.partial(GridStore, study=STUDY)
"""The folder of one grid."""

_FIXED_COLOURS = ("#222222", "#7a3d1f", "#88ccee", "#ddcc77")
COLOURS = {
    BASELINE: report.BASELINE_COLOUR,
    **dict(zip(FIXED, _FIXED_COLOURS, strict=True)),
    **dict(zip(PLACEMENTS, (report.PENULTIMATE_COLOUR, report.FLEXACT_COLOUR), strict=True)),
}


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """The metrics of the finished cells, and the picks by depth of all cells that have started."""
    store = Store(folder)
    done = report.finished(store)
    bars = _metrics(done)
    body = markdown(store.table(), muted=PAPERS_ROW)
    metrics = Section("Metrics and cost", body, [] if bars is None else [bars])
    return [metrics, *report.selection(report.histories_of(store), _title)]


@style()
def _metrics(done: Sequence[Result]) -> Picture | None:
    """The mean of each metric over seeds, with one bar per method."""
    columns = columns_of(done)
    methods = [method for method in METHODS if any(row.method == method for row in done)]
    if not columns:
        return None
    figure, (ax,) = drawing.panels(inches=drawing.row_inches(len(columns), len(methods)))
    for number, method in enumerate(methods):
        found = [scores(done, method, column) for column in columns]
        values = [fmean(one.values()) if one else 0.0 for one in found]
        rows = drawing.side_by_side(len(columns), number, len(methods))
        ax.barh(rows, values, 0.8 / len(methods), color=COLOURS[method], label=TITLES[method])
    drawing.name_rows(ax, [heading(column) for column in columns])
    ax.set_xlabel("percent")
    return Picture(
        "metrics",
        "Metrics by activation",
        "The metrics of each task on its dev rows, of the extracted network, mean over seeds.",
        drawing.finished(figure),
    )


def _title(cell: Cell) -> str:
    return f"{TITLES[cell.method]} on {TASKS[cell.task].title}"
