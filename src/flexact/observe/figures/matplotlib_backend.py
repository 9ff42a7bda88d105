"""Draws pictures with matplotlib (needs flexact[plots])."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from flexact.observe.figures.description import INK, SHADES, SYMBOLS, Bars, Grid, Legend, Line, Panel, short_names

_PAPER_INK = "#222222"
_SHADES = LinearSegmentedColormap.from_list("flexact", SHADES)
_DASHES: dict[str, Any] = {"solid": "-", "dash": (0, (5, 2)), "dot": (0, (1.2, 1.6))}
_LETTER, _SWATCH = 0.07, 0.7
"""Widths in inches of a letter in the legend, and of the symbol and the spaces around a name."""
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "flexact",  # the same data give the same file
    "text.parse_math": False,  # a dollar sign in a layer's name does not start a formula
}
"""matplotlib's settings for these pictures, which must be active while a figure is drawn and while it is saved."""


def drawn(title: str, panels: Sequence[Panel], across: int, legend: Legend) -> Figure:
    """Return a figure with at most `across` panels side by side and one legend below."""
    with matplotlib.rc_context(STYLE):
        across = min(across, len(panels))
        down = math.ceil(len(panels) / across)
        tallest = max(map(_inches, panels))
        width = 8.0 if across == 1 else 4.0 * across
        figure = Figure(figsize=(width, tallest * down + 0.9), layout="constrained")
        figure.suptitle(title, fontsize=11, fontweight="bold")
        axes = figure.subplots(down, across, squeeze=False).ravel()
        for panel, ax in zip(panels, axes, strict=False):
            _draw_panel(ax, panel)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        shaded = [ax for ax, panel in zip(axes, panels, strict=False) if panel.grid and not panel.grid.categories]
        if shaded:
            shades = ScalarMappable(cmap=_SHADES)
            shades.set_clim(0, 1)
            figure.colorbar(shades, ax=shaded, label="probability", shrink=0.8, aspect=30)
        if legend:
            _draw_legend(figure, legend)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # otherwise every savefig repeats the layout and takes three times as long
    return figure


def _inches(panel: Panel) -> float:
    if not panel.rows:
        return 2.5
    per_row = 0.22 * max(1, 1 if panel.stacked else 1.5 if panel.marks else len(panel.bars))
    return min(12.0, 0.6 + per_row * len(panel.rows))


