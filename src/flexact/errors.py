"""The one exception that a user of this library can cause."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlexActError(Exception):
    """Bad input: the message says what was given, what was expected, and what to do.

    >>> import flexact
    >>> try:
    ...     flexact.FlexAct(candidates=("relu", "tahn"))
    ... except flexact.FlexActError as error:
    ...     print(error)
    unknown candidate 'tahn'; did you mean 'tanh'? Known: ...
    """


def suggestion(word: str, known: Iterable[str]) -> str:
    """What follows the wrong word in an error message: "; did you mean 'tanh'?", or "." when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


def missing_extra(package: str, extra: str) -> FlexActError:
    """The error for an optional package that is not installed."""
    return FlexActError(
        f"this needs the package {package!r}, which is not installed; install it with: pip install 'flexact[{extra}]'"
    )
