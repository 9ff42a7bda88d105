"""The tasks of GLUE that the paper reports: where their files are, what is in them, and how they are measured."""

from __future__ import annotations

from dataclasses import dataclass

from flexact.io.option_checks import check_known


@dataclass(frozen=True)
class TextTask:
    """One task."""

    name: str
    title: str
    """Of its folder as well."""
    columns: tuple[str, ...]
    """Of the file's header; empty where it has none."""
    texts: tuple[int, ...]
    """Which fields are the sentence, or the two sentences."""
    label: int
    """Which field is the label."""
    labels: tuple[str, ...]
    """What it can be, in the order of the classes; none for a score from 0 to 5."""
    metrics: tuple[str, ...]
    epochs: int = 3
    width: int = 0
    """Fields of a line where there is no header."""

    @property
    def fields(self) -> int:
        return len(self.columns) or self.width

    @property
    def is_regression(self) -> bool:
        return not self.labels

    @property
    def outputs(self) -> int:
        """Of the network's head."""
        return len(self.labels) or 1


_PAIR = ("index", "sentence1", "sentence2", "label")
_ENTAILMENT = ("entailment", "not_entailment")
_SCORED = ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score")
_ALL = (
    TextTask("cola", "CoLA", (), (3,), 1, ("0", "1"), ("matthews",), width=4),
    TextTask(
        "mrpc",
        "MRPC",
        ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        (3, 4),
        0,
        ("0", "1"),
        ("f1", "accuracy"),
    ),
    TextTask("stsb", "STS-B", _SCORED, (7, 8), 9, (), ("pearson", "spearman")),
    TextTask("qnli", "QNLI", ("index", "question", "sentence", "label"), (1, 2), 3, _ENTAILMENT, ("accuracy",)),
    TextTask("rte", "RTE", _PAIR, (1, 2), 3, _ENTAILMENT, ("accuracy",)),
    TextTask("wnli", "WNLI", _PAIR, (1, 2), 3, ("0", "1"), ("accuracy",), epochs=5),
)
TASKS: dict[str, TextTask] = {task.name: task for task in _ALL}
"""In the paper's order."""
USUAL = ("cola", "mrpc", "stsb", "rte", "wnli")
"""Those whose training files are at hand where the paper's sixth, QNLI, has only its dev file."""
METRICS = ("matthews", "f1", "accuracy", "pearson", "spearman")


def task_named(name: str) -> TextTask:
    """A task by its name."""
    check_known("task", name, TASKS)
    return TASKS[name]
