"""The figure of a grid: accuracy over epochs."""

from __future__ import annotations

import math

from flexact.observe.figures.description import Line, Panel, candidate_colours
from flexact.observe.figures.picture import Picture
from flexact.report.page import picture
from flexact.studies.cifar.methods import FIXED, METHODS
from flexact.studies.cifar.protocol import Cell
from flexact.studies.cifar.statistics import in_order
from flexact.studies.cifar.table import title
from flexact.studies.grid.curves import Curve, evaluated
from flexact.studies.grid.pictures import ALL_LAYERS, BASELINE, PENULTIMATE, mean_line

_RIVALS = ("#e69f00", "#009e73", "#cc79a7", "#666666", "#7a3d1f", "#1e002d")
COLOURS = dict(zip(METHODS, (BASELINE, *_RIVALS, PENULTIMATE, ALL_LAYERS), strict=True)) | candidate_colours(FIXED)
"""The colour of each method in all figures; a fixed activation has the colour of its candidate."""
DASHES = dict.fromkeys(METHODS[1:-2], "dash") | dict.fromkeys(FIXED, "dot")
"""The dashes of the methods whose line is not solid."""


def accuracy_curves(curves: dict[Cell, Curve]) -> Picture | None:
    """Accuracy on the test images over epochs, one line per method. Each data set and model has a panel with the whole
    run, and one with the last quarter of its epochs, which shows small differences."""
    panels = []
    for dataset, model in sorted({(cell.dataset, cell.model) for cell in curves}, key=lambda key: in_order(*key)):
        own = {
            cell: accuracies
            for cell, curve in curves.items()
            if (cell.dataset, cell.model) == (dataset, model) and (accuracies := evaluated(curve, "test_accuracy"))
        }
        if own:
            heading, last = f"{title(model)} on {title(dataset)}", max(max(accuracies) for accuracies in own.values())
            panels.append(Panel(heading, "epoch", "accuracy in %", _lines(own, 0)))
            panels.append(
                Panel(f"{heading}: last quarter", "epoch", "accuracy in %", _lines(own, math.ceil(0.75 * last)))
            )
    return picture(
        "accuracy",
        "Accuracy over epochs: mean over seeds, band of one standard deviation",
        "Accuracy on the test images during training, of the network as it would be extracted: mean over the seeds "
        "that have reached the epoch, with a band of one standard deviation; on the right the last quarter alone.",
        panels,
        across=2,
    )


def _lines(curves: dict[Cell, dict[int, float]], first: int) -> list[Line]:
    """One line per method, starting at an epoch."""
    lines = []
    for method in METHODS + FIXED:
        own = [
            {epoch: accuracy for epoch, accuracy in curve.items() if epoch >= first}
            for cell, curve in curves.items()
            if cell.method == method
        ]
        if any(own):
            width = 2.8 if method.startswith("flexact") else 1.8
            dash = DASHES.get(method, "solid")
            lines.append(mean_line(title(method), own, COLOURS[method], dash, width))
    return lines
