"""The report's page: one self-contained HTML file.

All text from files is escaped, and the page's content security policy forbids loading external resources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

from flexact.observe.figures.drawing import Picture
from flexact.observe.selection_rows import Row, columns_of, legend

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_LONG = 16
"""A first cell with more letters than this is wrapped if the table is wider than the page."""


class Section(NamedTuple):
    """A part of the page under its own heading: HTML, then figures."""

    title: str
    body: str
    pictures: Sequence[Picture]


def file_name(name: str) -> str:
    """Return a name without characters that have a meaning in paths or URLs."""
    return re.sub(r"[^\w.-]", "_", name)


def page(title: str, facts: Mapping[str, object], sections: Iterable[Section], details: Mapping[str, object]) -> str:
    """Return the page. facts: the line under the title. details: the content of the collapsed part at the end."""
    style = (files("flexact.report") / "page.css").read_text(encoding="utf-8")
    known = {name: value for name, value in facts.items() if value not in (None, "")}
    line = " · ".join(escape(f"{name} {value}") for name, value in known.items())
    body = "\n".join(map(_section, sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
<p class="facts">{line}</p>
</header>
{body}
{_details(details)}
</main>
</body>
</html>
"""


def markdown(text: str, muted: str = "") -> str:
    """Return Markdown as HTML. HTML in the Markdown is escaped, and each table scrolls in a box of its own.

    muted: the first cell of table rows that are shown muted.
    """
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    tokens = reader.parse(text)
    for number, token in enumerate(tokens):
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"  # under the page's title and the section's
        if token.type == "tr_open":
            first, text = tokens[number + 1], tokens[number + 2].content
            if len(text) > _LONG:
                first.attrSet("class", "long")
            if text == muted:
                token.attrSet("class", "muted")
    rendered: str = reader.renderer.render(tokens, reader.options, {})
    return _boxed(rendered)


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], muted: Container[int] = ()) -> str:
    """Return a table as HTML. muted: the numbers of the rows that are shown muted."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = []
    for number, row in enumerate(rows):
        first, *others = (escape(_cell(cell)) for cell in row)
        opening = '<td class="long">' if len(str(row[0])) > _LONG else "<td>"
        line = '<tr class="muted">' if number in muted else "<tr>"
        lines.append(f"{line}{opening}{first}</td>" + "".join(f"<td>{cell}</td>" for cell in others) + "</tr>")
    return _boxed(f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table>")


def outcome_table(first: Mapping[str, Sequence[object]], rows: Sequence[Row]) -> str:
    """Return a table of sites with the columns and the legend of a printed selection. Undecided sites are muted.

    first: the columns before those.
    """
    columns = {**first, **columns_of(rows)}
    muted = [number for number, row in enumerate(rows) if row.undecided]
    notes = "<br>\n".join(map(escape, legend(rows)))
    return table(tuple(columns), zip(*columns.values(), strict=True), muted) + f"\n<p>{notes}</p>"


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _boxed(rendered: str) -> str:
    # Only the renderer writes these two tags; text from files is already escaped.
    opened = rendered.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return opened.replace("</table>", "</table></div>")


def _section(section: Section) -> str:
    figures = "\n".join(map(_figure, section.pictures))
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{section.body}\n{figures}\n</section>"


def _figure(picture: Picture) -> str:
    slug = escape(picture.slug)
    return (
        f'<figure id="{slug}">\n<h3>{escape(picture.title)}</h3>\n<p>{escape(picture.sentence)}</p>\n'
        f'<div class="scroll drawing" tabindex="0">{picture.svg()}</div>\n'
        f'<p class="files"><a href="figures/{slug}.png">PNG</a> <a href="figures/{slug}.svg">SVG</a></p>\n</figure>'
    )


def _details(details: Mapping[str, object]) -> str:
    if not details:
        return ""
    parts = []
    for name, value in details.items():
        if isinstance(value, list):
            value = dict(enumerate(value, start=1))
        if isinstance(value, Mapping):
            rows = [(key, entry if isinstance(entry, str) else json.dumps(entry)) for key, entry in value.items()]
            parts.append(f"<h3>{escape(name)}</h3>\n{table(('name', 'value'), rows)}")
        else:
            parts.append(f"<h3>{escape(name)}</h3>\n<p>{escape(str(value))}</p>")
    return "<details>\n<summary>Configuration and versions</summary>\n" + "\n".join(parts) + "\n</details>"
