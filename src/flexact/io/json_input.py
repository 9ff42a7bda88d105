"""Reading what a user or a stranger gave: whatever is wrong with it comes out as one kind of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError


def parsed_json(text: str | bytes) -> Any:
    """`json.loads`, whose every objection is a ValueError: also to what nests too deeply.

    >>> parsed_json("[" * 100_000)
    Traceback (most recent call last):
    ...
    ValueError: it nests too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def path_of(given: Any, of: str) -> Path:
    """A path as given; an error that says what it was to be the path of where it is none.

    >>> path_of(7, "a history")
    Traceback (most recent call last):
    ...
    flexact.errors.FlexActError: the path of a history is a string or a pathlib.Path; got 7.
    """
    try:
        return Path(given)
    except TypeError:
        raise FlexActError(f"the path of {of} is a string or a pathlib.Path; got {given!r:.80}.") from None
