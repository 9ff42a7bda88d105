"""The histories that a Recorder wrote, read and checked for a report."""

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
    """What a Recorder wrote: its records, and what it says of the run (policy and versions)."""

    records: list[dict[str, Any]]
    about: dict[str, Any]


def read_histories(folder: Path) -> dict[str, History]:
    """File name → every history in a folder; a last line that a kill cut off is left out."""
    histories = {}
    for path in sorted(folder.glob("*.jsonl")):
        header = _header(path) if path.is_file() else None  # opening a named pipe waits for a writer
        if header is None:
            continue
        records = _records(path)
        for line, record in enumerate(records, start=2):
            _check_record(path, line, record)
        if records:
            histories[path.name] = History(records, header)
    return histories


def _header(path: Path) -> dict[str, Any] | None:
    """What a history's first line says besides its version; None for somebody else's file."""
    try:
        with path.open("rb") as file:
            header = parsed_json(file.readline())
    except ValueError:  # no JSON, or no text at all
        return None
    if not isinstance(header, dict) or "flexact_history" not in header:
        return None
    return {name: value for name, value in header.items() if name != "flexact_history"}


def _records(path: Path) -> list[dict[str, Any]]:
    text = read_text(path)
    if text.endswith("\n"):
        return Recorder.load(path)
    # A run that is going on, or was killed, may leave its last line unfinished: it is no record yet.
    with TemporaryDirectory() as folder:
        whole = Path(folder, path.name)
        whole.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
        try:
            return Recorder.load(whole)
        except FlexActError as error:
            raise FlexActError(str(error).replace(str(whole), str(path))) from None


def _check_record(path: Path, line: int, entry: dict[str, Any]) -> None:
    for site, probabilities in entry["sites"].items():
        if not isinstance(probabilities, dict) or not all(map(_is_probability, probabilities.values())):
            raise FlexActError(
                f"{path}, line {line}: the probabilities of site {site!r:.80} are not numbers from 0 to 1 by candidate."
            )
    for name, are_right in ((DROPS, _are_drops), (DECISIONS, _is_decision)):
        for site, value in entry.get(name, {}).items():
            if not are_right(value):
                raise FlexActError(f"{path}, line {line}: the {name} of site {site!r:.80} are {value!r:.80}.")
    for name, value in entry.items():
        if name not in RESERVED and not _is_number(value):
            raise FlexActError(f"{path}, line {line}: {name} is {value!r:.80}, not a number that can be drawn.")


def _are_drops(value: Any) -> bool:
    """Whether this is what a Recorder writes of the candidates that a site has dropped."""
    return isinstance(value, dict) and all(
        isinstance(drop, dict)
        and drop.keys() == {"step", "margin", "standard_error", "steps"}
        and all(one is None or (_is_number(one) and not isinstance(one, bool)) for one in drop.values())
        and (drop["standard_error"] is None or isinstance(drop["steps"], int))
        for drop in value.values()
    )


def _is_decision(value: Any) -> bool:
    """Whether this is what a Recorder writes of a site that has committed."""
    return (
        isinstance(value, dict)
        and value.keys() == {"runner_up", "decided"}
        and isinstance(value["runner_up"], str | None)
        and isinstance(value["decided"], bool)
    )


def _is_probability(value: Any) -> bool:
    """NaN is what a run that diverged has left."""
    return isinstance(value, int | float) and (value != value or -1e-6 <= value <= 1 + 1e-6)


def _is_number(value: Any) -> bool:
    """A loss may be infinite or none; a whole number must be one that a float can tell."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**53)
