"""The data for the pages of all grids, and the section that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexact.report.histories import read_histories
from flexact.report.page import Section
from flexact.studies.grid.pictures import Records, evidence, final_picks, selection_by_depth
from flexact.studies.grid.store import DONE, R, Store
from flexact.studies.grid.study import Row


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
