"""The methods of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from flexact.candidates import ALIASES, ORIGINAL
from flexact.errors import FlexActError
from flexact.io.option_checks import check_names
from flexact.studies.grid.fixed_methods import FIXED, candidate_of, fixed

FLEXACT = "flexact"
"""The network that picks while it trains."""
ALONE = "flexact-alone"
"""The picks of `FLEXACT`, trained from the start in a plain network."""
NAMED: tuple[str, ...] = (ORIGINAL, FLEXACT, ALONE)
USUAL: tuple[str, ...] = (ORIGINAL, FIXED, FLEXACT, ALONE)


def methods_of(candidates: Sequence[str], asked: Sequence[str] = USUAL, original: str | None = None) -> tuple[str, ...]:
    """The methods that names stand for, in the order of the table; "fixed" stands for each candidate at every site.

    original: the candidate that the network has at every site already; "fixed" omits it: "original" covers it.

    >>> methods_of(("original", "relu", "gelu"), original="relu")
    ('original', 'fixed-gelu', 'flexact', 'flexact-alone')
    """
    if isinstance(asked, str):
        raise FlexActError(f"methods must be a sequence of names such as {USUAL}; got {asked!r}.")
    own = {_canonical(candidate): candidate for candidate in candidates}
    asked = [fixed(own.get(_canonical(one), one)) if (one := candidate_of(name)) else name for name in asked]
    every = [fixed(candidate) for candidate in candidates if candidate != ORIGINAL]
    check_names("methods", asked, (ORIGINAL, FIXED, *every, FLEXACT, ALONE))
    wanted = set(asked) | {one for one in every if FIXED in asked and one != fixed(original or "")}
    if ALONE in wanted:
        wanted.add(FLEXACT)  # which makes the picks
    return tuple(one for one in (ORIGINAL, *every, FLEXACT, ALONE) if one in wanted)


def _canonical(candidate: str) -> str:
    """The name of a candidate that has aliases, in any case."""
    return ALIASES.get(candidate.lower(), candidate.lower())
