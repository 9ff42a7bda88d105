"""Parts of any grid's page: mean lines over seeds, and the picks of each site with their evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flexact.observe.figures import drawing
from flexact.observe.figures.colours import candidate_colours
from flexact.observe.figures.drawing import Picture, style
from flexact.observe.figures.history import pick_map
from flexact.observe.figures.outcomes import by_site, outcomes
from flexact.observe.html_tables import outcome_table
from flexact.observe.selection_rows import alike
from flexact.report.build import read_histories
from flexact.report.page import Section
from flexact.studies.grid.statistics import mean_and_deviation
from flexact.studies.grid.store import Store
from flexact.studies.grid.study import DONE, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[dict[str, Any]]
"""The records of a Recorder."""
BASELINE_COLOUR = candidate_colours(["relu"])["relu"]
PENULTIMATE_COLOUR, FLEXACT_COLOUR = "#9933ff", "#d55e00"
"""The colours of the methods that every grid compares; colour-blind readers can distinguish them."""


def mean_line(
    ax: Axes, name: str, curves: Sequence[Mapping[int, float]], colour: str, dash: str, width: float, band: bool = True
) -> None:
    """Draw the mean of several seeds' curves (value by epoch), with a band of one standard deviation."""
    epochs = sorted({epoch for curve in curves for epoch in curve})
    spread = [mean_and_deviation([curve[epoch] for curve in curves if epoch in curve]) for epoch in epochs]
    means = [mean for mean, _ in spread]
    around = ([mean - std for mean, std in spread], [mean + std for mean, std in spread])
    drawing.line(ax, name, epochs, means, colour, dash, width, around if band else None)


@style()
def selection_by_depth(kind: str, title: str, by_seed: Mapping[int, Records]) -> Picture:
    """The leading candidate of each site over the epochs, for one kind of run: one panel per seed."""
    sites = max(len(by_site(records[-1:])[1]) for records in by_seed.values())
    figure, axes = drawing.panels(len(by_seed), across=3, inches=drawing.row_inches(sites))
    colours: dict[str, str] = {}
    for ax, (seed, records) in zip(axes, by_seed.items(), strict=True):
        by = "epoch" if all("epoch" in record for record in records) else "step"
        colours |= pick_map(ax, records, by)
        ax.set_title(f"seed {seed}")
    return Picture(
        f"selection-{kind}",
        f"Selection by depth: {title}",
        "The candidate with the highest probability at each site during training, with the first layer on top.",
        drawing.finished(figure, colours),
    )


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
            table_of_kind = outcome_table(rows, {"seed": seeds, "site": names})
            tables.append(f"<h3>Evidence: {title(cells[0])}</h3>\n{table_of_kind}")
    return "\n".join(tables)


def _kinds(cells: Iterable[Any]) -> dict[str, list[Any]]:
    """The cells that differ only in their seed, by the name that they share."""
    kinds: dict[str, list[Any]] = {}
    for cell in cells:
        kinds.setdefault(cell.name.removesuffix(f"-{cell.seed}"), []).append(cell)
    return kinds


def finished(store: Store) -> list[Row]:
    """The rows of the cells that are done, in the order of the grid."""
    results = store.results()
    return [results[cell] for cell in store.asked() if cell in results and results[cell].state == DONE]


def histories_of(store: Store) -> dict[Any, Records]:
    """The history of each cell that has one."""
    found = {cell: read_histories(store.cell_folder(cell)) for cell in store.asked()}
    return {cell: next(iter(files.values())).records for cell, files in found.items() if files}


def selection(histories: Mapping[Any, Records], title: Callable[[Any], str]) -> list[Section]:
    """The section on the picks, if there are any. title: returns the title of a cell, without its seed."""
    if not histories:
        return []
    pictures = [
        selection_by_depth(kind, title(cells[0]), {cell.seed: histories[cell] for cell in cells})
        for kind, cells in _kinds(histories).items()
    ]
    return [Section("What was picked, by depth", evidence(histories, title), pictures)]
