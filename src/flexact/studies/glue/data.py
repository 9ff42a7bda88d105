"""The GLUE tasks: their metrics, and their rows from tsv files or the `datasets` package."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import filterfalse
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError, missing_extra


@dataclass(frozen=True)
class TextTask:
    """One task."""

    name: str
    title: str
    """The title, which is also the name of the task's folder."""
    columns: tuple[str, ...]
    """The columns of its files."""
    texts: tuple[int, ...]
    """The places of the columns with the sentence, or with both sentences."""
    label: int
    """The place of the column with the label."""
    labels: tuple[str, ...]
    """The labels in the order of the classes; empty for a score from 0 to 5."""
    metrics: tuple[str, ...]
    epochs: int = 3
    has_header: bool = True
    """Whether its files begin with the names of the columns."""
    majority: float | None = None
    """The accuracy in percent, on the official dev rows, of always predicting their more frequent class."""

    @property
    def is_regression(self) -> bool:
        return not self.labels


_JUDGED = ("source", "label", "mark", "sentence")
_PAIR = ("index", "sentence1", "sentence2", "label")
_QUESTION = ("index", "question", "sentence", "label")
_PARAPHRASE = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
_SCORED = ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score")
_BINARY, _ENTAILMENT = ("0", "1"), ("entailment", "not_entailment")
_ALL = (
    TextTask("cola", "CoLA", _JUDGED, (3,), 1, _BINARY, ("matthews",), has_header=False, majority=100 * 721 / 1043),
    TextTask("mrpc", "MRPC", _PARAPHRASE, (3, 4), 0, _BINARY, ("f1", "accuracy"), majority=100 * 279 / 408),
    TextTask("stsb", "STS-B", _SCORED, (7, 8), 9, (), ("pearson", "spearman")),
    TextTask("qnli", "QNLI", _QUESTION, (1, 2), 3, _ENTAILMENT, ("accuracy",), majority=100 * 2761 / 5463),
    TextTask("rte", "RTE", _PAIR, (1, 2), 3, _ENTAILMENT, ("accuracy",), majority=100 * 146 / 277),
    TextTask("wnli", "WNLI", _PAIR, (1, 2), 3, _BINARY, ("accuracy",), epochs=5, majority=100 * 40 / 71),
)
TASKS: dict[str, TextTask] = {task.name: task for task in _ALL}
"""The tasks, in the paper's order. A task that the paper does not have comes last."""
USUAL = ("cola", "mrpc", "stsb", "rte", "wnli")
"""The default tasks. QNLI, the paper's sixth, often lacks its training file."""


def measured(task: TextTask, outputs: Any, labels: Any) -> dict[str, float]:
    """A task's metrics from a network's outputs, (rows, classes), or (rows, 1) for a score, and the labels.

    >>> import numpy
    >>> from flexact.studies.glue.data import TASKS
    >>> measured(TASKS["rte"], numpy.array([[2.0, 1.0], [0.0, 3.0]]), numpy.array([0, 0]))
    {'accuracy': 50.0}
    """
    try:
        from scipy.stats import pearsonr, spearmanr
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
    except ImportError as error:
        raise missing_extra(str(error.name), "studies") from None
    functions = {
        "matthews": matthews_corrcoef,
        "f1": f1_score,
        "accuracy": accuracy_score,
        "pearson": lambda labels, answers: pearsonr(labels, answers)[0],
        "spearman": lambda labels, answers: spearmanr(labels, answers)[0],
    }
    answers = outputs[:, 0] if task.is_regression else outputs.argmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant predictions have no correlation; the value is NaN
        return {name: 100 * float(functions[name](labels, answers)) for name in task.metrics}


OFFICIAL, OF_DEV = "official", "of dev.tsv"
_GIVE_FOLDER = "give --data the folder that contains GLUE's own folders (CoLA, MRPC, STS-B, ...)"

Rows = tuple[tuple[tuple[str, ...], float], ...]
"""One or two sentences per row, and its label: the number of a class, or a score."""


