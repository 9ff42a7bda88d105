"""The report's page: one self-contained HTML file.

All text from files is escaped, and the page's content security policy forbids loading external resources.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple
from urllib.parse import quote

from flexact.observe.figures.drawing import Picture
from flexact.observe.html_tables import in_box

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Section(NamedTuple):
    """A part of the page under its own heading: HTML, then figures."""

    title: str
    body: str
    pictures: Sequence[Picture]


class Report(NamedTuple):
    """The content of a page."""

    title: str
    facts: Mapping[str, object]
    """The line under the title."""
    sections: Sequence[Section]
    details: Mapping[str, object]
    """Configuration and versions, the collapsed part at the end."""


def page(report: Report) -> str:
    """Return the page."""
    style = (files("flexact.report") / "page.css").read_text(encoding="utf-8")
    line = " · ".join(escape(f"{name} {value}") for name, value in report.facts.items() if value not in (None, ""))
    body = "\n".join(map(_section, report.sections))
    details = escape(json.dumps(report.details, indent=2))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(report.title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<h1>{escape(report.title)}</h1>
<p class="facts">{line}</p>
</header>
{body}
<details>
<summary>Configuration and versions</summary>
<pre>{details}</pre>
</details>
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
        if token.type == "tr_open" and tokens[number + 2].content == muted:
            token.attrSet("class", "muted")
    rendered: str = reader.renderer.render(tokens, reader.options, {})
    return in_box(rendered)


def _section(section: Section) -> str:
    figures = "\n".join(map(_figure, section.pictures))
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{section.body}\n{figures}\n</section>"


def _figure(picture: Picture) -> str:
    slug = quote(picture.slug)
    return (
        f'<figure id="{slug}">\n<h3>{escape(picture.title)}</h3>\n<p>{escape(picture.sentence)}</p>\n'
        f'<div class="scroll drawing" tabindex="0">{picture.svg()}</div>\n'
        f'<p class="files"><a href="figures/{slug}.png">PNG</a> <a href="figures/{slug}.svg">SVG</a></p>\n</figure>'
    )
