"""How the temperature goes from its first value to its last."""

from __future__ import annotations

import math

from flexact.config import Anneal


def annealed(kind: Anneal, first: float, last: float, progress: float) -> float:
    """The temperature at a fraction of the way from the first to the last.

    >>> round(annealed("exponential", 1.0, 0.01, 0.5), 6)
    0.1
    """
    if kind == "constant":
        return first
    if kind == "exponential":
        return first * math.exp(progress * math.log(last / first))
    if kind == "linear":
        return first + (last - first) * progress
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * progress))
