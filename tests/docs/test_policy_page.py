"""Figures in docs/policy.md that come from no study."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize


@pytest.mark.parametrize(("share", "told"), [(0.0, 0.0059), (0.5, 0.0124), (0.6, 0.0136), (1.0, 0.0)])
def test_least_error_of_a_blend_of_sigmoid_and_relu_on_a_sigmoid(share: float, told: float) -> None:
    x = np.linspace(-1, 1, 401)
    truth = 1 / (1 + np.exp(-5 * x))

    def error(weights: np.ndarray) -> float:
        h = weights[0] * x + weights[1]
        blend = share / (1 + np.exp(-h)) + (1 - share) * np.maximum(h, 0)
        return float(np.mean((blend - truth) ** 2))

    starts = [[w, b] for w in (0.5, 2, 5) for b in (-0.5, 0.5)]
    least = min(minimize(error, start, method="Nelder-Mead", options={"maxiter": 4000}).fun for start in starts)
    assert least == pytest.approx(told, abs=6e-5)
