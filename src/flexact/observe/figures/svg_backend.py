"""Draws pictures as HTML for pages and notebooks: a legend, and one SVG chart per panel.

A chart is as wide as its container: text has a fixed size, and everything else is placed in percent. `chart.css` has
the colours, and `page.js` of the report adds values on hover, which it reads from the data attributes.
"""

from __future__ import annotations

import html
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any

from flexact.observe.figures.axis import Axis
from flexact.observe.figures.description import INK, SHADES, SYMBOLS, Bars, Event, Grid, Line, Panel, short_names
from flexact.observe.figures.picture import Picture
from flexact.observe.figures.raster import data_uri

_LETTER = 6.4
"""Approximate width of a character in pixels."""
_TOP, _RIGHT, _BOTTOM = 10, 16, 46
_DASHES = {"solid": "", "dash": "6 4", "dot": "2 3"}
_LABEL_DISTANCE = 0.045
"""Minimum distance between the labels of two events, as a fraction of the axis."""


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


def charts(picture: Picture) -> list[str]:
    """Return the SVG of each panel. The data-key of a curve is the number of its name in the picture's legend."""
    keys = {name: number for number, name in enumerate(picture.legend)}
    height = 360 if picture.across == 1 else 260
    return [_chart(panel, keys, height, picture.title) for panel in picture.panels]


def escape(value: object) -> str:
    """Return a value as text that is escaped for HTML."""
    return html.escape(str(value))


def _legend(picture: Picture) -> str:
    if not (picture.needs_legend or picture.has_shades):
        return ""
    chips = []
    for number, (name, item) in enumerate(picture.legend.items()):
        if isinstance(item, tuple):
            chips.append(f'<span class="chip"><i style="background:{item[1]}"></i>{escape(name)}</span>')
            continue
        on = "true" if not isinstance(item, Line) or item.shown else "false"
        chips.append(
            f'<button type="button" class="chip" data-key="{number}" aria-pressed="{on}">'
            f"{_swatch(item)}{escape(name)}</button>"
        )
    if picture.has_shades:
        gradient = f"background:linear-gradient(to right,{','.join(SHADES)})"
        chips.append(f'<span class="chip">probability 0 <i class="shades" style="{gradient}"></i> 1</span>')
    return '<div class="legend">' + "\n".join(chips) + "</div>\n"


def _swatch(item: Line | Bars) -> str:
    """Return the sign of a legend's entry: a piece of the line, the symbol of marks, or a patch of colour."""
    if isinstance(item, Bars) and item.symbol:
        path = f'<path d="{SYMBOLS[item.symbol]}" fill="{item.colour}"/>'
        return f'<svg width="14" height="14" viewBox="-7 -7 14 14">{path}</svg>'
    dash = f"line {item.dash}" if isinstance(item, Line) else ""
    return f'<i class="{dash}" style="--shade:{_css(item.colour)}"></i>'


