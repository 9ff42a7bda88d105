"""Tables in HTML, for the pages of reports and for notebooks. All text is escaped."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from html import escape

from flexact.observe.selection_rows import Row, columns_of, legend


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], muted: Container[int] = ()) -> str:
    """Return a table as HTML. muted: the indices of the rows that are shown muted."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = []
    for number, row in enumerate(rows):
        opening = '<tr class="muted">' if number in muted else "<tr>"
        lines.append(opening + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>")
    return in_box(f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table>")


def outcome_table(rows: Sequence[Row], first: Mapping[str, Sequence[object]] | None = None) -> str:
    """Return a table of sites with the columns and the legend of a printed selection. Undecided sites are muted.

    first: the columns to the left of these; by default the names of the sites.
    """
    shown = columns_of(rows)
    columns = {**(first or {"site": [row.key for row in rows]}), **shown}
    muted = [number for number, row in enumerate(rows) if row.undecided]
    notes = "<br>\n".join(map(escape, legend(rows, shown)))
    return table(tuple(columns), zip(*columns.values(), strict=True), muted) + f"\n<p>{notes}</p>"


def in_box(rendered: str) -> str:
    """Return HTML with each table in a box of its own, which scrolls."""
    # Only the renderer writes these two tags; text from files is already escaped.
    opened = rendered.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return opened.replace("</table>", "</table></div>")
