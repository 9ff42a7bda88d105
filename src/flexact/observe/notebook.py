"""A selection and a Recorder as HTML, for notebooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from flexact.io.markdown_tables import counted
from flexact.observe.figures import history as plots
from flexact.observe.figures.description import Panel, candidate_colours
from flexact.observe.figures.picture import Picture
from flexact.observe.figures.svg_backend import chart_style, escape, panels
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
        grey = ' style="color:#8c959f"' if row.undecided else ""
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f"<tr{grey}>{shown}<td>{_bar(row, colours)}</td></tr>")
    below = f"<small>{'<br>'.join(map(escape, notes))}</small>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{below}"


def recorder_html(history: Records, rows: Sequence[Row]) -> str:
    """Return curves of the first recorded number, the loss as a rule, and of the probabilities; then the selection."""
    if not history:
        return f"<p>No records yet.</p>{selection_html(rows)}"
    shown: list[Panel] = [dataclasses.replace(plots.curves(history).panels[0], title="probability")]
    if number_names(history):
        shown.insert(0, plots.numbers(history).panels[0])
    picture = Picture("recorder", "Recorder", "", shown, across=2)
    last = f"{counted(len(history), 'record')}, the last of step {history[-1]['step']}."
    return f"<style>{chart_style()}</style><p>{last}</p>{panels(picture)}{selection_html(rows)}"


def _bar(row: Row, colours: Mapping[str, str]) -> str:
    """Return the probabilities of a row as one stacked bar."""
    start, parts = 0.0, []
    for name, p in row.probabilities.items():
        if p > 0:
            title = f"<title>{escape(name)}: {p:.3f}</title>"
            parts.append(f'<rect x="{start:.4f}" width="{p:.4f}" height="1" fill="{colours[name]}">{title}</rect>')
            start += p
    return f"<svg {_BAR}>{''.join(parts)}</svg>"
