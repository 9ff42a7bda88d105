"""The history file of a Recorder: the names in its records, and reading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError
from flexact.io.json_input import parsed_json
from flexact.io.markdown_tables import counted

Records = Sequence[Mapping[str, Any]]
"""The records of a Recorder."""
VERSION = 2
KEY = "flexact_history"
DROPS, DECISIONS, TRYING = "drops", "decisions", "trying"
RESERVED = ("sites", "picks", DROPS, DECISIONS, TRYING)
"""The keys of a record besides its step and the user's numbers."""
_DROP = {"step", "margin", "standard_error", "steps"}


def to_continue(path: Path, resume: bool, overwrite: bool) -> list[dict[str, Any]]:
    """The records of a file that a Recorder appends to; none if there is no file yet, or if it is overwritten.

    Raises if the file has records and neither `resume` nor `overwrite` is given. A file that is not a history is
    never overwritten.
    """
    if not path.exists():
        return []
    text = read_text(path)
    if not text:
        return []
    whole = whole_lines(text) or text  # without a whole line it is not a history
    found = parsed(path, whole.splitlines(keepends=True)[0] if overwrite else whole)[1:]
    if found and not resume:
        raise FlexActError(
            f"{path} has {counted(len(found), 'record')} already, up to step {found[-1]['step']}. Give resume=True to "
            "append to them, overwrite=True to replace them, or another path."
        )
    return found


def number_names(records: Records) -> list[str]:
    """The names of the numbers that records have besides the picks, the loss first."""
    names = dict.fromkeys(key for entry in records for key in entry if key not in ("step", *RESERVED))
    return sorted(names, key=lambda name: name != "loss")


def read_text(path: Path) -> str:
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise FlexActError(f"{path} {what}; give the path of a history that Recorder(model, path=...) wrote.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise FlexActError(f"{path} is not a history of flexact: it is not a text file.") from None


def whole_lines(text: str) -> str:
    """A text without its last line if that is incomplete: the run is in progress, or was killed while writing."""
    return text[: text.rfind("\n") + 1]


def parsed(path: Path, text: str) -> list[dict[str, Any]]:
    """The header and the records of a history, with every line checked."""
    lines = text.splitlines()
    if not lines:
        raise FlexActError(f"{path} is empty: it was cut off or damaged. Record the run again, or remove the file.")
    entries = [_header(path, lines[0])]
    for number, line in enumerate(lines[1:], start=2):
        try:
            entry = parsed_json(line)
        except ValueError as error:
            raise FlexActError(
                f"{path}, line {number}: not valid JSON ({error}). The file is cut off or was edited; remove that "
                "line to read the rest."
            ) from None
        if not _is_record(entry):
            raise FlexActError(f"{path}, line {number}: not a record that a Recorder writes: {line:.160}.")
        entries.append(entry)
    return entries


def _header(path: Path, line: str) -> dict[str, Any]:
    """The header of a history of this version or an earlier one; version 1 had no drops and decisions."""
    header: Any = None
    with suppress(ValueError):
        header = parsed_json(line)
    number = header.get(KEY) if isinstance(header, dict) else None
    if not isinstance(number, int):
        raise FlexActError(f'{path} is not a history of flexact: its first line must begin with {{"{KEY}": {VERSION}.')
    if number > VERSION:
        raise FlexActError(f"{path} has version {number}, but this flexact reads up to {VERSION}; update flexact.")
    return dict(header)


def _is_record(entry: Any) -> bool:
    """Whether an entry has the structure that a Recorder writes, and only numbers that can be drawn."""
    try:
        probabilities = [p for own in entry["sites"].values() for p in own.values()]
        drops = [drop for own in entry.get(DROPS, {}).values() for drop in own.values()]
        evidence = [one for drop in drops for one in drop.values() if one is not None]
        decisions = [(one["runner_up"], one["decided"]) for one in entry.get(DECISIONS, {}).values()]
        steps = [entry["step"], *(drop["step"] for drop in drops)]
    except (AttributeError, KeyError, TypeError):
        return False
    numbers = [value for name, value in entry.items() if name not in RESERVED]
    return (
        all(map(_is_number, [*probabilities, *evidence, *numbers]))
        and not any(p < -1e-6 or p > 1 + 1e-6 for p in probabilities)
        and all(drop.keys() == _DROP for drop in drops)
        and all(isinstance(step, int) for step in steps)
        and isinstance(entry.get(TRYING, ""), str)
        and all(isinstance(second, str | None) and isinstance(decided, bool) for second, decided in decisions)
    )


def _is_number(value: Any) -> bool:
    """Whether a value is a float (NaN and infinity included) or an integer that a float can represent."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**53)
