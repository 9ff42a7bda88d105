"""Descriptions of pictures, which `matplotlib_backend` draws with matplotlib and the report's page with plotly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

INK = "ink"
"""The colour of text: dark on a light page, light on a dark page."""

SHADES = ("#f2f6fb", "#c6dbef", "#7fb2d9", "#3a85bf", "#12508f", "#08264f")
"""Shades of probabilities from 0 to 1, light to dark, so that they are readable without colour."""

SYMBOLS = {"o": "circle", "D": "diamond", "s": "square", "X": "x", "^": "triangle-up", "P": "cross"}
"""Symbols of marks in matplotlib and in plotly, in the order of a panel's bars."""

# The paper's five have Okabe and Ito's colours. These and the next three are distinct for colour-blind readers; all
# candidates after the five also have dashes.
_COLOURS = {
    "relu": "#0072b2",
    "leaky_relu": "#e69f00",
    "sigmoid": "#009e73",
    "tanh": "#cc79a7",
    "identity": "#56b4e9",
    "gelu": "#7a3d1f",
    "silu": "#9933ff",
    "elu": "#5c3663",
    "softplus": "#b0a000",
    "mish": "#e7298a",
    "selu": "#1b9e9e",
    "hardswish": "#7f7f7f",
    "relu6": "#5c6bc0",
    "softsign": "#b15928",
    "relu_squared": "#2e7d32",
    "sine": "#c62828",
    "original": "#999999",
}
_PAPERS_FIVE = ("relu", "leaky_relu", "sigmoid", "tanh", "identity")
_SPARE = ("#d81b60", "#1e88e5", "#8d6e63", "#00897b", "#5e35b1", "#f4511e", "#6d8700", "#546e7a")


def candidate_colours(names: Iterable[str]) -> dict[str, str]:
    """Return one colour per candidate, the same in every picture. Custom candidates get spare colours in their order.

    >>> candidate_colours(["tanh", "mine"])
    {'tanh': '#cc79a7', 'mine': '#d81b60'}
    """
    names = list(dict.fromkeys(names))
    own = [name for name in names if name not in _COLOURS]
    return {name: _COLOURS.get(name) or _SPARE[own.index(name) % len(_SPARE)] for name in names}


def candidate_dash(name: str) -> str:
    """Return solid for the paper's five, dash for the other built-in candidates, dot for custom candidates."""
    return "solid" if name in _PAPERS_FIVE else "dash" if name in _COLOURS else "dot"


@dataclass(frozen=True)
class Line:
    """A curve with an optional band (low, high) around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = INK
    dash: str = "solid"
    width: float = 2.0
    band: tuple[Sequence[float], Sequence[float]] | None = None
    shown: bool = True
    """If False, the page hides the line until its name in the legend is clicked."""


@dataclass(frozen=True)
class Bars:
    """One horizontal bar per row of a panel, with optional errors (one standard deviation)."""

    name: str
    values: Sequence[float]
    colour: str
    errors: Sequence[float] | None = None


@dataclass(frozen=True)
class Grid:
    """A heat map with one value per row of a panel and column. NaN is an empty cell."""

    columns: Sequence[float]
    values: Sequence[Sequence[float]]
    categories: Sequence[tuple[str, str]] = ()
    """(name, colour) of categories, into which the values are indexes. If empty, the values are probabilities."""
    notes: Sequence[Sequence[str]] = ()
    """Texts that the page shows on hover instead of the values."""


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str = ""
    x_label: str = ""
    y_label: str = ""
    lines: Sequence[Line] = ()
    rows: Sequence[str] = ()
    """Names of the rows of bars or of the grid, from top to bottom."""
    bars: Sequence[Bars] = ()
    marks: bool = False
    """Whether points are drawn at the ends of bars instead of bars, so that a value of 0 is visible."""
    stacked: bool = False
    totals: bool = False
    """Whether the sum of each row is printed at the end of its stacked bars."""
    grid: Grid | None = None
    log_values: bool = False
    """Whether the axis of the bars is logarithmic."""
    value_range: tuple[float, float] | None = None
    x_note: str = ""
    """A remark on the x axis, which follows its label."""

    @property
    def x_title(self) -> str:
        """The text below the x axis."""
        return f"{self.x_label} ({self.x_note})" if self.x_note else self.x_label


@dataclass(frozen=True)
class PictureDescription:
    """Panels under one title, with one legend and a sentence that explains them."""

    slug: str
    title: str
    sentence: str
    panels: Sequence[Panel] = field(repr=False)
    across: int = 3
    """Maximum number of panels side by side. With 1, each panel is as wide as the page."""

    @property
    def legend(self) -> dict[str, Line | Bars | tuple[str, str]]:
        """The legend's entries by name, in the order of appearance."""
        entries: dict[str, Line | Bars | tuple[str, str]] = {}
        for panel in self.panels:
            for line in panel.lines:
                if line.name != panel.title:  # the title names it already
                    entries.setdefault(line.name, line)
            if [bars.name for bars in panel.bars] != list(panel.rows):  # the rows name them already
                for bars in panel.bars:
                    entries.setdefault(bars.name, bars)
            for name, colour in panel.grid.categories if panel.grid else ():
                entries.setdefault(name, (name, colour))
        return entries

    @property
    def has_shades(self) -> bool:
        """Whether a panel is a heat map of probabilities."""
        return any(panel.grid is not None and not panel.grid.categories for panel in self.panels)


def value_range(panel: Panel) -> tuple[float, float] | None:
    """Return the range of a panel's values. On a logarithmic axis it contains all bars, with room on both sides."""
    if panel.value_range is not None or not panel.log_values or not panel.bars:
        return panel.value_range
    ends = [v + e for bars in panel.bars for v, e in zip(bars.values, bars.errors or bars.values, strict=True) if v > 0]
    low = [v for bars in panel.bars for v in bars.values if v > 0]
    if not low:
        return None
    return 10 ** math.floor(math.log10(min(low)) - 0.3), max(ends) * 1.6


def short_names(names: Sequence[str], most: int = 24) -> list[str]:
    """Return names for an axis. A start that all names share is removed, and long names are cut at the start. Names
    that would become equal are cut at the end, and stay whole if that does not distinguish them.

    >>> short_names(["encoder.layer.0.act", "encoder.layer.1.act"])
    ['0.act', '1.act']
    >>> short_names(["encoder.layer.0.intermediate.act", "encoder.layer.1.intermediate.act", "pool"], most=18)
    ['encoder.layer.0…', 'encoder.layer.1…', 'pool']
    """
    whole = _without_shared_start(names)
    short = [_end(name, most) for name in whole]
    for label in _repeated(short):
        alike = [i for i, other in enumerate(short) if other == label]
        ends = _without_shared_end([whole[i] for i in alike])
        for i, end in zip(alike, ends, strict=True):
            short[i] = _end(end, most - 1) + "…"
    repeated = _repeated(short)
    return [name if label in repeated else label for name, label in zip(whole, short, strict=True)]


def _without_shared_start(names: Sequence[str]) -> list[str]:
    """Return dotted names without the parts that all of them begin with. The last part of a name always stays."""
    parts = [name.split(".") for name in names]
    shared = 0
    while len(names) > 1 and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return [".".join(p[shared:]) for p in parts]


def _without_shared_end(names: Sequence[str]) -> list[str]:
    mirrored = [".".join(reversed(name.split("."))) for name in names]
    return [".".join(reversed(name.split("."))) for name in _without_shared_start(mirrored)]


def _end(name: str, most: int) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def _repeated(labels: Sequence[str]) -> set[str]:
    return {label for label, count in Counter(labels).items() if count > 1}
