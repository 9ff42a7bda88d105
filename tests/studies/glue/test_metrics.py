"""Tests of GLUE's metrics against their formulas, and against scikit-learn and scipy on the same predictions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import pearsonr, rankdata, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from flexact.studies.glue.data import TASKS, measured

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, 60)
OUTPUTS = RNG.normal(size=(60, 2)) + 0.8 * np.eye(2)[LABELS]
SCORES = RNG.uniform(0, 5, 60).round(1)
PREDICTED = (SCORES + RNG.normal(size=60))[:, None]


def test_classes_are_measured_as_scikit_learn_and_the_formulas_do() -> None:
    answers = OUTPUTS.argmax(1)
    tp, tn = int(((answers == 1) & (LABELS == 1)).sum()), int(((answers == 0) & (LABELS == 0)).sum())
    fp, fn = int(((answers == 1) & (LABELS == 0)).sum()), int(((answers == 0) & (LABELS == 1)).sum())
    matthews = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    found = measured(TASKS["cola"], OUTPUTS, LABELS)["matthews"]
    assert found == pytest.approx(100 * matthews) == 100 * matthews_corrcoef(LABELS, answers)
    mrpc = measured(TASKS["mrpc"], OUTPUTS, LABELS)
    assert mrpc["f1"] == pytest.approx(200 * tp / (2 * tp + fp + fn)) == 100 * f1_score(LABELS, answers)
    assert mrpc["accuracy"] == pytest.approx(100 * (tp + tn) / 60) == 100 * accuracy_score(LABELS, answers)
    for task in ("qnli", "rte", "wnli"):
        assert measured(TASKS[task], OUTPUTS, LABELS) == {"accuracy": mrpc["accuracy"]}


def test_scores_are_measured_as_scipy_and_the_formulas_do() -> None:
    answers = PREDICTED[:, 0]
    found = measured(TASKS["stsb"], PREDICTED, SCORES)
    assert found["pearson"] == pytest.approx(100 * np.corrcoef(SCORES, answers)[0, 1])
    assert found["pearson"] == 100 * pearsonr(SCORES, answers)[0]
    ranks = np.corrcoef(rankdata(SCORES), rankdata(answers))[0, 1]
    assert found["spearman"] == pytest.approx(100 * ranks)
    assert found["spearman"] == 100 * spearmanr(SCORES, answers)[0]


def test_the_same_answer_for_all_rows_has_a_correlation_of_0() -> None:
    outputs = np.tile([1.0, 0.0], (60, 1))
    assert measured(TASKS["cola"], outputs, LABELS) == {"matthews": 0.0}
    assert math.isnan(measured(TASKS["stsb"], np.ones((60, 1)), SCORES)["pearson"])