def _draw_panel(ax: Axes, panel: Panel) -> None:
    ax.set_title(panel.title)
    ax.set_xlabel(panel.x_title)
    ax.set_ylabel(panel.y_label)
    for line in panel.lines:
        _draw_line(ax, line)
    if panel.lines:
        ax.locator_params(axis="x", nbins=5)
    for event in panel.events:
        ax.axvline(event.x, color="#777777", linewidth=0.8, linestyle=_DASHES[event.dash])
        place_of: Any = {"rotation": 90, "va": "top", "ha": "right", "transform": ax.get_xaxis_transform()}
        ax.text(event.x, 0.99, event.label, fontsize=7, color="#555555", **place_of)
    if panel.bars:
        _draw_bars(ax, panel)
    if panel.grid:
        _draw_grid(ax, panel, panel.grid)
    if panel.rows:
        every = max(1, len(panel.rows) // 60)
        ax.set_yticks(range(0, len(panel.rows), every), short_names(panel.rows)[::every])
        ax.set_ylim(len(panel.rows) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
    if panel.marks:
        _draw_rules_between_rows(ax, panel)
    if panel.log_values:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")  # the default is a formula, which STYLE shows as text
        ax.xaxis.set_minor_formatter("")
    limits = panel.limits
    if limits:
        (ax.set_xlim if panel.bars else ax.set_ylim)(*limits)


def _draw_line(ax: Axes, line: Line) -> None:
    colour = _PAPER_INK if line.colour == INK else line.colour
    marker = "o" if len(line.x) == 1 else ""
    ax.plot(line.x, line.y, color=colour, linestyle=_DASHES[line.dash], linewidth=line.width * 0.8, marker=marker)
    if line.band:
        ax.fill_between(line.x, *line.band, color=colour, alpha=0.18, linewidth=0)


def _draw_bars(ax: Axes, panel: Panel) -> None:
    low = (panel.limits or (0.0, 1.0))[0]
    start = [0.0] * len(panel.rows)
    height = 0.8 if panel.stacked else (0.5 if panel.marks else 0.8) / len(panel.bars)
    for number, (bars, symbol) in enumerate(zip(panel.bars, cycle(SYMBOLS), strict=False)):
        at = [row + height * panel.place(number, row) for row in range(len(panel.rows))]
        if panel.marks:
            style: Any = {"fmt": bars.symbol or symbol, "color": bars.colour, "markersize": 6}
            ax.errorbar(bars.values, at, xerr=bars.errors, zorder=3 - number / len(panel.bars), **style)  # first on top
            continue
        errors = None
        if bars.errors is not None:
            down = [max(0.0, min(e, v - low)) for v, e in zip(bars.values, bars.errors, strict=True)]
            errors = [down, bars.errors]
        left = start if panel.stacked else None
        ax.barh(at, bars.values, height, left=left, color=bars.colour, xerr=errors, ecolor=_PAPER_INK, capsize=2)
        start = [s + v for s, v in zip(start, bars.values, strict=True)]


def _draw_rules_between_rows(ax: Axes, panel: Panel) -> None:
    """Draw the lines that separate the rows of marks, and a line at 0."""
    for row in range(1, len(panel.rows)):
        ax.axhline(row - 0.5, color="#e6e6e6", linewidth=0.8, zorder=0.5)
    if not panel.log_values:
        ax.axvline(0, color="#999999", linewidth=0.8, zorder=0.5)


def _draw_grid(ax: Axes, panel: Panel, grid: Grid) -> None:
    centres = [float(column) for column in grid.columns]
    rows = [row - 0.5 for row in range(len(panel.rows) + 1)]
    if grid.categories:
        colours: Any = ListedColormap([colour for _, colour in grid.categories])
        low, high = -0.5, len(grid.categories) - 0.5
    else:
        colours, low, high = _SHADES, 0.0, 1.0
    ax.grid(visible=False)
    alpha: Any = grid.opacity or None
    tiles: Any = {"edgecolors": "white", "linewidth": 2} if grid.notes else {}
    ax.pcolormesh(
        grid.edges, rows, grid.values, cmap=colours, vmin=low, vmax=high, alpha=alpha, rasterized=True, **tiles
    )
    halo = [withStroke(linewidth=1.5, foreground="white")]
    for row, labels in enumerate(grid.labels):
        for centre, label in zip(centres, labels, strict=True):
            ax.text(centre, row, label, ha="center", va="center", fontsize=6, color=_PAPER_INK, path_effects=halo)
    if not panel.x_label:
        ax.set_xticks([])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    elif len(centres) == 1:
        ax.set_xticks(centres)
    elif all(centre.is_integer() for centre in centres):  # there is no step 2.5
        ax.locator_params(axis="x", integer=True)


def _draw_legend(figure: Figure, legend: Legend) -> None:
    handles: list[Any] = []
    for name, item in legend.items():
        name = "\u200b" + name if name.startswith("_") else name  # matplotlib skips names that begin with an underscore
        if isinstance(item, Line):
            colour = _PAPER_INK if item.colour == INK else item.colour
            handles.append(Line2D([], [], color=colour, label=name, linestyle=_DASHES[item.dash]))
        elif isinstance(item, Bars) and item.symbol:
            handles.append(Line2D([], [], color=item.colour, label=name, linestyle="", marker=item.symbol))
        else:
            face = item.colour if isinstance(item, Bars) else item[1]
            handles.append(Patch(facecolor=face, edgecolor="#999999", linewidth=0.5, label=name))
    longest = max(len(handle.get_label()) for handle in handles)
    across = int(figure.get_figwidth() / (_LETTER * longest + _SWATCH))
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, min(len(handles), across, 6)))
