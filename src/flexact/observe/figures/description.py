"""Panels: what `matplotlib_backend` draws in figures and `svg_backend` on pages and in notebooks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flexact.config import PAPER_CANDIDATES

INK = "ink"
"""The colour of text: dark on a light page, light on a dark page."""

SHADES = ("#f2f6fb", "#c6dbef", "#7fb2d9", "#3a85bf", "#12508f", "#08264f")
"""Shades of probabilities from 0 to 1, light to dark, so that they are readable without colour."""

SYMBOLS = {
    "o": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",
    "D": "M0-6L6 0 0 6-6 0z",
    "s": "M-5-5h10v10h-10z",
    "X": "M-5-3l2-2 3 3 3-3 2 2-3 3 3 3-2 2-3-3-3 3-2-2 3-3z",
    "^": "M0-6L6 5H-6z",
    "P": "M-2-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z",
}
"""Symbols of marks in matplotlib and as SVG paths, in the order of a panel's bars."""

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
    "gelu_tanh": "#2fca0f",
    "quick_gelu": "#8a1297",
    "snake": "#fb00e4",
    "star_relu": "#0e5df3",
    "hardtanh": "#ee7ef0",
    "hardsigmoid": "#f96a09",
    "softshrink": "#b6a668",
    "hardshrink": "#8f0b3d",
    "logsigmoid": "#4f5009",
    "tanhshrink": "#14563f",
    "clipped_gelu": "#fd7583",
    "hard_mish": "#22c967",
    "laplace": "#6ba004",
    "sqrt_softplus": "#fd020e",
    "original": "#999999",
}
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
    return "solid" if name in PAPER_CANDIDATES else "dash" if name in _COLOURS else "dot"


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
    symbol: str = ""
    """The symbol of marks, one of `SYMBOLS`, which the legend shows too; by default they have a different one for each
    of a panel's bars, and the legend shows the colour."""

    @property
    def ends(self) -> list[float]:
        """Both ends of the whisker of each value."""
        errors = self.errors or [0.0] * len(self.values)
        return [value + sign * error for value, error in zip(self.values, errors, strict=True) for sign in (-1, 1)]


@dataclass(frozen=True)
class Grid:
    """A heat map with one value per row of a panel and column. NaN is an empty cell."""

    columns: Sequence[float]
    values: Sequence[Sequence[float]]
    categories: Sequence[tuple[str, str]] = ()
    """(name, colour) of categories, into which the values are indexes. If empty, the values are probabilities."""
    notes: Sequence[Sequence[str]] = ()
    """Texts that the page shows on hover instead of the values."""
    opacity: Sequence[Sequence[float]] = ()
    """Opacity of each cell; if empty, every cell is opaque."""
    labels: Sequence[Sequence[str]] = ()
    """Short texts in the cells."""

    @property
    def edges(self) -> list[float]:
        """The edges of the columns, half-way between their centres.

        >>> Grid([0, 1, 3], []).edges
        [-0.5, 0.5, 2.0, 4.0]
        """
        first, last = self.columns[0], self.columns[-1]
        if len(self.columns) == 1:
            return [first - 0.5, first + 0.5]
        inner = [(a + b) / 2 for a, b in pairwise(self.columns)]
        return [2 * first - inner[0], *inner, 2 * last - inner[-1]]


@dataclass(frozen=True)
class Event:
    """A vertical line through a panel, such as a drop."""

    x: float
    name: str
    """The kind of event, for the legend."""
    label: str = ""
    """Text beside the line."""
    note: str = ""
    """Text that the page shows on hover."""
    dash: str = "dash"


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str = ""
    x_label: str = ""
    y_label: str = ""
    lines: Sequence[Line] = ()
    events: Sequence[Event] = ()
    rows: Sequence[str] = ()
    """Names of the rows of bars or of the grid, from top to bottom."""
    bars: Sequence[Bars] = ()
    marks: bool = False
    """Whether points are drawn at the ends of bars instead of bars, so that a value of 0 is visible. A NaN is not
    drawn."""
    stacked: bool = False
    """Whether the bars of a row follow each other; such a panel needs a `value_range`."""
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

    @property
    def limits(self) -> tuple[float, float] | None:
        """The range of the values. On a logarithmic axis it contains all bars, with room on both sides."""
        low = [v for bars in self.bars for v in bars.values if v > 0]
        if self.value_range is not None or not self.log_values or not low:
            return self.value_range
        high = max(end for bars in self.bars for end in bars.ends if math.isfinite(end))
        return 10 ** math.floor(math.log10(min(low)) - 0.3), high * 1.6

    def place(self, number: int, row: int) -> float:
        """Return the offset of a bar below the middle of its row, in bar heights: the bars of a row lie side by side
        unless they are stacked, and only finite values take up space."""
        if self.stacked:
            return 0.0
        taken = [math.isfinite(bars.values[row]) for bars in self.bars]
        return sum(taken[:number]) - (sum(taken) - 1) / 2


Legend = dict[str, Line | Bars | tuple[str, str]]
"""The entries of a legend by name; a category of a heat map is its (name, colour)."""


def short_names(names: Sequence[str], most: int = 24) -> list[str]:
    """Return names for an axis. A prefix that all names share is removed, and long names are cut at the start. Names
    that would become equal are cut at the end, and stay whole if that does not distinguish them.

    >>> short_names(["encoder.layer.0.act", "encoder.layer.1.act"])
    ['0.act', '1.act']
    >>> short_names(["encoder.layer.0.intermediate.act", "encoder.layer.1.intermediate.act", "pool"], most=18)
    ['encoder.layer.0…', 'encoder.layer.1…', 'pool']
    """
    whole = without_shared_start(names)
    short = [_end(name, most) for name in whole]
    for label in _repeated(short):
        alike = [i for i, other in enumerate(short) if other == label]
        ends = without_shared_end([whole[i] for i in alike])
        for i, end in zip(alike, ends, strict=True):
            short[i] = _end(end, most - 1) + "…"
    repeated = _repeated(short)
    return [name if label in repeated else label for name, label in zip(whole, short, strict=True)]


def without_shared_start(names: Sequence[str]) -> list[str]:
    """Return dotted names without their common prefix. The last part of a name always stays."""
    parts = [name.split(".") for name in names]
    shared = 0
    while len(names) > 1 and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return [".".join(p[shared:]) for p in parts]


def without_shared_end(names: Sequence[str]) -> list[str]:
    mirrored = [".".join(reversed(name.split("."))) for name in names]
    return [".".join(reversed(name.split("."))) for name in without_shared_start(mirrored)]


def _end(name: str, most: int) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def _repeated(labels: Sequence[str]) -> set[str]:
    return {label for label, count in Counter(labels).items() if count > 1}
