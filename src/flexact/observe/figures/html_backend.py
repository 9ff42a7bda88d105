"""Draws pictures as HTML: a legend, and one SVG chart per panel."""

from __future__ import annotations

from importlib.resources import files

from flexact.observe.figures.description import SHADES, Line
from flexact.observe.figures.picture import Picture
from flexact.observe.figures.svg_backend import charts, css_colour, escape


def chart_style() -> str:
    """Return the style sheet of charts and legends."""
    return (files("flexact.observe.figures") / "chart.css").read_text(encoding="utf-8")


def panels(picture: Picture) -> str:
    """Return the legend of a picture and its charts."""
    across = {1: "one", 2: "two"}.get(picture.across, "many")
    drawn = []
    for panel, chart in zip(picture.panels, charts(picture), strict=True):
        heading = f"<h4>{escape(panel.title)}</h4>\n" if panel.title else ""
        drawn.append(f'<div class="panel">\n{heading}{chart}\n</div>')
    return f'{_legend(picture)}<div class="panels {across}">\n' + "\n".join(drawn) + "\n</div>"


def _legend(picture: Picture) -> str:
    if not (picture.needs_legend or picture.has_shades):
        return ""
    chips = []
    for number, (name, item) in enumerate(picture.legend.items()):
        if isinstance(item, tuple):
            chips.append(f'<span class="chip"><i style="background:{item[1]}"></i>{escape(name)}</span>')
            continue
        on = "true" if not isinstance(item, Line) or item.shown else "false"
        dash = f"line {item.dash}" if isinstance(item, Line) else ""
        chips.append(
            f'<button type="button" class="chip" data-key="{number}" aria-pressed="{on}">'
            f'<i class="{dash}" style="--shade:{css_colour(item.colour)}"></i>{escape(name)}</button>'
        )
    if picture.has_shades:
        gradient = f"background:linear-gradient(to right,{','.join(SHADES)})"
        chips.append(f'<span class="chip">probability 0 <i class="shades" style="{gradient}"></i> 1</span>')
    return '<div class="legend">' + "\n".join(chips) + "</div>\n"
