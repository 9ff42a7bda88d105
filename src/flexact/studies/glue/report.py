"""The sections of the text study's page, from the files in its folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flexact.io.markdown_tables import PAPERS_ROW
from flexact.observe.figures.description import Bars, Panel
from flexact.observe.figures.picture import Picture
from flexact.observe.history import DECISIONS, DROPS
from flexact.report.page import Section, markdown, picture
from flexact.studies.glue.protocol import METHODS, Cell
from flexact.studies.glue.study import Result, Store
from flexact.studies.glue.table import TITLES, columns_of, heading, scores, table
from flexact.studies.glue.tasks import TASKS
from flexact.studies.grid.report import ALL_LAYERS, BASELINE, PENULTIMATE, finished, histories_of, selection

COLOURS = dict(zip(METHODS, (BASELINE, PENULTIMATE, ALL_LAYERS), strict=True))


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Metrics and selection by depth of the cells that are done."""
    store = Store(folder)
    done = finished(store)
    bars = _metrics(done)
    body = markdown(store.shown(table), muted=PAPERS_ROW)
    metrics = Section("Metrics and cost", body, [] if bars is None else [bars])
    histories = {cell: list(map(_shortened, records)) for cell, records in histories_of(store).items()}
    return [metrics, *selection(histories, done, _title)]


def _metrics(done: Sequence[Result]) -> Picture | None:
    """The mean of each metric over seeds, with one bar per method."""
    columns = columns_of(done)
    methods = [method for method in METHODS if any(row.method == method for row in done)]
    bars = []
    for method in methods:
        found = [scores(done, method, column) for column in columns]
        values = [fmean(one.values()) if one else 0.0 for one in found]
        bars.append(Bars(TITLES[method], values, COLOURS[method]))
    panels = [Panel("Dev rows", "percent", rows=[heading(column) for column in columns], bars=bars)] if columns else []
    return picture(
        "metrics",
        "Metrics by activation",
        "The metrics of each task on its dev rows, of the extracted network, mean over seeds.",
        panels,
        across=1,
    )


def _title(cell: Cell) -> str:
    return f"{TITLES[cell.method]} on {TASKS[cell.task].title}"


def _shortened(record: dict[str, Any]) -> dict[str, Any]:
    """A record of the picks with short names for the figure."""
    sites = record["sites"]
    short = {name: re.sub(r".*\.(\d+)\..*", r"layer \1", name) for name in sites}
    if len(set(short.values())) < len(short):  # a layer has several sites
        return record
    named = [name for name in ("sites", DROPS, DECISIONS) if name in record]
    return record | {name: {short[site]: value for site, value in record[name].items()} for name in named}
