"""Draws pictures with matplotlib (needs flexact[plots])."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any

from flexact.errors import missing_extra
from flexact.observe.figures.description import (
    INK,
    SHADES,
    SYMBOLS,
    Bars,
    Grid,
    Line,
    Panel,
    PictureDescription,
    short_names,
    value_range,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PAPER_INK = "#222222"
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
    "text.parse_math": False,  # a dollar sign in a layer's name is no formula
}
"""matplotlib's settings for these pictures, which must be active while a figure is drawn and while it is saved."""


def drawn(picture: PictureDescription) -> Figure:
    """Return a figure with the picture's panels and one legend below."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plots") from None
    with matplotlib.rc_context(STYLE):
        across = min(picture.across, len(picture.panels))
        down = math.ceil(len(picture.panels) / across)
        tallest = max(_inches(panel) for panel in picture.panels)
        width = 8.0 if across == 1 else 4.0 * across
        figure = Figure(figsize=(width, tallest * down + 0.9), layout="constrained")
        figure.suptitle(picture.title, fontsize=11, fontweight="bold")
        axes = figure.subplots(down, across, squeeze=False).ravel()
        for panel, ax in zip(picture.panels, axes, strict=False):
            _draw_panel(ax, panel)
        for ax in axes[len(picture.panels) :]:
            ax.set_axis_off()
        _draw_legend(figure, picture, [ax for ax, panel in zip(axes, picture.panels, strict=False) if panel.grid])
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
    if panel.bars:
        _draw_bars(ax, panel)
    if panel.grid:
        _draw_grid(ax, panel, panel.grid)
    if panel.rows:
        every = max(1, len(panel.rows) // 60)
        ax.set_yticks(range(0, len(panel.rows), every), short_names(panel.rows)[::every])
        ax.set_ylim(len(panel.rows) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
    if panel.log_values:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")  # the default is a formula, which STYLE shows as text
        ax.xaxis.set_minor_formatter("")
    limits = value_range(panel)
    if limits:
        (ax.set_xlim if panel.bars else ax.set_ylim)(*limits)


def _draw_line(ax: Axes, line: Line) -> None:
    colour = _PAPER_INK if line.colour == INK else line.colour
    marker = "o" if len(line.x) == 1 else ""
    ax.plot(line.x, line.y, color=colour, linestyle=_DASHES[line.dash], linewidth=line.width * 0.8, marker=marker)
    if line.band:
        ax.fill_between(line.x, *line.band, color=colour, alpha=0.18, linewidth=0)


def _draw_bars(ax: Axes, panel: Panel) -> None:
    if panel.marks:
        for number, (bars, symbol) in enumerate(zip(panel.bars, cycle(SYMBOLS), strict=False)):
            aside = 0.5 * (number + 0.5) / len(panel.bars) - 0.25
            rows = [row + aside for row in range(len(panel.rows))]
            ax.plot(bars.values, rows, symbol, color=bars.colour, markersize=6)
        return
    low = (value_range(panel) or (0.0, 1.0))[0]
    start = [0.0] * len(panel.rows)
    height = 0.8 if panel.stacked else 0.8 / len(panel.bars)
    for number, bars in enumerate(panel.bars):
        at = [row + (0.0 if panel.stacked else (number + 0.5) * height - 0.4) for row in range(len(panel.rows))]
        errors = None
        if bars.errors is not None:
            down = [max(0.0, min(e, v - low)) for v, e in zip(bars.values, bars.errors, strict=True)]
            errors = [down, bars.errors]
        left = start if panel.stacked else None
        ax.barh(at, bars.values, height, left=left, color=bars.colour, xerr=errors, ecolor=_PAPER_INK, capsize=2)
        start = [s + v for s, v in zip(start, bars.values, strict=True)]
    for row, total in enumerate(start if panel.totals else ()):
        ax.annotate(f"{total:.2f}", (total, row), (3, 0), textcoords="offset points", va="center", fontsize=8)
    ax.grid(axis="y", visible=False)


def _draw_grid(ax: Axes, panel: Panel, grid: Grid) -> None:
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    centres = [float(column) for column in grid.columns]
    rows = [row - 0.5 for row in range(len(panel.rows) + 1)]
    if grid.categories:
        colours: Any = ListedColormap([colour for _, colour in grid.categories])
        low, high = -0.5, len(grid.categories) - 0.5
    else:
        colours = LinearSegmentedColormap.from_list("flexact", SHADES)
        low, high = 0.0, 1.0
    ax.grid(visible=False)
    ax.pcolormesh(_edges(centres), rows, grid.values, cmap=colours, vmin=low, vmax=high, rasterized=True)
    if len(centres) == 1:
        ax.set_xticks(centres)
    elif all(centre.is_integer() for centre in centres):  # there is no step 2.5
        ax.locator_params(axis="x", integer=True)


def _edges(centres: Sequence[float]) -> list[float]:
    """Return the edges of a heat map's cells, half-way between their centres."""
    if len(centres) == 1:
        return [centres[0] - 0.5, centres[0] + 0.5]
    inner = [(a + b) / 2 for a, b in pairwise(centres)]
    return [2 * centres[0] - inner[0], *inner, 2 * centres[-1] - inner[-1]]


def _draw_legend(figure: Figure, picture: PictureDescription, maps: Sequence[Axes]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if picture.has_shades:
        shades = ScalarMappable(cmap=LinearSegmentedColormap.from_list("flexact", SHADES))
        shades.set_clim(0, 1)
        figure.colorbar(shades, ax=list(maps), label="probability", shrink=0.8, aspect=30)
    handles: list[Any] = []
    for name, item in picture.legend.items():
        name = "\u200b" + name if name.startswith("_") else name  # matplotlib skips names that begin with an underscore
        if isinstance(item, Line):
            colour = _PAPER_INK if item.colour == INK else item.colour
            handles.append(Line2D([], [], color=colour, label=name, linestyle=_DASHES[item.dash]))
        else:
            face = item.colour if isinstance(item, Bars) else item[1]
            handles.append(Patch(facecolor=face, edgecolor="#999999", linewidth=0.5, label=name))
    if len(handles) > 1:
        longest = max(len(handle.get_label()) for handle in handles)
        across = int(figure.get_figwidth() / (_LETTER * longest + _SWATCH))
        figure.legend(handles=handles, loc="outside lower center", ncols=max(1, min(len(handles), across, 6)))
