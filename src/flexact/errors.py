"""The exception that flexact raises for bad input, and parts of its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlexActError(Exception):
    """Raised for bad input, and for a setup that flexact does not support.

    The message says what was given, what is expected and what to do.

    >>> import flexact
    >>> try:
    ...     flexact.FlexAct(candidates=("relu", "tahn"))
    ... except flexact.FlexActError as error:
    ...     print(error)
    unknown candidate 'tahn'; did you mean 'tanh'? Add your own with flexact.register_candidate.
    """


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'tanh'?" with the closest known word, ignoring case, or "." if none is close."""
    names = {name.lower(): name for name in known}
    closest = difflib.get_close_matches(word.lower(), names, n=1)
    return f"; did you mean {names[closest[0]]!r}?" if closest else "."


def missing_extra(package: str, extra: str) -> FlexActError:
    """Return the error for an optional package that is not installed."""
    return FlexActError(
        f"this needs the package {package!r}, which is not installed. Install it with: pip install 'flexact[{extra}]'"
    )
