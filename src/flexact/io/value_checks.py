"""Checks of arguments and of a command's options, with errors that name them."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from numbers import Integral, Real
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


def integer(name: str, value: Any) -> int:
    """Return an integer of any type, such as numpy's or a tensor, as an int. Booleans are not accepted."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    raise FlexActError(f"{name} must be an integer; got {value!r:.80}.")


def steps(name: str, value: Any, otherwise: str = "") -> int:
    """Return a number of optimizer steps. otherwise: what else is allowed, for the error message."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= MAX_STEPS:
        raise FlexActError(
            f"{name} must be a whole number (an int) of optimizer steps, at least 1{otherwise}; got {value!r:.80}."
        )
    return int(value)


def choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise unless a value is one of the allowed words."""
    names = list(allowed)
    if value not in names:
        raise FlexActError(
            f"{name}={value!r:.80} is not a choice{suggestion(str(value), names)} Expected one of: {', '.join(names)}."
        )


MAX_STEPS = 2**53
"""Maximum steps of a run. Fractions of a run are computed in floats, which are exact up to this number."""


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


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raise unless a name is one of the known names."""
    if name not in known:
        raise FlexActError(f"unknown {kind} {name!r}{suggestion(str(name), known)} Known: {', '.join(known)}.")


def check_whole(option: str, value: Any, low: int, high: int) -> None:
    """Raise unless a value is an integer in a range."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FlexActError(f"--{option} must be a whole number from {low} to {high}; got {value!r}.")


def check_seed(seed: Any) -> None:
    """Raise unless a cell's seed is a non-negative integer."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise FlexActError(f"a seed must be a non-negative integer; got {seed!r}.")
