"""What a picture shows, described once: `matplotlib_backend` draws it, the report's page with plotly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

INK = "ink"
"""The text colour of the page: dark in the light theme, light in the dark theme."""

SHADES = ("#f2f6fb", "#c6dbef", "#7fb2d9", "#3a85bf", "#12508f", "#08264f")
"""Colour map for probabilities from 0 to 1; it goes from light to dark, so it also works in greyscale."""

SYMBOLS = {"o": "circle", "D": "diamond", "s": "square", "X": "x", "^": "triangle-up", "P": "cross"}
"""Marker symbols in the order of a panel's bars, matplotlib's name to plotly's; overlapping marks stay visible."""

# The paper's five candidates have Okabe and Ito's colours. Colour-blind readers can distinguish these and the next
# three; all candidates but the five are dashed as well.
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
    custom = [name for name in names if name not in _COLOURS]
    return {name: _COLOURS.get(name) or _SPARE[custom.index(name) % len(_SPARE)] for name in names}


def candidate_dash(name: str) -> str:
    """Return "solid" for the paper's five candidates, "dash" for other built-in ones and "dot" for custom ones."""
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
    star: bool = False
    """Draw stars at the points instead of a curve."""
    shown: bool = True
    """If False, the page hides the line until it is switched on in the legend."""


@dataclass(frozen=True)
class Bars:
    """One horizontal bar per row of a panel, with optional error bars of one standard deviation."""

    name: str
    values: Sequence[float]
    colour: str
    errors: Sequence[float] | None = None


@dataclass(frozen=True)
class Grid:
    """A heat map with one value per row of a panel and column; NaN is an empty cell."""

    columns: Sequence[float] | Sequence[str]
    values: Sequence[Sequence[float]]
    categories: Sequence[tuple[str, str]] = ()
    """(name, colour) pairs that the values index. If empty, the values are probabilities."""
    notes: Sequence[Sequence[str]] = ()
    """Text per cell that the page shows on hover instead of the value."""


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str = ""
    x_label: str = ""
    y_label: str = ""
    lines: Sequence[Line] = ()
    rows: Sequence[str] = ()
    """Labels of the rows of the bars or the grid, from top to bottom."""
    bars: Sequence[Bars] = ()
    marks: bool = False
    """Draw only the ends of the bars, as points on one line per row; for values of both signs."""
    stacked: bool = False
    totals: bool = False
    """Print the sum of each row at the end of its stacked bars."""
    grid: Grid | None = None
    inset: Sequence[tuple[str, float, str]] = ()
    """Small bars in the upper left corner: (name, probability, colour)."""
    log_values: bool = False
    value_range: tuple[float, float] | None = None
    x_note: str = ""
    """A remark about the x axis, shown in parentheses after its label."""

    @property
    def x_title(self) -> str:
        """The label of the x axis with the remark."""
        return f"{self.x_label} ({self.x_note})" if self.x_note else self.x_label


@dataclass(frozen=True)
class PictureDescription:
    """Panels under one title, with one legend and a sentence that says what they show."""

    slug: str
    title: str
    sentence: str
    panels: Sequence[Panel] = field(repr=False)
    across: int = 3
    """Maximum number of panels side by side; with 1, each is as wide as the page."""

    @property
    def legend(self) -> dict[str, Line | Bars | tuple[str, str]]:
        """The legend entries by name, in order of appearance."""
        entries: dict[str, Line | Bars | tuple[str, str]] = {}
        for panel in self.panels:
            for line in panel.lines:
                if line.name != panel.title:  # which already names the line
                    entries.setdefault(line.name, line)
            if [bars.name for bars in panel.bars] != list(panel.rows):  # whose labels already name the bars
                for bars in panel.bars:
                    entries.setdefault(bars.name, bars)
            for name, _, colour in panel.inset:
                entries.setdefault(name, (name, colour))
            for name, colour in panel.grid.categories if panel.grid else ():
                entries.setdefault(name, (name, colour))
        return entries

    @property
    def has_shades(self) -> bool:
        """Whether any panel is a heat map of probabilities."""
        return any(panel.grid is not None and not panel.grid.categories for panel in self.panels)


def value_range(panel: Panel) -> tuple[float, float] | None:
    """Return the limits of a panel's value axis. On a logarithmic axis they fit all bars, with a margin."""
    if panel.value_range is not None or not panel.log_values or not panel.bars:
        return panel.value_range
    ends = [v + e for bars in panel.bars for v, e in zip(bars.values, bars.errors or bars.values, strict=True) if v > 0]
    positive = [v for bars in panel.bars for v in bars.values if v > 0]
    if not positive:
        return None
    return 10 ** math.floor(math.log10(min(positive)) - 0.3), max(ends) * 1.6


def short_names(names: Sequence[str], most: int = 24) -> list[str]:
    """Shorten dotted names for an axis.

    The common prefix is removed, and names longer than `most` characters are truncated at the start. If that makes
    names equal, their common suffix is removed instead; names that are still equal are kept in full.

    >>> short_names(["encoder.layer.0.act", "encoder.layer.1.act"])
    ['0.act', '1.act']
    >>> short_names(["encoder.layer.0.intermediate.act", "encoder.layer.1.intermediate.act", "pool"], most=18)
    ['encoder.layer.0…', 'encoder.layer.1…', 'pool']
    """
    full = _without_common_prefix(names)
    short = [_truncated(name, most) for name in full]
    for label in _duplicates(short):
        equal = [i for i, other in enumerate(short) if other == label]
        heads = _without_common_suffix([full[i] for i in equal])
        for i, head in zip(equal, heads, strict=True):
            short[i] = _truncated(head, most - 1) + "…"
    duplicates = _duplicates(short)
    return [name if label in duplicates else label for name, label in zip(full, short, strict=True)]


def _without_common_prefix(names: Sequence[str]) -> list[str]:
    """Remove the leading parts that all dotted names share; the last part of a name is always kept."""
    parts = [name.split(".") for name in names]
    common = 0
    while len(names) > 1 and all(len(p) > common + 1 and p[common] == parts[0][common] for p in parts):
        common += 1
    return [".".join(p[common:]) for p in parts]


def _without_common_suffix(names: Sequence[str]) -> list[str]:
    mirrored = [".".join(reversed(name.split("."))) for name in names]
    return [".".join(reversed(name.split("."))) for name in _without_common_prefix(mirrored)]


def _truncated(name: str, most: int) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def _duplicates(labels: Sequence[str]) -> set[str]:
    return {label for label, count in Counter(labels).items() if count > 1}


def shade_ink(p: float) -> str:
    """Return a text colour that is readable on the shade of a probability."""
    return "#ffffff" if p > 0.5 else "#222222"
