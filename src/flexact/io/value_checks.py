"""Checks of arguments and of a command's options, with errors that name them."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

from flexact.errors import FlexActError, suggestion


def number(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
) -> Any:
    """Return a finite number within bounds. Other number types, such as numpy's, are converted to float.

    >>> number("alpha", -1, at_least=0)
    Traceback (most recent call last):
    ...
    flexact.errors.FlexActError: alpha must be a finite number at least 0; got -1.
    """
    found = value
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if is_real and not isinstance(value, int):
        found = float(value)
    is_finite = is_real and abs(found) <= sys.float_info.max
    if not (is_finite and above < found < below and at_least <= found <= at_most):
        bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
        limits = " and ".join(f"{which} {bound:g}" for which, bound in bounds.items() if math.isfinite(bound))
        raise FlexActError(f"{name} must be a finite number{' ' + limits if limits else ''}; got {value!r:.80}.")
    return found


MAX_STEPS = 2**53
"""Maximum steps of a run. Fractions of a run are computed in floats, which are exact up to this number."""


def integer(name: str, value: Any, low: int | None = None, high: int | None = None, otherwise: str = "") -> int:
    """Return an integer of any type, such as numpy's or a tensor, as an int. Booleans are not accepted.

    low, high: the smallest and the largest allowed integer. otherwise: what else is allowed, for the error message.
    """
    with suppress(TypeError):
        found = operator.index(value)
        if not isinstance(value, bool) and (low is None or low <= found) and (high is None or found <= high):
            return found
    limits = ("" if low is None else f" from {low}") + ("" if high is None else f" to {high}")
    raise FlexActError(f"{name} must be a whole number{limits}{otherwise}; got {value!r:.80}.")


_ONE = {"datasets": "data set"}
"""The singular of an option, if it is not the option without its "s"."""


def check_names(option: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise unless an option has at least one name, and all names are known and different."""
    if not given:
        raise FlexActError(f"--{option} names nothing; give at least one of {', '.join(known)}.")
    for name in given:
        check_known(_ONE.get(option, option.removesuffix("s")), name, known)
    repeated = sorted({name for name in given if given.count(name) > 1})
    if repeated:
        raise FlexActError(f"--{option} names {', '.join(repeated)} more than once.")


def check_known(kind: str, name: Any, known: Collection[str]) -> None:
    """Raise unless a name is one of the known names."""
    if name not in known:
        raise FlexActError(f"unknown {kind} {name!r:.80}{suggestion(str(name), known)} Known: {', '.join(known)}.")


def check_whole(option: str, value: Any, low: int, high: int) -> None:
    """Raise unless the value of an option is an integer in a range."""
    integer(f"--{option}", value, low, high)


def check_seed(seed: Any) -> None:
    """Raise unless a cell's seed is a non-negative integer."""
    integer("a seed", seed, 0)
