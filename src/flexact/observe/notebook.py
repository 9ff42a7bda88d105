"""A selection and a Recorder as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from flexact.io.markdown_tables import counted
from flexact.observe.figures import history as plots
from flexact.observe.figures.drawing import can_draw
from flexact.observe.history import Records, number_names
from flexact.observe.html_tables import outcome_table
from flexact.observe.selection_rows import Row

MAX_ROWS = 200
"""Maximum number of rows that a notebook shows; sites that pick per channel have many."""


def selection_html(rows: Sequence[Row]) -> str:
    """Return the table of the first rows."""
    shown = rows[:MAX_ROWS]
    note = f"<p>The first {MAX_ROWS} of {len(rows)} rows</p>" if len(rows) > MAX_ROWS else ""
    return outcome_table({"site": [row.key for row in shown]}, shown) + note


def recorder_html(history: Records, rows: Sequence[Row]) -> str:
    """Return curves of the recorded numbers and of the probabilities, then the selection.

    Without matplotlib, a note takes the place of the curves.
    """
    if not history:
        return f"<p>No records yet.</p>{selection_html(rows)}"
    last = f"{counted(len(history), 'record')}, the last of step {history[-1]['step']}."
    curves = "<p>Install matplotlib to see curves here: pip install 'flexact[plots]'.</p>"
    if can_draw():
        draw = [plots.numbers, plots.curves] if number_names(history) else [plots.curves]
        curves = "\n".join(function(history).svg() for function in draw)
    return f"<p>{last}</p>{curves}{selection_html(rows)}"
