"""Parts of any grid's page: mean lines over seeds, and the picks of each site during training and at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flexact.observe.figures.description import Line, Panel
from flexact.observe.figures.history import picks
from flexact.observe.figures.outcomes import outcomes
from flexact.observe.figures.picture import Picture
from flexact.observe.selection_rows import alike
from flexact.report.build import read_histories
from flexact.report.page import Section, outcome_table, table
from flexact.studies.grid.statistics import mean_and_deviation
from flexact.studies.grid.store import DONE, R, Store
from flexact.studies.grid.study import Row, picked

Records = Sequence[dict[str, Any]]
"""The records of a Recorder."""
BASELINE, PENULTIMATE, ALL_LAYERS = "#0072b2", "#9933ff", "#d55e00"
"""The colours of the methods that every grid compares; colour-blind readers can tell them apart."""


def mean_line(name: str, curves: Sequence[Mapping[int, float]], colour: str, dash: str, width: float) -> Line:
    """The mean of several seeds' curves (figure by epoch), with a band of one standard deviation."""
    epochs = sorted({epoch for curve in curves for epoch in curve})
    spread = [mean_and_deviation([curve[epoch] for curve in curves if epoch in curve]) for epoch in epochs]
    means = [mean for mean, _ in spread]
    band = ([mean - std for mean, std in spread], [mean + std for mean, std in spread])
    return Line(name, epochs, means, colour, dash, width, band)


def selection_by_depth(histories: Mapping[Any, Records], title: Callable[[Any], str]) -> list[Picture]:
    """The leading candidate of each site over the epochs: one figure per kind of run, one panel per seed.

    histories: by cell. title: returns the title of a cell, without its seed.
    """
    return [
        Picture(
            f"selection-{kind}",
            f"Selection by depth: {title(cells[0])}",
            "The candidate with the highest probability at each site during training, with the first layer on top.",
            [_panel(cell.seed, histories[cell]) for cell in cells],
            across=min(3, len(cells)),
        )
        for kind, cells in _kinds(histories).items()
    ]


def final_picks(done: Iterable[Row], title: Callable[[Any], str]) -> str:
    """The picks by site and seed, one table per kind of run that picks."""
    found = {row.cell: picked(row.picks) for row in done if row.picks}
    tables = []
    for cells in _kinds(found).values():
        sites = dict.fromkeys(site for cell in cells for site in found[cell])
        rows = [(site, *(found[cell].get(site, "-") for cell in cells)) for site in sites]
        header = ("site", *(f"seed {cell.seed}" for cell in cells))
        tables.append(f"<h3>Final picks: {title(cells[0])}</h3>\n" + table(header, rows))
    return "\n".join(tables)


def evidence(histories: Mapping[Any, Records], title: Callable[[Any], str]) -> str:
    """The evidence for each pick, one table per kind of run; sites that picked together share a row."""
    tables = []
    for cells in _kinds(histories).values():
        found = [
            (cell.seed, name, row)
            for cell in cells
            for name, row in alike(one for one in outcomes(histories[cell]) if one.committed)
        ]
        if found:
            seeds, names, rows = zip(*found, strict=True)
            table_of_kind = outcome_table({"seed": seeds, "site": names}, rows)
            tables.append(f"<h3>Evidence: {title(cells[0])}</h3>\n{table_of_kind}")
    return "\n".join(tables)


def _kinds(cells: Iterable[Any]) -> dict[str, list[Any]]:
    """The cells that differ only in their seed, by the name that they share."""
    kinds: dict[str, list[Any]] = {}
    for cell in cells:
        kinds.setdefault(cell.name.removesuffix(f"-{cell.seed}"), []).append(cell)
    return kinds


def _panel(seed: int, records: Records) -> Panel:
    """One seed's panel, by epoch if all records have one, and by step otherwise."""
    label = "epoch" if all("epoch" in record for record in records) else "step"
    return dataclasses.replace(picks(records, by=label).panels[0], title=f"seed {seed}")


def finished(store: Store[R]) -> list[R]:
    """The rows of the cells that are done, in the order of the grid."""
    results = store.results()
    return [results[cell] for cell in store.asked() if cell in results and results[cell].state == DONE]


def histories_of(store: Store[Any]) -> dict[Any, Records]:
    """The history of each cell that has one."""
    found = {cell: read_histories(store.cell_folder(cell)) for cell in store.asked()}
    return {cell: next(iter(files.values())).records for cell, files in found.items() if files}


def selection(histories: Mapping[Any, Records], done: Sequence[Row], title: Callable[[Any], str]) -> list[Section]:
    """The section on the picks, if there are any. title: returns the title of a cell, without its seed."""
    if not histories:
        return []
    pictures = selection_by_depth(histories, title)
    body = final_picks(done, title) + evidence(histories, title)
    return [Section("What was picked, by depth", body, pictures)]
