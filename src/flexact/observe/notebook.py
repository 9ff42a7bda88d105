"""A selection and a Recorder as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from flexact.io.markdown_tables import counted
from flexact.observe.figures import history as plots
from flexact.observe.figures.colours import GREY, candidate_colours
from flexact.observe.figures.drawing import can_draw
from flexact.observe.history import Records, number_names
from flexact.observe.selection_rows import Row, columns_of, legend

_BAR = 'width="120" height="12" viewBox="0 0 1 1" preserveAspectRatio="none"'
MAX_ROWS = 200
"""Maximum number of rows that a notebook shows; sites that pick per channel have many."""


def selection_html(rows: Sequence[Row]) -> str:
    """Return a table with a bar of the probabilities in each row; undecided rows are grey."""
    notes = [*([f"The first {MAX_ROWS} of {len(rows)} rows"] if len(rows) > MAX_ROWS else []), *legend(rows)]
    rows = rows[:MAX_ROWS]
    colours = candidate_colours(name for row in rows for name in row.probabilities)
    columns = {"site": [row.key for row in rows], **columns_of(rows)}
    head = "".join(f"<th>{title}</th>" for title in (*columns, "probabilities"))
    lines = []
    for row, cells in zip(rows, zip(*columns.values(), strict=True), strict=True):
        grey = f' style="color:{GREY}"' if row.undecided else ""
        shown = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
        lines.append(f"<tr{grey}>{shown}<td>{_bar(row, colours)}</td></tr>")
    below = f"<small>{'<br>'.join(map(escape, notes))}</small>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{below}"


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


def _bar(row: Row, colours: Mapping[str, str]) -> str:
    """Return the probabilities of a row as one stacked bar."""
    start, parts = 0.0, []
    for name, p in row.probabilities.items():
        if p > 0:
            title = f"<title>{escape(name)}: {p:.3f}</title>"
            parts.append(f'<rect x="{start:.4f}" width="{p:.4f}" height="1" fill="{colours[name]}">{title}</rect>')
            start += p
    return f"<svg {_BAR}>{''.join(parts)}</svg>"
