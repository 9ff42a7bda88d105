"""The history file of a Recorder: the names in its records, and reading it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError
from flexact.io.json_input import parsed_json

VERSION = 2
KEY = "flexact_history"
DROPS, DECISIONS = "drops", "decisions"
RESERVED = ("sites", "picks", DROPS, DECISIONS)
"""What a record has besides its step and the user's numbers."""
_OPENING = json.dumps({KEY: VERSION})[:-1]


def records(path: Path) -> list[dict[str, Any]]:
    """The records of a history file."""
    if not path.is_file():
        raise FlexActError(f"there is no history at {path}; give the file that Recorder(model, path=...) writes.")
    text = _text(path)
    if not text:
        raise FlexActError(f"{path} is cut off or damaged: it is empty. Record the run again, or remove the file.")
    return _parsed(path, text)


def existing(path: Path) -> list[dict[str, Any]]:
    """The records of a file to append to; none where there is no file yet."""
    if not path.exists():
        return []
    text = _text(path)
    whole = text[: text.rfind("\n") + 1]  # a run that was killed may leave its last line unfinished
    cut_header = _OPENING.startswith(text) or re.match(re.escape(_OPENING) + r"\b", text)
    return _parsed(path, whole if whole or cut_header else text)


def _text(path: Path) -> str:
    if not path.is_file():
        raise FlexActError(f"{path} is not a regular file; give the path of a history that a Recorder wrote.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise FlexActError(f"{path} is not a history of flexact: it is no text file.") from None


def _parsed(path: Path, text: str) -> list[dict[str, Any]]:
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = parsed_json(line)
        except ValueError as error:
            if number == 1:
                _check_header(path, None)
            raise FlexActError(
                f"{path}, line {number}: not valid JSON ({error}). The file is cut off or was edited; remove that "
                "line to read the rest."
            ) from None
        if number == 1:
            _check_header(path, entry)
        elif _is_record(entry):
            entries.append(entry)
        else:
            raise FlexActError(f"{path}, line {number}: not a record; it needs 'step' and 'sites'.")
    return entries


def _is_record(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return False
    return all(isinstance(entry.get(name, {}), dict) for name in ("sites", DROPS, DECISIONS)) and "sites" in entry


def _check_header(path: Path, header: Any) -> None:
    """Refuse a file that is no history, or one of a later version; version 1 had no drops and decisions."""
    number = header.get(KEY) if isinstance(header, dict) else None
    if not isinstance(number, int):
        raise FlexActError(f'{path} is not a history of flexact: its first line must begin with {{"{KEY}": {VERSION}.')
    if number > VERSION:
        raise FlexActError(f"{path} has version {number}, and this flexact reads up to {VERSION}; update flexact.")
