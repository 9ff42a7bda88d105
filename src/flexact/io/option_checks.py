"""Checks of a command's options, with error messages that name the option."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from flexact.errors import FlexActError, suggestion

_ONE = {"datasets": "data set"}
"""The singular of an option, if it is not the option without its "s"."""


def check_names(option: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise unless an option has at least one name, and all names are known and different."""
    if not given:
        raise FlexActError(f"--{option} names nothing; give at least one of {', '.join(known)}.")
    for name in given:
        check_known(_ONE.get(option, option.removesuffix("s")), name, known)
    check_once(option, given)


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raise unless a name is one of the known names."""
    if name not in known:
        raise FlexActError(f"unknown {kind} {name!r}{suggestion(str(name), known)} Known: {', '.join(known)}.")


def check_once(option: str, given: Sequence[str]) -> None:
    """Raise if an option repeats a name."""
    repeated = sorted({name for name in given if given.count(name) > 1})
    if repeated:
        raise FlexActError(f"--{option} may name each once; repeated: {', '.join(repeated)}.")


def check_whole(option: str, value: Any, low: int, high: int) -> None:
    """Raise unless a value is an integer in a range."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FlexActError(f"--{option} must be a whole number from {low} to {high}; got {value!r}.")


def check_seed(seed: Any) -> None:
    """Raise unless a cell's seed is a non-negative integer."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise FlexActError(f"a seed must be a non-negative integer; got {seed!r}.")
