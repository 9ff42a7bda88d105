"""What the figures share: their style, and the parts that they draw with matplotlib (needs flexact[plots]), which is
imported when a figure is drawn.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from flexact.errors import missing_extra
from flexact.io.text_tables import cut
from flexact.observe.figures.colours import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "image.composite_image": False,  # an SVG has one pixel per cell of a heat map
    "legend.frameon": False,
    "path.simplify_threshold": 0.5,  # pixels; keeps the SVG of a curve with many steps small
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "flexact",  # the same data give the same file
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a layer's name does not start a formula
}
_SVG = '<svg role="img" style="max-width: 100%; height: auto"'
"""The opening of an SVG element that fits pages and cells of notebooks. Screen readers read its title."""
_LETTER, _SWATCH = 0.07, 0.7
"""Widths in inches of a letter in the legend, and of the symbol and the spaces around a name."""
_MAX_PIXELS = 600
"""Maximum width of the image of a heat map."""
_LONGEST_NAME = 26
"""Maximum letters of the name of a row."""
RULE = "#999999"
"""The colour of lines that mark a position."""


@contextmanager
def style() -> Iterator[None]:
    """Apply the style of these figures, while one is drawn and while it is saved. It is a decorator as well."""
    if not can_draw():
        raise missing_extra("matplotlib", "plots")
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


class Picture(NamedTuple):
    """A matplotlib figure with its title and a sentence that explains it."""

    slug: str
    """The name of its files."""
    title: str
    sentence: str
    figure: Figure

    @style()
    def png(self) -> bytes:
        """Return the content of a PNG file."""
        data = io.BytesIO()
        self.figure.savefig(data, format="png", metadata={"Software": None})
        return data.getvalue()

    @style()
    def svg(self) -> str:
        """Return an SVG element, which can be a file or part of a page. The same data give the same text."""
        data = io.StringIO()
        self.figure.savefig(data, format="svg", metadata={"Date": None, "Creator": None, "Title": self.title})
        text = data.getvalue()
        return text[text.index("<svg") :].replace("<svg", _SVG, 1)


def panels(count: int = 1, across: int = 1, inches: float = 2.5, same_rows: bool = False) -> tuple[Figure, list[Axes]]:
    """Return an empty figure and its panels, at most `across` side by side, each `inches` high.

    same_rows: whether all panels have the same rows, which are then named once at the left.
    """
    from matplotlib.figure import Figure

    across = min(across, count)
    down = math.ceil(count / across)
    figure = Figure(figsize=(max(8.0, 3.6 * across), inches * down + 0.6), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False, sharey=same_rows).flat)
    for ax in axes[count:]:
        ax.remove()
    for number, ax in enumerate(axes[:count]):
        ax.tick_params(axis="y", left=not same_rows or number % across == 0)
    return figure, axes[:count]


def finished(figure: Figure, colours: Mapping[str, str] | None = None) -> Figure:
    """Add one legend of everything that has a label in a panel, and fix the layout.

    colours: the colours of further entries, which are shown as patches.
    """
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    for name, colour in (colours or {}).items():
        entries[label(name)] = Patch(facecolor=colour, edgecolor=RULE, linewidth=0.5)
    if entries:
        fitting = int(figure.get_figwidth() / (_LETTER * max(map(len, entries)) + _SWATCH))
        columns = max(1, min(len(entries), fitting, 6))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # otherwise every savefig repeats the layout and takes three times as long
    return figure


def label(name: str) -> str:
    """Return a name for the legend, from which matplotlib leaves out names that begin with an underscore."""
    return "\u200b" + name if name.startswith("_") else name


def line(
    ax: Axes,
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    colour: str = INK,
    dash: str = "-",
    width: float = 1.6,
    band: tuple[Sequence[float], Sequence[float]] | None = None,
) -> None:
    """Draw a curve, with a band (low, high) around it if given. An empty name is not in the legend."""
    marker = "o" if len(x) == 1 else ""
    ax.plot(x, y, label=label(name), color=colour, linestyle=dash, linewidth=width, marker=marker)
    if band is not None:
        ax.fill_between(x, *band, color=colour, alpha=0.18, linewidth=0)
    ax.locator_params(axis="x", nbins=5)


def row_inches(rows: int, side_by_side: int = 1) -> float:
    """Return the height of a panel with rows that have one or several bars or marks each."""
    return min(12.0, 0.6 + (0.22 if side_by_side == 1 else 0.15 * side_by_side + 0.1) * rows)


def name_rows(ax: Axes, names: Sequence[str]) -> None:
    """Name the rows of a panel, from top to bottom. If there are many, only every n-th is named."""
    every = max(1, len(names) // 60)
    ax.set_yticks(range(0, len(names), every), cut(names, _LONGEST_NAME)[::every])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)


def rule_rows(ax: Axes, count: int) -> None:
    """Draw the lines that separate rows of marks, and a line at 0."""
    for row in range(1, count):
        ax.axhline(row - 0.5, color="#e6e6e6", linewidth=0.8, zorder=0.5)
    ax.axvline(0, color=RULE, linewidth=0.8, zorder=0.5)


def side_by_side(rows: int, number: int, count: int) -> list[float]:
    """Return the position in each row of one of several bars or marks.

    >>> side_by_side(rows=2, number=0, count=2)
    [-0.2, 0.8]
    """
    return [row + 0.8 * ((number + 0.5) / count - 0.5) for row in range(rows)]


def heat_map(
    ax: Axes,
    steps: Sequence[float],
    rows: Sequence[str],
    values: Sequence[Sequence[float]],
    colours: Sequence[str] = (),
) -> None:
    """Draw one row of cells per name and one column per step.

    values: indexes into the colours or, without colours, probabilities. NaN is an empty cell.
    """
    import numpy
    from matplotlib.colors import ListedColormap

    centres = numpy.asarray(steps, dtype=float)
    gaps = numpy.diff(centres) if centres[-1] > centres[0] else numpy.ones(1)
    low, high = centres[0] - gaps[0] / 2, centres[-1] + gaps[-1] / 2
    pixels = round((high - low) / max(gaps.min(), (high - low) / _MAX_PIXELS))  # the narrowest column takes one
    places = numpy.linspace(low, high, 2 * pixels + 1)[1::2]
    cells = numpy.asarray(values)[:, abs(places[:, None] - centres).argmin(axis=1)]
    shades = ListedColormap(colours) if colours else "Blues"
    first, last = (-0.5, len(colours) - 0.5) if colours else (0.0, 1.0)
    extent = (low, high, len(rows) - 0.5, -0.5)
    ax.grid(visible=False)
    ax.imshow(cells, shades, aspect="auto", interpolation="none", vmin=first, vmax=last, extent=extent)
    name_rows(ax, rows)
    if len(steps) == 1:
        ax.set_xticks(steps)
    elif all(float(step).is_integer() for step in steps):  # there is no step 2.5
        ax.locator_params(axis="x", integer=True)
