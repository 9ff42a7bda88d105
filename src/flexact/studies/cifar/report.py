"""The sections of a grid's page, from the files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexact.report.page import Section, markdown
from flexact.studies.cifar.pictures import accuracy_curves
from flexact.studies.cifar.protocol import Cell
from flexact.studies.cifar.study import Store
from flexact.studies.cifar.table import table, title
from flexact.studies.grid.curves import read_curve
from flexact.studies.grid.report import finished, histories_of, selection


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Accuracy and selection by depth of the cells that are done."""
    store = Store(folder)
    done = finished(store)
    curves = {cell: curve for cell in store.asked() if (curve := read_curve(store.cell_folder(cell)))}
    figure = accuracy_curves(curves)
    accuracy = Section("Accuracy and cost", markdown(store.shown(table)), [] if figure is None else [figure])
    return [accuracy, *selection(histories_of(store), done, _title)]


def _title(cell: Cell) -> str:
    return f"{title(cell.method)}, {title(cell.model)} on {title(cell.dataset)}"
