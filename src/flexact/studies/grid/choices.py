"""What a grid can be asked for, checked in the words of its options."""

from __future__ import annotations

from collections.abc import Sequence

from flexact.errors import FlexActError, suggestion

MOST_SEEDS = 1000


def check_names(kind: str, given: Sequence[str], known: Sequence[str]) -> None:
    """At least one name of a kind, each once, and each known."""
    if not given:
        raise FlexActError(f"--{kind}s names nothing; give at least one of {', '.join(known)}.")
    for name in given:
        if name not in known:
            raise FlexActError(f"unknown {kind} {name!r};{suggestion(name, known)} Known: {', '.join(known)}.")
    repeated = sorted({name for name in given if given.count(name) > 1})
    if repeated:
        raise FlexActError(f"--{kind}s may name each once; repeated: {', '.join(repeated)}.")


def check_seeds(seeds: int, first_seed: int) -> None:
    """How many seeds, and the first of them."""
    for flag, value, low, high in (("seeds", seeds, 1, MOST_SEEDS), ("first-seed", first_seed, 0, 2**40)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise FlexActError(f"--{flag} must be a whole number from {low} to {high}; got {value!r}.")
