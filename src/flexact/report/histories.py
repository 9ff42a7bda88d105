"""Reads the histories that a Recorder wrote, for a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flexact.errors import FlexActError
from flexact.io.csv_rows import read_text
from flexact.io.json_input import parsed_json
from flexact.observe.history import DECISIONS, DROPS, RESERVED
from flexact.observe.recorder import Recorder


@dataclass(frozen=True)
class History:
    """The records that a Recorder wrote, and the header with policy and versions."""

    records: list[dict[str, Any]]
    about: dict[str, Any]


def read_histories(folder: Path) -> dict[str, History]:
    """Return the histories in a folder by file name. An unfinished last line is skipped."""
    histories = {}
    for path in sorted(folder.glob("*.jsonl")):
        header = _header(path) if path.is_file() else None  # opening a named pipe waits for a writer
        if header is None:
            continue
        records = _records(path)
        for line, record in enumerate(records, start=2):
            if not _is_record(record):
                raise FlexActError(f"{path}, line {line}: not a record that a Recorder writes: {record!r:.160}.")
        if records:
            histories[path.name] = History(records, header)
    return histories


def _header(path: Path) -> dict[str, Any] | None:
    """Return the header of a history without its version; None for a file of another program."""
    try:
        with path.open("rb") as file:
            header = parsed_json(file.readline())
    except ValueError:  # not JSON, or not text
        return None
    if not isinstance(header, dict) or "flexact_history" not in header:
        return None
    return {name: value for name, value in header.items() if name != "flexact_history"}


def _records(path: Path) -> list[dict[str, Any]]:
    text = read_text(path)
    if text.endswith("\n"):
        return Recorder.load(path)
    # The last line of a run that is in progress or was interrupted may be unfinished.
    with TemporaryDirectory() as folder:
        whole = Path(folder, path.name)
        whole.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
        try:
            return Recorder.load(whole)
        except FlexActError as error:
            raise FlexActError(str(error).replace(str(whole), str(path))) from None


def _is_record(entry: dict[str, Any]) -> bool:
    """Return whether an entry has the structure that a Recorder writes, and only numbers that can be drawn."""
    try:
        probabilities = [p for own in entry["sites"].values() for p in own.values()]
        drops = [drop for own in entry.get(DROPS, {}).values() for drop in own.values()]
        evidence = [one for drop in drops for one in drop.values() if one is not None]
        decisions = [(one["runner_up"], one["decided"]) for one in entry.get(DECISIONS, {}).values()]
    except (AttributeError, KeyError, TypeError):
        return False
    numbers = [value for name, value in entry.items() if name not in RESERVED]
    return (
        all(map(_is_number, [*probabilities, *evidence, *numbers]))
        and not any(p < -1e-6 or p > 1 + 1e-6 for p in probabilities)
        and all(drop.keys() == {"step", "margin", "standard_error", "steps"} for drop in drops)
        and all(isinstance(second, str | None) and isinstance(decided, bool) for second, decided in decisions)
    )


def _is_number(value: Any) -> bool:
    """Return whether a value is a float (NaN and infinity included) or an integer that a float can represent."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**53)
