"""Reads the histories that a Recorder wrote, for a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexact.io.json_input import parsed_json
from flexact.observe import history


@dataclass(frozen=True)
class History:
    """The records that a Recorder wrote, and the header with policy and versions."""

    records: list[dict[str, Any]]
    about: dict[str, Any]


def read_histories(run: Path) -> dict[str, History]:
    """Return the histories in a folder by file name, or the one of a file. An unfinished last line is skipped."""
    histories = {}
    for path in [run] if run.is_file() else sorted(run.glob("*.jsonl")):
        if path.is_file() and _is_history(path):  # opening a named pipe would wait for a writer
            header, *records = history.parsed(path, history.whole_lines(history.read_text(path)))
            del header[history.KEY]
            if records:
                histories[path.name] = History(records, header)
    return histories


def _is_history(path: Path) -> bool:
    """Return whether a file is a history, rather than one of another program."""
    try:
        with path.open("rb") as file:
            header = parsed_json(file.readline())
    except ValueError:  # not JSON, or not text
        return False
    return isinstance(header, dict) and history.KEY in header
