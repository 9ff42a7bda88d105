"""The colours of figures, one per candidate. matplotlib is not needed."""

from __future__ import annotations

from collections.abc import Iterable

from flexact.config import PAPER_CANDIDATES

INK = "#222222"
"""The colour of text, and of lines that stand for no candidate."""
GREY = "#8c959f"
"""The colour of undecided sites."""

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
    """Return one colour per candidate, the same in every figure. Custom candidates get spare colours in their order.

    >>> candidate_colours(["tanh", "mine"])
    {'tanh': '#cc79a7', 'mine': '#d81b60'}
    """
    names = list(dict.fromkeys(names))
    own = [name for name in names if name not in _COLOURS]
    return {name: _COLOURS.get(name) or _SPARE[own.index(name) % len(_SPARE)] for name in names}


def candidate_dash(name: str) -> str:
    """Return a line style: "-" for the paper's five, "--" for other built-in candidates, ":" for custom ones."""
    return "-" if name in PAPER_CANDIDATES else "--" if name in _COLOURS else ":"
