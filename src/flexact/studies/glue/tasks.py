"""The GLUE tasks that the paper reports: their files, and how they are evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from flexact.io.option_checks import check_known


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
    majority: float | None = None
    """The accuracy in percent on the official dev rows of always answering the more frequent class there."""

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
    TextTask("cola", "CoLA", (), (3,), 1, _BINARY, ("matthews",), width=4, majority=100 * 721 / 1043),
    TextTask("mrpc", "MRPC", _PARAPHRASE, (3, 4), 0, _BINARY, ("f1", "accuracy"), majority=100 * 279 / 408),
    TextTask("stsb", "STS-B", _SCORED, (7, 8), 9, (), ("pearson", "spearman")),
    TextTask("qnli", "QNLI", _QUESTION, (1, 2), 3, _ENTAILMENT, ("accuracy",), majority=100 * 2761 / 5463),
    TextTask("rte", "RTE", _PAIR, (1, 2), 3, _ENTAILMENT, ("accuracy",), majority=100 * 146 / 277),
    TextTask("wnli", "WNLI", _PAIR, (1, 2), 3, _BINARY, ("accuracy",), epochs=5, majority=100 * 40 / 71),
)
TASKS: dict[str, TextTask] = {task.name: task for task in _ALL}
"""The tasks in the paper's order."""
USUAL = ("cola", "mrpc", "stsb", "rte", "wnli")
"""The default tasks. QNLI, the paper's sixth, often lacks its training file."""


def task_named(name: str) -> TextTask:
    """A task by its name."""
    check_known("task", name, TASKS)
    return TASKS[name]
