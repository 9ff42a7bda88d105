"""The parts of the text study's page, from the files in its folder and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flexact.picture import Bars, Panel, Picture
from flexact.studies.grid.pictures import ALL_LAYERS, BASELINE, PENULTIMATE, final_picks, selection_by_depth
from flexact.studies.grid.store import DONE
from flexact.studies.report_data import read_histories
from flexact.studies.report_page import Section, markdown
from flexact.studies.report_panels import picture
from flexact.studies.store import TABLE
from flexact.studies.tables import PAPERS_ROW
from flexact.studies.text.cells import asked
from flexact.studies.text.protocol import METHODS, Protocol
from flexact.studies.text.store import Result, Store
from flexact.studies.text.table import columns_of, heading, scores, title
from flexact.studies.text.table import table as markdown_table
from flexact.studies.text.tasks import TASKS
from flexact.writing import write_whole

COLOURS = dict(zip(METHODS, (BASELINE, PENULTIMATE, ALL_LAYERS), strict=True))


def write_table(store: Store) -> Path:
    """table.md from what is done so far; its path."""
    path = store.folder / TABLE
    write_whole(path, _table(store))
    return path


def sections(folder: Path) -> list[Section]:
    """Metrics and selection by depth; of a grid that is not finished, what there is."""
    store = Store(folder)
    cells, results = asked(store.config()), store.results()
    done = [results[cell] for cell in cells if cell in results and results[cell].state == DONE]
    bars = _metrics(done)
    parts = [Section("Metrics and cost", markdown(_table(store), muted=PAPERS_ROW), [] if bars is None else [bars])]
    histories: dict[tuple[str, str], dict[int, Sequence[dict[str, Any]]]] = {}
    for cell in cells:
        found = read_histories(store.cell_folder(cell)) if store.cell_folder(cell).is_dir() else {}
        if found:
            records = [_shortened(record) for record in next(iter(found.values())).records]
            histories.setdefault((cell.task, cell.method), {})[cell.seed] = records
    pictures = [
        selection_by_depth(f"selection-{task}-{method}", f"{title(method)} on {TASKS[task].title}", by_seed)
        for (task, method), by_seed in histories.items()
    ]
    if pictures:
        parts.append(Section("What was picked, by depth", _pick_tables(done), pictures))
    return parts


def _table(store: Store) -> str:
    config = store.config()
    return markdown_table(list(store.results().values()), Protocol.from_dict(config["protocol"]), asked(config))


def _metrics(done: Sequence[Result]) -> Picture | None:
    """Each metric's mean over seeds, a bar for each method."""
    columns = columns_of(done)
    methods = [method for method in METHODS if any(row.method == method for row in done)]
    bars = []
    for method in methods:
        found = [scores(done, method, column) for column in columns]
        values = [fmean(one.values()) if one else 0.0 for one in found]
        bars.append(Bars(title(method), values, COLOURS[method]))
    panels = [Panel("Dev rows", "percent", rows=[heading(column) for column in columns], bars=bars)] if columns else []
    return picture(
        "metrics",
        "Metrics by activation",
        "Each task's metrics on its dev rows, of the extracted network, the mean over seeds.",
        panels,
        across=1,
    )


def _pick_tables(done: Sequence[Result]) -> str:
    """Site by seed, a table for each kind of run."""
    kinds: dict[tuple[str, str], dict[int, str]] = {}
    for row in done:
        if row.picks:
            kinds.setdefault((row.task, row.method), {})[row.seed] = row.picks
    return "\n".join(
        final_picks(f"{title(method)} on {TASKS[task].title}", by_seed) for (task, method), by_seed in kinds.items()
    )


def _shortened(record: dict[str, Any]) -> dict[str, Any]:
    """A record of the picks with names that fit beside a figure."""
    sites = record["sites"]
    short = {name: re.sub(r".*\.(\d+)\..*", r"layer \1", name) for name in sites}
    if len(set(short.values())) < len(short):  # a layer has several
        return record
    return {**record, "sites": {short[name]: probabilities for name, probabilities in sites.items()}}
