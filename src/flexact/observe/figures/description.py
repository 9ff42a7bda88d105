"""What a picture shows, described once: `matplotlib_backend` draws it, the report's page with plotly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

INK = "ink"
"""The colour of text: dark on a light page, light on a dark one."""

SHADES = ("#f2f6fb", "#c6dbef", "#7fb2d9", "#3a85bf", "#12508f", "#08264f")
"""Probability from 0 to 1: light to dark, so that it reads without colour too."""

SYMBOLS = {"o": "circle", "D": "diamond", "s": "square", "X": "x", "^": "triangle-up", "P": "cross"}
"""Of a panel's marks, in the order of its bars: matplotlib's name and plotly's, so that two in one place both show."""

# Okabe and Ito's colours for the paper's five. These and the next three stay apart for colour-blind readers; all others
# than the five have dashes too.
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
    """One colour a candidate, the same in every picture; names of the user's own get spare ones in their order.

    >>> candidate_colours(["tanh", "mine"])
    {'tanh': '#cc79a7', 'mine': '#d81b60'}
    """
    names = list(dict.fromkeys(names))
    own = [name for name in names if name not in _COLOURS]
    return {name: _COLOURS.get(name) or _SPARE[own.index(name) % len(_SPARE)] for name in names}


def candidate_dash(name: str) -> str:
    """Solid for the paper's five, dashed for the other built-in candidates, dotted for a user's own."""
    return "solid" if name in _PAPERS_FIVE else "dash" if name in _COLOURS else "dot"


@dataclass(frozen=True)
class Line:
    """A curve, with a band around it (low, high) where there is one."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = INK
    dash: str = "solid"
    width: float = 2.0
    band: tuple[Sequence[float], Sequence[float]] | None = None
    star: bool = False
    """Only marks its points."""
    shown: bool = True
    """False: the page offers it in the legend, switched off at first."""


@dataclass(frozen=True)
class Bars:
    """One horizontal bar for each row of a panel, with its error (one standard deviation) where there is one."""

    name: str
    values: Sequence[float]
    colour: str
    errors: Sequence[float] | None = None


@dataclass(frozen=True)
class Grid:
    """A heat map: one value for each row of a panel and each column; NaN is an empty cell."""

    columns: Sequence[float] | Sequence[str]
    values: Sequence[Sequence[float]]
    categories: Sequence[tuple[str, str]] = ()
    """(name, colour): the values are indexes into these. Empty: the values are probabilities."""
    notes: Sequence[Sequence[str]] = ()
    """What the page shows on hover instead of the value."""


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str = ""
    x_label: str = ""
    y_label: str = ""
    lines: Sequence[Line] = ()
    rows: Sequence[str] = ()
    """What the bars or the grid's rows belong to, from top to bottom."""
    bars: Sequence[Bars] = ()
    marks: bool = False
    """Of bars: only their ends are drawn, as points on one line a row; for values on both sides of 0."""
    stacked: bool = False
    totals: bool = False
    """Of stacked bars: the sum of each row stands at its end."""
    grid: Grid | None = None
    inset: Sequence[tuple[str, float, str]] = ()
    """Small bars in the upper left corner: (name, probability, colour)."""
    log_values: bool = False
    value_range: tuple[float, float] | None = None
    x_note: str = ""
    """What there is to know about the x axis: it stands behind its label."""

    @property
    def x_title(self) -> str:
        """What stands below the x axis."""
        return f"{self.x_label} ({self.x_note})" if self.x_note else self.x_label


@dataclass(frozen=True)
class PictureDescription:
    """Panels under one title, with one legend and a sentence that says what they show."""

    slug: str
    title: str
    sentence: str
    panels: Sequence[Panel] = field(repr=False)
    across: int = 3
    """So many panels side by side at most; 1: each is as wide as the page."""

    @property
    def legend(self) -> dict[str, Line | Bars | tuple[str, str]]:
        """What each name stands for, in the order of appearance."""
        entries: dict[str, Line | Bars | tuple[str, str]] = {}
        for panel in self.panels:
            for line in panel.lines:
                if line.name != panel.title:  # that says it already
                    entries.setdefault(line.name, line)
            if [bars.name for bars in panel.bars] != list(panel.rows):  # these say it already
                for bars in panel.bars:
                    entries.setdefault(bars.name, bars)
            for name, _, colour in panel.inset:
                entries.setdefault(name, (name, colour))
            for name, colour in panel.grid.categories if panel.grid else ():
                entries.setdefault(name, (name, colour))
        return entries

    @property
    def has_shades(self) -> bool:
        """Whether a heat map of probabilities is among the panels."""
        return any(panel.grid is not None and not panel.grid.categories for panel in self.panels)


def value_range(panel: Panel) -> tuple[float, float] | None:
    """The range of a panel's values; on a logarithmic axis one that holds all bars with room on both sides."""
    if panel.value_range is not None or not panel.log_values or not panel.bars:
        return panel.value_range
    ends = [v + e for bars in panel.bars for v, e in zip(bars.values, bars.errors or bars.values, strict=True) if v > 0]
    low = [v for bars in panel.bars for v in bars.values if v > 0]
    if not low:
        return None
    return 10 ** math.floor(math.log10(min(low)) - 0.3), max(ends) * 1.6


def short_names(names: Sequence[str], most: int = 24) -> list[str]:
    """Names for an axis: without what all begin with, and the ends of those that are still long. Names whose ends are
    alike lose what they share there, and stay whole if that does not tell them apart.

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
    """Dotted names without the parts that all of several begin with; the last part of a name always stays."""
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


def shade_ink(p: float) -> str:
    """The colour of a number on the shade of a probability."""
    return "#ffffff" if p > 0.5 else "#222222"