def _chart(panel: Panel, keys: dict[str, int], height: int, title: str) -> str:
    height = _height(panel) if panel.rows else height
    x, y = _axes(panel)
    inner, bottom = height - _TOP - _BOTTOM, _BOTTOM
    if panel.rows and not panel.x_label:
        inner, bottom = 24 * len(panel.rows), 0
    labels = _row_labels(panel, inner) if panel.rows else [(1 - y.at(v), [f"{v:g}"]) for v in y.ticks()]
    letters = max((len(line) for _, lines in labels for line in lines), default=0)
    left = round(12 + _LETTER * letters + (18 if panel.y_label else 0))
    parts = [*_y_axis(labels, panel, left), *_x_axis(x, panel)]
    if panel.marks:
        parts += _rules_between_rows(x, len(panel.rows))
    if panel.grid is not None:
        parts += _grid(panel.grid, panel.rows, x)
    for number, bars in enumerate(panel.bars):
        parts.append(_keyed(keys.get(bars.name), True, _bars(bars, number, panel, x)))
    curves = (_keyed(keys.get(line.name), line.shown, _line(line, x, y)) for line in panel.lines)
    parts.append(f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" class="data">{"".join(curves)}</svg>')
    parts += (_dot(line, keys.get(line.name), x, y) for line in panel.lines if len(line.x) == 1)
    parts += _events(panel.events, keys, x)
    name = f"{title}: {panel.title}" if panel.title else title
    axes: dict[str, Any] = {"x": [x.low, x.high, panel.x_label], "y": [y.low, y.high, panel.y_label]}
    axes["title"] = panel.title
    if panel.grid is not None:
        axes |= {"rows": list(panel.rows), "columns": list(panel.grid.columns), "shades": SHADES}
        axes["names"] = {colour: name for name, colour in panel.grid.categories}
    margins = f"{_TOP}px {_RIGHT}px {bottom}px {left}px"
    return (
        f'<div class="chart" role="img" aria-label="{escape(name)}" style="padding:{margins}">'
        f'<svg class="area" style="height:{inner}px" data-axes="{escape(json.dumps(axes))}">'
        f'<rect class="back" width="100%" height="100%"/>{"".join(parts)}</svg></div>'
    )


def _height(panel: Panel) -> int:
    if panel.marks:  # as many side by side as have a value
        values = zip(*(bars.values for bars in panel.bars), strict=True)
        side_by_side = max((sum(map(math.isfinite, row)) for row in values), default=1)
        per_row = 12 + 12 * side_by_side
    else:
        per_row = 20 if panel.grid else 22 if panel.stacked else 24 * max(1, len(panel.bars))
    return min(900, 90 + per_row * len(panel.rows))


def _axes(panel: Panel) -> tuple[Axis, Axis]:
    """Return the axes of a panel. The axis of the rows is not used."""
    limits = panel.limits
    fixed = Axis(*limits, log=panel.log_values) if limits else None
    if panel.grid is not None:
        edges = panel.grid.edges
        return Axis(edges[0], edges[-1]), Axis(0.0, 1.0)
    if panel.rows:
        ends = [0.0, *(end for bars in panel.bars for end in bars.ends)]
        around = Axis.around(ends, room=0.04) if panel.marks else Axis.around(1.05 * end for end in ends)
        return fixed or around, Axis(0.0, 1.0)
    xs = [float(value) for line in panel.lines for value in line.x]
    values = [value for line in panel.lines for part in (line.y, *(line.band or ())) for value in part]
    return Axis.around(xs), fixed or Axis.around(values, room=0.04)


def _row_labels(panel: Panel, inner: int) -> list[tuple[float, list[str]]]:
    """Return the position of each label and its lines: as many labels as fit, with several lines if there is room."""
    rows = panel.rows
    every = max(1, math.ceil(len(rows) * 14 / inner))
    if inner >= 34 * len(rows):
        lines = [textwrap.wrap(name, 18) or [name] for name in rows]
    else:
        lines = [[name] for name in short_names(rows, most=18)]
    return [((i + 0.5) / len(rows), lines[i]) for i in range(0, len(rows), every)]


def _y_axis(labels: Iterable[tuple[float, list[str]]], panel: Panel, left: int) -> Iterator[str]:
    for at, lines in labels:
        if not panel.rows:
            yield f'<line class="grid" x2="100%" y1="{at:.3%}" y2="{at:.3%}"/>'
        spans = "".join(
            f'<tspan x="-8" dy="{0.35 - 0.55 * (len(lines) - 1) if i == 0 else 1.1:g}em">{escape(line)}</tspan>'
            for i, line in enumerate(lines)
        )
        yield f'<text class="y tick" y="{at:.3%}">{spans}</text>'
    if panel.y_label:
        text = f'<text class="title" text-anchor="middle" transform="rotate(-90)">{escape(panel.y_label)}</text>'
        yield f'<svg x="{14 - left}" y="50%" overflow="visible">{text}</svg>'


def _x_axis(x: Axis, panel: Panel) -> Iterator[str]:
    ticks = x.ticks(5)
    if panel.grid is not None and all(float(column).is_integer() for column in panel.grid.columns):
        ticks = [tick for tick in ticks if tick.is_integer()]  # there is no step 2.5
    for tick in ticks if panel.x_label else ():
        at = x.at(tick)
        if panel.grid is None:
            yield f'<line class="grid" x1="{at:.3%}" x2="{at:.3%}" y2="100%"/>'
        yield f'<text class="x tick" x="{at:.3%}" y="100%" dy="1.3em">{tick:g}</text>'
    if panel.x_label:
        yield f'<text class="title" x="50%" y="100%" dy="2.9em" text-anchor="middle">{escape(panel.x_title)}</text>'


def _rules_between_rows(x: Axis, rows: int) -> Iterator[str]:
    """Return the lines that separate the rows of marks, and a line at 0."""
    for row in range(1, rows):
        yield f'<line class="grid" x2="100%" y1="{row / rows:.3%}" y2="{row / rows:.3%}"/>'
    if not x.log and x.low < 0 < x.high:
        yield f'<line class="zero" x1="{x.at(0.0):.3%}" x2="{x.at(0.0):.3%}" y2="100%"/>'


def _keyed(key: int | None, shown: bool, parts: Iterable[str]) -> str:
    """Return a group that an entry of the legend shows and hides."""
    attributes = ("" if key is None else f' data-key="{key}"') + ("" if shown else ' class="off"')
    return f"<g{attributes}>{''.join(parts)}</g>"


def _line(line: Line, x: Axis, y: Axis) -> Iterator[str]:
    colour = _css(line.colour)
    if line.band:
        low, high = line.band
        there = [i for i in range(len(line.x)) if math.isfinite(low[i]) and math.isfinite(high[i])]
        ends = [(line.x[i], high[i]) for i in there] + [(line.x[i], low[i]) for i in reversed(there)]
        yield f'<path class="band" d="{_path(ends, x, y)}Z" fill="{colour}"/>' if there else ""
    d = _path(list(zip(line.x, line.y, strict=True)), x, y)
    yield (
        f'<path class="line" d="{d}" stroke="{colour}" stroke-width="{line.width:g}" '
        f'stroke-dasharray="{_DASHES[line.dash]}" data-name="{escape(line.name)}"/>'
    )


def _dot(line: Line, key: int | None, x: Axis, y: Axis) -> str:
    """Return a point for a curve of one value, which a path does not show."""
    u, v = x.at(line.x[0]), y.at(line.y[0])
    if not math.isfinite(v):
        return ""
    at = f'cx="{u:.3%}" cy="{1 - v:.3%}"'
    return _keyed(key, line.shown, [f'<circle {at} r="4" fill="{_css(line.colour)}"/>'])


def _path(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    """Return a path in thousandths of the area, with gaps where values are not finite."""
    d, draws = [], False
    for px, py in points:
        u, v = x.at(px), y.at(py)
        there = math.isfinite(u) and math.isfinite(v)
        if there:
            d.append(f"{'L' if draws else 'M'}{1000 * u:.2f} {1000 - 1000 * v:.2f}")
        draws = there
    return "".join(d)


def _bars(bars: Bars, number: int, panel: Panel, x: Axis) -> Iterator[str]:
    """Return one bar or mark per row, with a whisker where there is an error."""
    count = len(panel.rows)
    share = 0.8 / (1 if panel.stacked else len(panel.bars))
    symbol = SYMBOLS.get(bars.symbol) or list(SYMBOLS.values())[number % len(SYMBOLS)]
    colour = _css(bars.colour)
    for row, value in enumerate(bars.values):
        if not math.isfinite(value):
            continue
        start = sum(other.values[row] for other in panel.bars[:number]) if panel.stacked else 0.0
        first, last = x.at(start) if not x.log and start >= x.low else 0.0, x.at(start + value)
        if not math.isfinite(last):
            continue
        middle = (row + 0.5 + share * panel.place(number, row)) / count
        error = bars.errors[row] if bars.errors is not None else 0.0
        note = f"{panel.rows[row]}\n{bars.name}\n{panel.x_label}: {value:.4g}" + (f" ± {error:.3g}" if error else "")
        title = f"<title>{escape(note)}</title>"
        if panel.marks:
            mark = f'<path d="{symbol}" fill="{colour}">{title}</path>'
            yield f'<svg x="{last:.3%}" y="{middle:.3%}" overflow="visible">{mark}</svg>'
        else:
            left, top = min(first, last), middle - share / 2 / count
            yield (
                f'<rect x="{left:.3%}" y="{top:.3%}" width="{abs(last - first):.3%}" height="{share / count:.3%}" '
                f'fill="{colour}">{title}</rect>'
            )
        if 0 < error < math.inf:
            ends = [x.at(max(value - error, x.low)), x.at(min(value + error, x.high))]
            ink = f' style="stroke:{colour}"' if panel.marks else ""
            y = f'y1="{middle:.3%}" y2="{middle:.3%}"'
            yield f'<line class="whisker"{ink} x1="{ends[0]:.3%}" x2="{ends[1]:.3%}" {y}/>'


def _events(events: Sequence[Event], keys: dict[str, int], x: Axis) -> Iterator[str]:
    """Return vertical lines, with labels where there is room."""
    free = 0.0
    for event in sorted(events, key=lambda event: event.x):
        at = x.at(event.x)
        if not 0 <= at <= 1:
            continue
        title = f"<title>{event.x:g}: {escape(event.name)}\n{escape(event.note)}</title>"
        line = f'<line class="event" x1="{at:.3%}" x2="{at:.3%}" y2="100%" stroke-dasharray="{_DASHES[event.dash]}"/>'
        text = ""
        if event.label and at >= free:
            text = f'<text class="event" transform="rotate(-90)" y="-3" x="-4">{escape(event.label)}</text>'
            free = at + _LABEL_DISTANCE
        yield _keyed(keys[event.name], True, [title, line, f'<svg x="{at:.3%}" overflow="visible">{text}</svg>'])


def _grid(grid: Grid, rows: Sequence[str], x: Axis) -> Iterator[str]:
    """Return the cells: one image, or rectangles where each has a text of its own."""
    if not grid.notes:
        yield f'<image class="cells" width="100%" height="100%" preserveAspectRatio="none" href="{data_uri(grid)}"/>'
        return
    for r, (values, notes) in enumerate(zip(grid.values, grid.notes, strict=True)):
        for c, (value, note) in enumerate(zip(values, notes, strict=True)):
            if math.isnan(value):
                continue
            left, right = (x.at(edge) for edge in grid.edges[c : c + 2])
            opacity = grid.opacity[r][c] if grid.opacity else 1.0
            yield (
                f'<rect class="tile" x="{left:.3%}" y="{r / len(rows):.3%}" width="{right - left:.3%}" '
                f'height="{1 / len(rows):.3%}" fill="{grid.categories[int(value)][1]}" fill-opacity="{opacity:.2f}">'
                f"<title>{escape(note)}</title></rect>"
            )
            if grid.labels and grid.labels[r][c]:
                at = f'x="{(left + right) / 2:.3%}" y="{(r + 0.5) / len(rows):.3%}"'
                yield f'<text class="tile-name" {at} dy=".35em">{escape(grid.labels[r][c])}</text>'


def _css(colour: str) -> str:
    """Return a colour as CSS."""
    return "currentColor" if colour == INK else colour
