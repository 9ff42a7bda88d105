"""Plotly charts of a picture's panels, as plain dictionaries for plotly.js.

The page's script adds what depends on the page's colours: the colour "ink", the grid and the font.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from flexact.observe.figures.description import (
    INK,
    SHADES,
    SYMBOLS,
    Bars,
    Grid,
    Line,
    Panel,
    short_names,
    value_range,
)
from flexact.observe.figures.picture import Picture

Chart = dict[str, Any]


def charts(picture: Picture) -> list[Chart]:
    """Return {"data", "layout"} per panel. A trace's legendgroup is the number of its name in the picture's legend."""
    keys = {name: str(number) for number, name in enumerate(picture.legend)}
    return [_chart(panel, keys, 360 if picture.across == 1 else 260) for panel in picture.panels]


def plain(text: str) -> str:
    """Escape a text, because plotly interprets tags and %{templates} in labels."""
    return html.escape(text).replace("{", "&#123;")


def _chart(panel: Panel, keys: dict[str, str], height: int) -> Chart:
    layout: Chart = {
        "height": _height(panel) if panel.rows else height,
        "margin": {"l": 52, "r": 14, "t": 10, "b": 44},
        "showlegend": False,
        "xaxis": {"title": {"text": plain(panel.x_title)}, "automargin": True, "zeroline": False},
        "yaxis": {"title": {"text": plain(panel.y_label)}, "automargin": True, "zeroline": False},
    }
    values = layout["xaxis" if panel.bars else "yaxis"]
    limits = value_range(panel)
    if limits:
        values["range"] = [math.log10(end) for end in limits] if panel.log_values else list(limits)
    if panel.log_values:
        values |= {"type": "log", "dtick": 1, "exponentformat": "power"}
    if panel.rows:
        layout["yaxis"] |= _row_axis(panel.rows, layout["height"])
    data = [trace for line in panel.lines for trace in _line(line, panel, keys)]
    data += [_bars(bars, panel, keys) for bars in panel.bars]
    if panel.bars:
        layout |= {"barmode": "stack" if panel.stacked else "group", "bargap": 0.25}
    if panel.totals:
        layout["annotations"] = _totals(panel)
    if panel.grid is not None:
        data.append(_grid(panel.grid, panel))
        layout["xaxis"]["showgrid"] = False
    return {"data": data, "layout": layout}


def _height(panel: Panel) -> int:
    per_row = 20 if panel.grid else 22 if panel.stacked else 34 if panel.marks else 24 * max(1, len(panel.bars))
    return min(900, 90 + per_row * len(panel.rows))


def _row_axis(rows: Sequence[str], height: int) -> Chart:
    """Return an axis with rows from top to bottom and as many labels as fit."""
    every = max(1, math.ceil(len(rows) * 14 / (height - 60)))
    if height - 90 >= 40 * len(rows):  # there is room for a second line
        labels = ["<br>".join(map(plain, textwrap.wrap(name, 18) or [name])) for name in rows]
    else:
        labels = [plain(name) for name in short_names(rows, most=18)]
    return {
        "type": "category",
        "autorange": "reversed",
        "tickmode": "array",
        "tickvals": [plain(name) for name in rows[::every]],
        "ticktext": labels[::every],
        "showgrid": False,
    }


def _line(line: Line, panel: Panel, keys: dict[str, str]) -> Iterable[Chart]:
    shown: Chart = {"legendgroup": keys.get(line.name), "visible": True if line.shown else "legendonly"}
    if line.band:
        low, high = (_numbers(edge) for edge in line.band)
        edges = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "meta": "band", **shown}
        yield {**edges, "x": _numbers(line.x), "y": low}
        yield {**edges, "x": _numbers(line.x), "y": high, "fill": "tonexty", "fillcolor": _faint(line.colour)}
    mode = "markers" if len(line.x) == 1 else "lines"
    title = f"<b>{plain(line.name)}</b>" + (f" ({plain(panel.title)})" if panel.title != line.name else "")
    y_label = plain(panel.y_label or line.name)
    yield {
        "type": "scatter",
        "mode": mode,
        "name": plain(line.name),
        "x": _numbers(line.x),
        "y": _numbers(line.y),
        "line": {"color": line.colour, "width": line.width, "dash": line.dash},
        "marker": {"color": line.colour, "size": 8},
        "hovertemplate": f"{title}<br>{plain(panel.x_label)}: %{{x:.4~g}}<br>{y_label}: %{{y:.4~g}}<extra></extra>",
        **shown,
    }


def _bars(bars: Bars, panel: Panel, keys: dict[str, str]) -> Chart:
    trace: Chart = {
        "type": "bar",
        "orientation": "h",
        "name": plain(bars.name),
        "legendgroup": keys.get(bars.name),
        "x": _numbers(bars.values),
        "y": [plain(row) for row in panel.rows],
        "marker": {"color": bars.colour},
        "hovertemplate": f"%{{y}}<br><b>{plain(bars.name)}</b><br>{plain(panel.x_label)}: %{{x:.4~g}}<extra></extra>",
    }
    if panel.marks:
        symbol = list(SYMBOLS.values())[list(panel.bars).index(bars) % len(SYMBOLS)]
        marker = {"color": bars.colour, "size": 11, "symbol": symbol}
        return trace | {"type": "scatter", "mode": "markers", "orientation": None, "marker": marker}
    if bars.errors is not None:
        low = (value_range(panel) or (0.0, 0.0))[0]
        down = [max(0.0, min(e, v - low)) for v, e in zip(bars.values, bars.errors, strict=True)]
        trace["error_x"] = {
            "type": "data",
            "symmetric": False,
            "array": _numbers(bars.errors),
            "arrayminus": _numbers(down),
            "color": INK,
            "thickness": 1.2,
            "width": 3,
        }
        trace["customdata"] = [f" ± {e:.3g}" for e in bars.errors]
        trace["hovertemplate"] = trace["hovertemplate"].replace("<extra>", "%{customdata}<extra>")
    return trace


def _totals(panel: Panel) -> list[Chart]:
    """Return annotations with the sum of each row at the end of its bar."""
    sums = [sum(values) for values in zip(*(bars.values for bars in panel.bars), strict=True)]
    return [
        {"x": total, "y": row, "text": f"{total:.2f}", "showarrow": False, "xanchor": "left", "xshift": 3}
        for row, total in enumerate(sums)
    ]


def _grid(grid: Grid, panel: Panel) -> Chart:
    trace: Chart = {
        "type": "heatmap",
        "x": list(grid.columns),
        "y": [plain(row) for row in panel.rows],
        "z": [_numbers(row) for row in grid.values],
        "showscale": False,
        "hoverongaps": False,
    }
    if grid.categories:
        count = len(grid.categories)
        stops = [(edge / count, colour) for i, (_, colour) in enumerate(grid.categories) for edge in (i, i + 1)]
        trace |= {"colorscale": stops, "zmin": -0.5, "zmax": count - 0.5}
    else:
        stops = [(i / (len(SHADES) - 1), colour) for i, colour in enumerate(SHADES)]
        trace |= {"colorscale": stops, "zmin": 0, "zmax": 1}
    first = f"<b>{plain(panel.title)}</b><br>" if panel.title else ""
    column = f"{plain(panel.x_label)}: %{{x}}" if panel.x_label else "%{x}"
    if grid.notes:
        trace["text"] = [[plain(note) for note in row] for row in grid.notes]
        shown = "%{text}"
    else:
        shown = "probability: %{z:.3f}"
    trace["hovertemplate"] = f"{first}%{{y}}<br>{column}<br>{shown}<extra></extra>"
    return trace


def _numbers(values: Iterable[float]) -> list[float | None]:
    """Return values with six digits, which is finer than a pixel; None for NaN and infinity, which JSON lacks."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _faint(colour: str) -> str:
    if colour == INK:
        return "rgba(127,127,127,0.2)"
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"
