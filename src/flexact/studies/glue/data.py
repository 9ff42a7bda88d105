"""GLUE's own tsv files, read and checked; or, where there are none, the `datasets` package.

QNLI is often had without its training file. Its dev file is then split in two: rows whose second sentence has a SHA-256
that leaves 0 when divided by 5 are kept for the measurement, the others are trained on. All rows about one sentence lie
on one side.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError
from flexact.io.markdown_tables import counted
from flexact.studies.glue.tasks import TextTask, task_named
from flexact.studies.grid.digest import sha256_of

OFFICIAL, OF_DEV = "official", "of dev.tsv"
_HUB = "nyu-mll/glue"
_GIVE_FOLDER = "give --data the folder that has GLUE's own folders in it (CoLA, MRPC, STS-B, ...)"


@dataclass(frozen=True)
class Rows:
    """Sentences, or pairs of them, with their labels."""

    texts: tuple[tuple[str, ...], ...]
    """By row: one sentence or two."""
    labels: tuple[float, ...]
    """The number of a class, or a score."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class TextData:
    """A task's rows. split: "official", or what else they come from."""

    task: TextTask
    train: Rows
    dev: Rows
    split: str

    @property
    def sha256(self) -> str:
        """Of its rows, in their order."""
        rows = [(part.texts, part.labels) for part in (self.train, self.dev)]
        return sha256_of([json.dumps(rows).encode()])

    def first(self, limit: int | None) -> TextData:
        """At most so many rows of each."""
        if limit is None:
            return self
        cut = [Rows(rows.texts[:limit], rows.labels[:limit]) for rows in (self.train, self.dev)]
        return replace(self, train=cut[0], dev=cut[1])


def load(name: str, folder: Path) -> TextData:
    """A task's rows from the benchmark's folders, or from the `datasets` package where there is no such folder."""
    task = task_named(name)
    if folder.is_file():
        raise FlexActError(f"{folder} is a file; {_GIVE_FOLDER}.")
    if not folder.is_dir():
        return _from_datasets(task, folder)
    own = folder / task.title
    dev, train = own / "dev.tsv", own / "train.tsv"
    if not dev.is_file():
        raise FlexActError(
            f"there is no {task.title} in {folder}: expected {dev}, with {train.name} beside it; {_GIVE_FOLDER}."
        )
    if train.is_file():
        return TextData(task, read(task, train), read(task, dev), OFFICIAL)
    if task.name != "qnli":
        raise FlexActError(f"{own} has a dev.tsv and no train.tsv; put the benchmark's own there.")
    return _split(task, dev)


def check_rows(data: TextData) -> None:
    """Refuse a task whose metrics need more dev rows than there are."""
    if data.task.is_regression and len(data.dev) < 2:
        raise FlexActError(
            f"{data.task.title} is measured by a correlation, which takes two dev rows or more; got {len(data.dev)}. "
            "Give --limit 2 or more, or leave it out; its dev.tsv needs as many rows."
        )


def read(task: TextTask, path: Path) -> Rows:
    """One tsv file; what is wrong in it is told with its line."""
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FlexActError(f"{path} is no UTF-8 text (byte {error.start}); it is damaged or another file.") from None
    lines = [line.removesuffix("\r") for line in content.split("\n")]
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise FlexActError(f"{path} is empty; put the benchmark's own file there.")
    first = 1
    if task.columns:
        _check_header(task, path, lines[0].split("\t"))
        first = 2
    rows = [_row(task, path, number, line) for number, line in enumerate(lines[first - 1 :], start=first)]
    if not rows:
        raise FlexActError(f"{path} has a header and no rows; put the benchmark's own file there.")
    return Rows(tuple(texts for texts, _ in rows), tuple(label for _, label in rows))


def _check_header(task: TextTask, path: Path, found: Sequence[str]) -> None:
    missing = [name for name in task.columns if name not in found]
    if missing:
        raise FlexActError(
            f"{path} lacks the columns {', '.join(map(repr, missing))}; {task.title} has {', '.join(task.columns)}, "
            f"and its first line is {' | '.join(found)!r:.80}. It is another task's file, or one without labels."
        )
    if tuple(found) != task.columns:
        raise FlexActError(
            f"{path} has the columns {', '.join(found)}; expected {', '.join(task.columns)}, in this order."
        )


def _row(task: TextTask, path: Path, number: int, line: str) -> tuple[tuple[str, ...], float]:
    fields = line.split("\t")
    if len(fields) != task.fields:
        raise FlexActError(
            f"{path}, line {number}: {counted(len(fields), 'field')}, expected {task.fields} separated by tabs. The "
            "file is cut off or was edited; put the benchmark's own there."
        )
    return tuple(fields[place] for place in task.texts), _label(task, path, number, fields[task.label])


def _label(task: TextTask, path: Path, number: int, given: str) -> float:
    if not task.is_regression:
        if given not in task.labels:
            raise FlexActError(
                f"{path}, line {number}: the label is {given!r}; {task.title} has {' and '.join(task.labels)}."
            )
        return float(task.labels.index(given))
    try:
        score = float(given)
    except ValueError:
        score = math.nan
    if not 0 <= score <= 5:
        raise FlexActError(f"{path}, line {number}: the score is {given!r}; {task.title} has numbers from 0 to 5.")
    return score


def _split(task: TextTask, path: Path) -> TextData:
    """The two parts of a file that has to be both."""
    rows = read(task, path)

    def part(kept: bool) -> Rows:
        pairs = [
            (texts, label) for texts, label in zip(rows.texts, rows.labels, strict=True) if _is_kept(texts[1]) == kept
        ]
        return Rows(tuple(texts for texts, _ in pairs), tuple(label for _, label in pairs))

    found = TextData(task, part(False), part(True), OF_DEV)
    if not found.train or not found.dev:
        raise FlexActError(
            f"{path} has {counted(len(rows), 'row')}, and split by their second sentences none is left to "
            f"{'measure' if found.train else 'train'} on; put the benchmark's own file there, or train.tsv beside it."
        )
    return found


def _is_kept(sentence: str) -> bool:
    return int.from_bytes(hashlib.sha256(sentence.encode()).digest()[:8], "big") % 5 == 0


def _from_datasets(task: TextTask, folder: Path) -> TextData:
    ways = f"{_GIVE_FOLDER}, or, with a network, pip install datasets and leave {folder} away"
    if find_spec("datasets") is None:
        raise FlexActError(f"there is no folder {folder} and no package 'datasets' to read {task.title} with; {ways}.")
    try:
        found = import_module("datasets").load_dataset(_HUB, task.name)
    except Exception as error:  # it raises what its many parts raise
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise FlexActError(f"the package 'datasets' cannot read {task.title} ({told}); {ways}.") from None
    return TextData(task, _of_hub(task, found["train"]), _of_hub(task, found["validation"]), OFFICIAL)


def _of_hub(task: TextTask, rows: Any) -> Rows:
    names = [name for name in rows.column_names if name not in ("idx", "label")]
    return Rows(tuple(tuple(row[name] for name in names) for row in rows), tuple(float(row["label"]) for row in rows))
