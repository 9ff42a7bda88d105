"""The report's page: one self-contained HTML file.

All text from files is escaped, and the page's content security policy forbids loading external resources.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from flexact.observe.figures.description import INK, SHADES, Line, Panel
from flexact.observe.figures.history import Outcome
from flexact.observe.figures.picture import Picture
from flexact.report.charts import charts

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_LONG = 16
"""A first cell with more letters than this is wrapped if the table is wider than the page."""


@dataclass(frozen=True)
class Section:
    """A part of the page under its own heading: HTML, then figures."""

    title: str
    body: str
    pictures: Sequence[Picture]


def picture(slug: str, heading: str, sentence: str, panels: Sequence[Panel | None], across: int = 3) -> Picture | None:
    """Return a picture of the panels that are not None; None if there is none."""
    there = [panel for panel in panels if panel is not None]
    return Picture(slug, heading, sentence, there, across) if there else None


def file_name(name: str) -> str:
    """Return a name without characters that have a meaning in paths or URLs."""
    return re.sub(r"[^\w.-]", "_", name)


def page(title: str, facts: Mapping[str, object], sections: Iterable[Section], details: Mapping[str, object]) -> str:
    """Return the page. facts: the line under the title. details: the content of the collapsed part at the end."""
    from plotly.offline import get_plotlyjs

    sources = files("flexact.report")
    style = (sources / "page.css").read_text(encoding="utf-8")
    script = (sources / "page.js").read_text(encoding="utf-8")
    line = " · ".join(f"{escape(name)} {escape(value)}" for name, value in facts.items() if value not in (None, ""))
    body = "\n".join(_section(number, section) for number, section in enumerate(sections))
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
<noscript><p>The charts need JavaScript; the same figures lie in the folder <code>figures</code>.</p></noscript>
</header>
{body}
{_details(details)}
</main>
<script>{get_plotlyjs()}</script>
<script>
{script}</script>
</body>
</html>
"""


def escape(value: object) -> str:
    """Return a value as text that is escaped for HTML."""
    return html.escape(str(value))


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


def outcome_table(first: Sequence[str], rows: Sequence[tuple[Sequence[object], Outcome]]) -> str:
    """Return a table of sites: the first cells of each row, then pick, runner-up, lead and decision. Undecided sites
    are muted, and empty columns are left out.

    first: the titles of the first cells.
    """
    titles = (*first, "pick", "probability", "margin", "runner-up", "lead", "z", "steps", "decision")
    cells = [
        (
            *own,
            one.pick,
            one.probability if one.decided is None else None,
            one.margin if one.decided is None else None,
            one.runner_up,
            one.lead,
            None if one.lead is None else f"{one.lead.z:.1f}",
            None if one.lead is None else one.lead.steps,
            one.decision,
        )
        for own, one in rows
    ]
    kept = [i for i in range(len(titles)) if any(line[i] is not None for line in cells)]
    muted = [number for number, (_, one) in enumerate(rows) if one.decided is False]
    return table([titles[i] for i in kept], [[line[i] for i in kept] for line in cells], muted)


LEAD = (
    "The lead is that of the pick over the runner-up when that was dropped, ± its standard error, as a mean over the "
    "given number of steps: a difference of losses in a trial, of normalised advantages in a blend; z is its ratio to "
    "the error. A site is undecided if no lead is significant, neither over the runner-up nor over the original."
)
"""The explanation of such a table."""


def _cell(value: object) -> object:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else value


def _boxed(rendered: str) -> str:
    # Only the renderer writes these two tags; text from files is already escaped.
    opened = rendered.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return opened.replace("</table>", "</table></div>")


def _section(number: int, section: Section) -> str:
    figures = "\n".join(_figure(f"s{number}-{i}", picture) for i, picture in enumerate(section.pictures))
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{section.body}\n{figures}\n</section>"


def _figure(key: str, picture: Picture) -> str:
    panels = []
    for number, (panel, chart) in enumerate(zip(picture.panels, charts(picture), strict=True)):
        name = f"{picture.title}: {panel.title}" if panel.title else picture.title
        heading = f"<h4>{escape(panel.title)}</h4>\n" if panel.title else ""
        panels.append(
            f'<div class="panel">\n{heading}<div class="chart" id="{key}-{number}" role="img" '
            f'aria-label="{escape(name)}" style="height:{chart["layout"]["height"]}px"></div>\n'
            f'<script type="application/json">{_json(chart)}</script>\n</div>'
        )
    slug = escape(picture.slug)
    across = {1: "one", 2: "two"}.get(picture.across, "many")
    return (
        f'<figure id="{slug}">\n<h3>{escape(picture.title)}</h3>\n<p>{escape(picture.sentence)}</p>\n'
        f'{_legend(picture)}<div class="panels {across}">\n' + "\n".join(panels) + "\n</div>\n"
        f'<p class="files"><a href="figures/{slug}.png">PNG</a> <a href="figures/{slug}.svg">SVG</a></p>\n</figure>'
    )


def _legend(picture: Picture) -> str:
    entries = picture.legend
    chips = []
    for number, (name, item) in enumerate(entries.items()):
        colour = item[1] if isinstance(item, tuple) else item.colour
        shade = "currentColor" if colour == INK else colour
        if isinstance(item, tuple):
            chips.append(f'<span class="chip"><i style="background:{shade}"></i>{escape(name)}</span>')
            continue
        on = "true" if not isinstance(item, Line) or item.shown else "false"
        dash = f"line {item.dash}" if isinstance(item, Line) else ""
        chips.append(
            f'<button type="button" class="chip" data-key="{number}" aria-pressed="{on}">'
            f'<i class="{dash}" style="--shade:{shade}"></i>{escape(name)}</button>'
        )
    if picture.has_shades:
        chips.append(f'<span class="chip">probability 0 <i class="shades" style="{_gradient()}"></i> 1</span>')
    if len(chips) < 2 and not picture.has_shades:
        return ""
    return '<div class="legend">' + "\n".join(chips) + "</div>\n"


def _gradient() -> str:
    return f"background:linear-gradient(to right,{','.join(SHADES)})"


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
            parts.append(f"<h3>{escape(name)}</h3>\n<p>{escape(value)}</p>")
    return "<details>\n<summary>Configuration and versions</summary>\n" + "\n".join(parts) + "\n</details>"


def _json(value: Any) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