@dataclass(frozen=True)
class TextData:
    """The rows of a task. split: "official", or where the rows come from otherwise."""

    task: TextTask
    train: Rows
    dev: Rows
    split: str

    @property
    def sha256(self) -> str:
        """The SHA-256 of the rows, in their order."""
        texts_and_labels = [tuple(zip(*rows, strict=True)) for rows in (self.train, self.dev)]
        return hashlib.sha256(json.dumps(texts_and_labels).encode()).hexdigest()

    def first(self, limit: int | None) -> TextData:
        """At most `limit` rows of each part."""
        return replace(self, train=self.train[:limit], dev=self.dev[:limit])


def load(name: str, folder: Path) -> TextData:
    """The rows of a task from the benchmark's folders, or from the `datasets` package if there is no such folder."""
    task = TASKS[name]
    if not folder.exists():
        return _from_datasets(task, folder)
    dev, train = folder / task.title / "dev.tsv", folder / task.title / "train.tsv"
    if train.is_file():
        return TextData(task, read(task, train), read(task, dev), OFFICIAL)
    if name == "qnli":
        return _split(task, read(task, dev))
    raise FlexActError(f"{train} does not exist; {_GIVE_FOLDER}.")


def check_rows(data: TextData) -> None:
    """Raise if a part has no rows, or too few for a correlation."""
    least = 2 if data.task.is_regression else 1
    if len(data.train) < 1 or len(data.dev) < least:
        raise FlexActError(
            f"{data.task.title} has {len(data.train)} training and {len(data.dev)} dev rows; it needs at least 1 "
            f"and {least}. Give --limit {least} or more, or the benchmark's own files."
        )


def read(task: TextTask, path: Path) -> Rows:
    """The rows of one tsv file. Errors name the line."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FlexActError(f"cannot read {path} as UTF-8 text ({error}); {_GIVE_FOLDER}.") from None
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if task.has_header and lines[0] != "\t".join(task.columns):
        raise FlexActError(f"{path} does not begin with the columns of {task.title}: {', '.join(task.columns)}.")
    first = 1 if task.has_header else 0
    return tuple(_row(task, path, number, line) for number, line in enumerate(lines[first:], start=first + 1))


def _row(task: TextTask, path: Path, number: int, line: str) -> tuple[tuple[str, ...], float]:
    fields = line.split("\t")
    expected = len(task.columns)
    if len(fields) != expected:
        raise FlexActError(f"{path}, line {number}: {len(fields)} fields, expected {expected} separated by tabs.")
    given = fields[task.label]
    try:
        label = float(given) if task.is_regression else float(task.labels.index(given))
    except ValueError:
        label = math.nan
    if not 0 <= label <= 5:
        known = "a number from 0 to 5" if task.is_regression else " or ".join(task.labels)
        raise FlexActError(f"{path}, line {number}: the label is {given!r}; expected {known}.")
    return tuple(fields[place] for place in task.texts), label


def _split(task: TextTask, rows: Rows) -> TextData:
    """Split the dev file of QNLI, which is often available without its training file. Rows whose second sentence has a
    SHA-256 divisible by 5 are used for evaluation, and the others for training, so no sentence is in both parts."""

    def is_dev(row: tuple[tuple[str, ...], float]) -> bool:
        return int.from_bytes(hashlib.sha256(row[0][1].encode()).digest()[:8], "big") % 5 == 0

    return TextData(task, tuple(filterfalse(is_dev, rows)), tuple(filter(is_dev, rows)), OF_DEV)


def _from_datasets(task: TextTask, folder: Path) -> TextData:
    try:
        found = import_module("datasets").load_dataset("nyu-mll/glue", task.name)
    except Exception as error:  # the package raises many types
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise FlexActError(
            f"there is no folder {folder}, and the package 'datasets' cannot read {task.title} ({words}); "
            f"{_GIVE_FOLDER}, or, with internet access, pip install datasets."
        ) from None
    return TextData(task, _of_hub(found["train"]), _of_hub(found["validation"]), OFFICIAL)


def _of_hub(rows: Any) -> Rows:
    names = [name for name in rows.column_names if name not in ("idx", "label")]
    return tuple((tuple(row[name] for name in names), float(row["label"])) for row in rows)
