"""GLUE's metrics in percent, from scikit-learn and scipy."""

from __future__ import annotations

import warnings
from typing import Any

from flexact.errors import missing_extra
from flexact.studies.glue.tasks import TextTask


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
