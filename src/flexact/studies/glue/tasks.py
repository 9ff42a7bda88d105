"""The GLUE tasks that the paper reports: their files, and their metrics."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from flexact.errors import missing_extra
from flexact.io.value_checks import check_known


@dataclass(frozen=True)
class TextTask:
    """One task."""

    name: str
    title: str
    """The title, which is also the name of the task's folder."""
    columns: tuple[str, ...]
    """The columns in the header of its files; empty if there is no header."""
    texts: tuple[int, ...]
    """The fields of the sentence, or of both sentences."""
    label: int
    """The field of the label."""
    labels: tuple[str, ...]
    """The labels in the order of the classes; empty for a score from 0 to 5."""
    metrics: tuple[str, ...]
    epochs: int = 3
    width: int = 0
    """The number of fields per line if there is no header."""

    @property
    def fields(self) -> int:
        return len(self.columns) or self.width

    @property
    def is_regression(self) -> bool:
        return not self.labels

    @property
    def outputs(self) -> int:
        """The number of outputs of the network."""
        return len(self.labels) or 1


_PAIR = ("index", "sentence1", "sentence2", "label")
_QUESTION = ("index", "question", "sentence", "label")
_PARAPHRASE = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
_SCORED = ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score")
_BINARY, _ENTAILMENT = ("0", "1"), ("entailment", "not_entailment")
_ALL = (
    TextTask("cola", "CoLA", (), (3,), 1, _BINARY, ("matthews",), width=4),
    TextTask("mrpc", "MRPC", _PARAPHRASE, (3, 4), 0, _BINARY, ("f1", "accuracy")),
    TextTask("stsb", "STS-B", _SCORED, (7, 8), 9, (), ("pearson", "spearman")),
    TextTask("qnli", "QNLI", _QUESTION, (1, 2), 3, _ENTAILMENT, ("accuracy",)),
    TextTask("rte", "RTE", _PAIR, (1, 2), 3, _ENTAILMENT, ("accuracy",)),
    TextTask("wnli", "WNLI", _PAIR, (1, 2), 3, _BINARY, ("accuracy",), epochs=5),
)
TASKS: dict[str, TextTask] = {task.name: task for task in _ALL}
"""The tasks in the paper's order."""
USUAL = ("cola", "mrpc", "stsb", "rte", "wnli")
"""The default tasks. QNLI, the paper's sixth, often lacks its training file."""


def task_named(name: str) -> TextTask:
    """A task by its name."""
    check_known("task", name, TASKS)
    return TASKS[name]


def measured(task: TextTask, outputs: Any, labels: Any) -> dict[str, float]:
    """A task's metrics from a network's outputs, (rows, classes), or (rows, 1) for a score, and the labels.

    >>> import numpy
    >>> from flexact.studies.glue.tasks import TASKS
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
