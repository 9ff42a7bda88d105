"""The history file of a Recorder: the names in its records, and reading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

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


class History(NamedTuple):
    """The content of a history file."""

    about: dict[str, Any]
    """The config and the versions, from the first line."""
    records: list[dict[str, Any]]


def read(path: Path) -> History:
    """Read a history, and check every line. An incomplete last line is skipped: the run is in progress, or was killed
    while it wrote that line."""
    about, lines = _opened(path)
    records = []
    for number, line in enumerate(lines, start=2):
        try:
            record = parsed_json(line)
        except ValueError as error:
            raise FlexActError(
                f"{path}, line {number}: not valid JSON ({error}). The file was edited or damaged; remove that line to "
                "read the rest."
            ) from None
        if not _is_record(record):
            raise FlexActError(f"{path}, line {number}: not a record that a Recorder writes: {line:.160}.")
        records.append(record)
    return History(about, records)


def to_continue(path: Path, resume: bool, overwrite: bool) -> list[dict[str, Any]]:
    """The records of a file that a Recorder appends to; none if there is no file yet, or if it is overwritten.

    Raises if the file has records and neither `resume` nor `overwrite` is given. A file that is not a history is
    never overwritten.
    """
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return []
    if overwrite:
        _opened(path)
        return []
    records = read(path).records
    if records and not resume:
        raise FlexActError(
            f"{path} has {counted(len(records), 'record')} already, up to step {records[-1]['step']}. Give resume=True "
            "to append to them, overwrite=True to replace them, or another path."
        )
    return records


def number_names(records: Records) -> list[str]:
    """The names of the numbers that records have besides the picks, the loss first."""
    names = dict.fromkeys(key for entry in records for key in entry if key not in ("step", *RESERVED))
    return sorted(names, key=lambda name: name != "loss")


def _opened(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The header of a history of this version or of version 1, which had no drops and decisions, and the lines of its
    records."""
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise FlexActError(f"cannot read {path}: {error.strerror}. Give the path of a Recorder's history.") from None
    except UnicodeDecodeError:
        raise FlexActError(f"{path} is not a history of flexact: it is not a text file.") from None
    header: Any = None
    with suppress(ValueError):
        header = parsed_json(first)
    version = header.pop(KEY, None) if isinstance(header, dict) else None
    if not isinstance(version, int):
        raise FlexActError(f'{path} is not a history of flexact: its first line must begin with {{"{KEY}": {VERSION}.')
    if version > VERSION:
        raise FlexActError(f"{path} has version {version}, but this flexact reads up to {VERSION}; update flexact.")
    return header, lines[:-1]


def _is_record(entry: Any) -> bool:
    """Whether an entry has the structure that a Recorder writes, and only numbers that can be drawn."""
    try:
        probabilities = [p for own in entry["sites"].values() for p in own.values()]
        drops = [drop for own in entry.get(DROPS, {}).values() for drop in own.values()]
        fields = [drop[name] for drop in drops for name in ("margin", "standard_error", "steps")]
        steps = [entry["step"], *(drop["step"] for drop in drops)]
        decided = [decision["decided"] for decision in entry.get(DECISIONS, {}).values()]
    except (AttributeError, KeyError, TypeError):
        return False
    evidence = [value for value in fields if value is not None]
    numbers = [value for name, value in entry.items() if name not in RESERVED]
    return (
        all(map(_is_number, [*probabilities, *evidence, *numbers, *decided]))
        and not any(p < -1e-6 or p > 1 + 1e-6 for p in probabilities)
        and all(isinstance(step, int) for step in steps)
    )


def _is_number(value: Any) -> bool:
    """Whether a value is a float (NaN and infinity included) or an integer that a float can represent."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**53)
