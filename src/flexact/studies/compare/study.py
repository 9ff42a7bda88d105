"""The comparison as a grid study: its training, its folder and its page."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexact.candidates.registry import ORIGINAL
from flexact.observe.figures import drawing
from flexact.observe.figures.colours import INK, candidate_colours, candidate_dash
from flexact.observe.figures.drawing import Picture, style
from flexact.report.page import Section, markdown
from flexact.studies.compare.protocol import ALONE, FLEXACT, Grid, Protocol, Result
from flexact.studies.compare.table import TITLE, summaries, table
from flexact.studies.compare.training import train_cell
from flexact.studies.grid.cell_task import evaluated, read_curve
from flexact.studies.grid.report import FLEXACT_COLOUR, finished, mean_line
from flexact.studies.grid.store import Store as GridStore
from flexact.studies.grid.study import GridStudy, candidate_of

STUDY = GridStudy(
    name="compare",
    title="Comparison with fixed activations",
    command="flexact compare",
    grid=Grid,
    protocol=Protocol,
    row=Result,
    table=table,
    train=train_cell,  # to which `compare` adds the user's functions
    summary=lambda row: f"{row.score:.4g}",
)

Store = functools.partial(GridStore, study=STUDY)
"""The folder of one comparison, for reading."""

_OWN_COLOURS = {ORIGINAL: INK, FLEXACT: FLEXACT_COLOUR, ALONE: "#e69f00"}
_SEED = "#8aa4b8"


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """The table and the figures. An unfinished comparison shows its finished runs."""
    store = Store(folder)
    done = finished(store)
    pictures = [one for one in (paired_differences(done), learning_curves(store, done)) if one is not None]
    text = store.table().removeprefix(TITLE)  # the page has it as its own title
    return [Section("Scores, differences, costs and picks", markdown(text), pictures)]


@style()
def paired_differences(done: Sequence[Result]) -> Picture | None:
    """The difference from the original network on each seed, and its mean, with a row per method."""
    found = {one.method: one.against for one in summaries(done) if one.against is not None}
    if not found:
        return None
    figure, (ax,) = drawing.panels(inches=drawing.row_inches(len(found)))
    for row, own in enumerate(found.values()):
        ax.plot(own.gains, [row] * own.seeds, "D", color=_SEED, label="one seed")
        ax.plot(own.gain, row, "o", color=FLEXACT_COLOUR, label="mean")
    drawing.name_rows(ax, list(found))
    drawing.rule_rows(ax, len(found))
    ax.set_xlabel("score minus that of the original")
    return Picture(
        "differences",
        "Paired differences",
        "The score of each method minus that of the original network on the same seed, and the mean over seeds.",
        drawing.finished(figure),
    )


@style()
def learning_curves(store: GridStore, done: Sequence[Result]) -> Picture | None:
    """The mean score over the evaluations of each method, if `train` yields scores."""
    curves: dict[str, list[dict[int, float]]] = {}
    for row in done:
        if curve := evaluated(read_curve(store.cell_folder(row.cell)), "score"):
            curves.setdefault(row.method, []).append(curve)
    if not curves:
        return None
    colours = candidate_colours(candidate for method in curves if (candidate := candidate_of(method)))
    figure, (ax,) = drawing.panels()
    for method, own in curves.items():
        candidate = candidate_of(method)
        colour = _OWN_COLOURS[method] if candidate is None else colours[candidate]
        dash = "-" if candidate is None else candidate_dash(candidate)
        width = 2.2 if method == FLEXACT else 1.4
        mean_line(ax, method, own, colour, dash, width, band=method in (ORIGINAL, FLEXACT))
    ax.set(xlabel="evaluation", ylabel="score")
    return Picture(
        "curves",
        "Learning curves: mean over seeds",
        "The scores that train yielded, in the order of its evaluations, with a band of one standard deviation for "
        "original and flexact. flexact has a longer run, because picking takes extra steps, and its first scores are "
        "from a network that is still picking. A rewind restores the initial weights, so its score falls there.",
        drawing.finished(figure),
    )
