"""Parsers for untrusted input, each of which raises only one kind of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError


def parsed_json(text: str | bytes) -> Any:
    """Parse JSON like `json.loads`, but raise ValueError also for input that nests too deeply.

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
    """Return `given` as a Path, or raise FlexActError. of: what the path belongs to, for the error message.

    >>> path_of(7, "a history")
    Traceback (most recent call last):
    ...
    flexact.errors.FlexActError: got 7 as the path of a history. Pass a string or a pathlib.Path.
    """
    try:
        return Path(given)
    except TypeError:
        raise FlexActError(f"got {given!r:.80} as the path of {of}. Pass a string or a pathlib.Path.") from None
