"""The image study as a grid: its training, its data, its folder and its page."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexact.errors import FlexActError
from flexact.observe.figures import drawing
from flexact.observe.figures.colours import candidate_colours
from flexact.observe.figures.drawing import Picture, style
from flexact.report.page import Section, markdown
from flexact.studies.cifar.methods import BASELINE, FIXED, LEARNABLE, METHODS, PLACEMENTS
from flexact.studies.cifar.protocol import Cell, Grid, Protocol, Result
from flexact.studies.cifar.table import in_order, table, title
from flexact.studies.cifar.train import train_cell
from flexact.studies.cifar_data.data import Images, load
from flexact.studies.grid import report
from flexact.studies.grid.cell_task import Curve, evaluated, read_curve
from flexact.studies.grid.store import Store as GridStore
from flexact.studies.grid.study import GridStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _load(name: str, folder: Path, protocol: Protocol) -> Images:
    images = load(name, folder, protocol.partial)
    if len(images.train_y) < protocol.batch:
        raise FlexActError(
            f"{name} has {len(images.train_y)} training images, fewer than one batch (--batch {protocol.batch})."
        )
    return images


STUDY = GridStudy(
    name="cifar",
    title="CIFAR with ResNets: accuracy by activation",
    grid=Grid,
    protocol=Protocol,
    row=Result,
    table=table,
    train=train_cell,
    load=_load,
    summary=lambda row: f"{row.accuracy:.2f} %",
)
Store = functools.partial(GridStore, study=STUDY)
"""The folder of one grid."""

_LEARNABLE_COLOURS = ("#e69f00", "#009e73", "#cc79a7", "#aabb55", "#666666", "#7a3d1f", "#1e002d")
COLOURS = {
    BASELINE: report.BASELINE_COLOUR,
    **dict(zip(LEARNABLE, _LEARNABLE_COLOURS, strict=True)),
    **dict(zip(PLACEMENTS, (report.PENULTIMATE_COLOUR, report.FLEXACT_COLOUR), strict=True)),
    **candidate_colours(FIXED),
}
"""The colour of each method in all figures; a fixed activation has the colour of its candidate."""
DASHES = dict.fromkeys(LEARNABLE, "--") | dict.fromkeys(FIXED, ":")
"""The line styles of the methods whose line is not solid."""


@style()
def accuracy_curves(curves: dict[Cell, Curve]) -> Picture | None:
    """Accuracy on the test images over epochs, one line per method. Each data set and model has a panel with the whole
    run, and one with the last quarter of its epochs, which shows small differences."""
    found: dict[tuple[str, str], dict[Cell, dict[int, float]]] = {}
    for cell, curve in curves.items():
        if accuracies := evaluated(curve, "test_accuracy"):
            found.setdefault((cell.dataset, cell.model), {})[cell] = accuracies
    if not found:
        return None
    figure, axes = drawing.panels(2 * len(found), across=2)
    pairs = zip(axes[::2], axes[1::2], strict=True)
    for (whole, end), key in zip(pairs, sorted(found, key=lambda key: in_order(*key)), strict=True):
        own, heading = found[key], f"{title(key[1])} on {title(key[0])}"
        last = max(max(accuracies) for accuracies in own.values())
        _draw_accuracies(whole, own, 0)
        _draw_accuracies(end, own, math.ceil(0.75 * last))
        whole.set_title(heading)
        end.set_title(f"{heading}: last quarter")
    return Picture(
        "accuracy",
        "Accuracy over epochs: mean over seeds, band of one standard deviation",
        "Accuracy on the test images during training, of the network as it would be extracted: mean over the seeds "
        "that have reached the epoch, with a band of one standard deviation; on the right the last quarter alone.",
        drawing.finished(figure),
    )


def _draw_accuracies(ax: Axes, curves: dict[Cell, dict[int, float]], first: int) -> None:
    """Draw one line per method, starting at an epoch."""
    for method in METHODS + FIXED:
        own = [
            {epoch: accuracy for epoch, accuracy in curve.items() if epoch >= first}
            for cell, curve in curves.items()
            if cell.method == method
        ]
        if any(own):
            width = 2.2 if method.startswith("flexact") else 1.4
            report.mean_line(ax, title(method), own, COLOURS[method], DASHES.get(method, "-"), width)
    ax.set(xlabel="epoch", ylabel="accuracy in %")


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """The table, the accuracy over epochs and the picks by depth. Unfinished cells are drawn up to their last epoch."""
    store = Store(folder)
    curves = {cell: curve for cell in store.asked() if (curve := read_curve(store.cell_folder(cell)))}
    figure = accuracy_curves(curves)
    accuracy = Section("Accuracy and cost", markdown(store.table()), [] if figure is None else [figure])
    return [accuracy, *report.selection(report.histories_of(store), _title)]


def _title(cell: Cell) -> str:
    return f"{title(cell.method)}, {title(cell.model)} on {title(cell.dataset)}"
