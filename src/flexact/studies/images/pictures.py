"""The figures of a grid: accuracy over epochs, what a step costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexact.picture import Bars, Line, Panel, Picture, candidate_colours
from flexact.studies.grid.curves import Curve
from flexact.studies.grid.pictures import ALL_LAYERS, BASELINE, PENULTIMATE, mean_line
from flexact.studies.images.methods import FIXED, METHODS
from flexact.studies.images.protocol import Cell
from flexact.studies.images.statistics import Summary
from flexact.studies.images.table import title
from flexact.studies.report_panels import picture

_RIVALS = ("#e69f00", "#009e73", "#cc79a7", "#9933ff", "#7a3d1f")
COLOURS = dict(zip(METHODS, (BASELINE, *_RIVALS, PENULTIMATE, ALL_LAYERS), strict=True)) | candidate_colours(FIXED)
"""One a method, in every figure; a fixed activation has the colour that it has as a candidate."""
DASHES = dict.fromkeys(METHODS[1:-2], "dash") | dict.fromkeys(FIXED, "dot")
"""Of the methods whose line is not solid."""


def accuracy_curves(curves: dict[Cell, Curve]) -> Picture | None:
    """Accuracy on the test images over epochs: a panel for each data set and model, a line for each method."""
    panels = []
    for dataset, model in dict.fromkeys((cell.dataset, cell.model) for cell in curves):
        lines = []
        for method in METHODS + FIXED:
            mine = [
                curve.evaluated
                for cell, curve in curves.items()
                if (cell.dataset, cell.model, cell.method) == (dataset, model, method) and curve.evaluated
            ]
            if mine:
                lines.append(_mean_line(method, mine))
        if lines:
            panels.append(Panel(f"{title(model)} on {title(dataset)}", "epoch", "accuracy in %", lines))
    return picture(
        "accuracy",
        "Accuracy over epochs",
        "Accuracy on the test images as training goes on, of the network as it would be extracted: the mean over the "
        "seeds that have come so far, with a band of one standard deviation.",
        panels,
        across=min(2, max(1, len(panels))),
    )


def costs(found: Sequence[Summary]) -> Picture | None:
    """How long a training step takes, ReLU's taken as 1."""
    panels = []
    for dataset, model in dict.fromkeys((one.dataset, one.model) for one in found):
        rows = [one for one in found if (one.dataset, one.model) == (dataset, model) and not math.isnan(one.cost)]
        if rows:
            bars = [
                Bars(title(one.method), [one.cost * (one is row) for row in rows], COLOURS[one.method]) for one in rows
            ]
            heading, label = f"{title(model)} on {title(dataset)}", "time of a step, ReLU = 1"
            panels.append(Panel(heading, label, rows=[bar.name for bar in bars], bars=bars, stacked=True))
    return picture(
        "cost",
        "What a training step costs",
        "The time of a training step, the median over epochs, ReLU's on the same device taken as 1. Epochs in which "
        "kernels are built, and the few in which sites still pick, weigh no more than any other.",
        panels,
        across=min(2, max(1, len(panels))),
    )


def _mean_line(method: str, curves: Sequence[dict[int, float]]) -> Line:
    width = 2.8 if method.startswith("flexact") else 1.8
    return mean_line(title(method), curves, COLOURS[method], DASHES.get(method, "solid"), width)
