"""Tests of the fixed rows of the first table against a numerical optimum and the paper's figures."""

import numpy as np
import pytest
from scipy.optimize import minimize

from flexact.config import PAPER_CANDIDATES
from flexact.studies.synthetic.options import Options, activation_of
from flexact.studies.synthetic.replicas import train
from flexact.studies.synthetic.tables import SYNTHETIC

FUNCTIONS = {
    "relu": lambda h: np.maximum(h, 0),
    "sigmoid": lambda h: 1 / (1 + np.exp(-np.clip(h, -500, 500))),
    "tanh": np.tanh,
    "leaky_relu": lambda h: np.where(h > 0, h, 0.01 * h),
    "identity": lambda h: h,
}


def least_error(model: str, truth: str) -> float:
    """Returns the least mean squared error on the grid of a(w·x + b), over w and b."""
    x = np.linspace(-1, 1, 10_001)
    wanted = FUNCTIONS[truth](5 * x)

    def error(weights: np.ndarray) -> float:
        return float(np.mean((FUNCTIONS[model](weights[0] * x + weights[1]) - wanted) ** 2))

    starts = [(w, b) for w in (0.5, 5.0, 100.0) for b in (-10.0, -1.0, 0.0)]
    options = {"maxiter": 4000, "xatol": 1e-9, "fatol": 1e-13}
    return min(minimize(error, start, method="Nelder-Mead", options=options).fun for start in starts)


def test_closed_forms_of_the_optimum():
    """x and its halves have known answers: 25/6 for ReLU on Identity, 25/48 for Identity on ReLU."""
    assert least_error("relu", "identity") == pytest.approx(25 / 6, rel=0.01)
    assert least_error("identity", "relu") == pytest.approx(25 / 48, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("model", PAPER_CANDIDATES)
def test_every_fixed_row_is_within_one_percent_of_its_numerical_optimum_and_of_the_papers(model):
    options = Options(models=(model,))
    found = list(zip(options.cells, train(options, activation_of(model, options)).mse, strict=True))
    for truth in PAPER_CANDIDATES:
        errors = [mse for cell, mse in found if cell.truth == truth]
        assert len(errors) == 5
        mean, best = sum(errors) / 5, least_error(model, truth)
        assert mean == pytest.approx(best, rel=0.01, abs=5e-6), truth
        paper = float(SYNTHETIC[model][truth].split()[0])
        assert mean == pytest.approx(paper, rel=0.01, abs=5e-5), truth  # the paper prints four decimals
