"""The paper's results, and the options for which they are comparable with ours."""

from __future__ import annotations

from flexact.config import PAPER_CANDIDATES
from flexact.studies.synthetic.options import Options, alpha_of
from flexact.studies.synthetic.replicas import Task

EPOCHS = 100
"""Epochs in the paper."""

_MSE_ROWS = {
    "flexact-a0.3": ("0.0001 ± 0.0002", "0.0011 ± 0.0006", "0.0001 ± 0.0002", "0.0001 ± 0.0002", "0.0000 ± 0.0000"),
    "flexact-a0": ("0.0001 ± 0.0001", "0.0059 ± 0.0073", "0.0021 ± 0.0028", "0.0001 ± 0.0002", "0.0000 ± 0.0000"),
    "relu": ("0.0000 ± 0.0000", "0.0059 ± 0.0072", "0.4328 ± 0.4287", "0.0004 ± 0.0007", "4.1675 ± 6.7199"),
    "sigmoid": ("2.1360 ± 3.9912", "0.0000 ± 0.0000", "0.4020 ± 0.4536", "2.1365 ± 3.9910", "6.3056 ± 6.5772"),
    "tanh": ("2.2941 ± 3.9616", "0.0141 ± 0.0119", "0.0000 ± 0.0000", "2.2909 ± 3.9623", "4.2737 ± 4.7666"),
    "leaky_relu": ("0.0004 ± 0.0007", "0.0059 ± 0.0072", "0.4286 ± 0.4227", "0.0000 ± 0.0000", "4.0787 ± 6.5640"),
    "identity": ("0.5209 ± 0.4659", "0.0078 ± 0.0061", "0.0985 ± 0.0798", "0.5105 ± 0.4566", "0.0000 ± 0.0000"),
}

SYNTHETIC: dict[str, dict[str, str]] = {
    model: dict(zip(PAPER_CANDIDATES, row, strict=True)) for model, row in _MSE_ROWS.items()
}
"""Table 1 (tab:mse_results): by model, then by truth; ± is the spread over the grid."""

ALPHA: dict[float, tuple[float, str]] = {
    0.0: (60.0e-4, "diffuse (ReLU + LeakyReLU)"),
    0.1: (16.0e-4, "Sigmoid"),
    0.2: (7.0e-4, "Sigmoid"),
    0.3: (3.0e-4, "Sigmoid"),
    **{tenths / 10: (2.0e-4, "Sigmoid") for tenths in range(4, 11)},
}
"""The appendix's sweep (tab:alpha_sweep): the error and the selection by α, for the Sigmoid truth."""

CORRECTIONS: dict[str, tuple[float, float]] = {
    "none": (0.00590, 0.00000),
    "clip_logit_gradient": (0.00590, 0.00000),
    "clipped_norm_kl": (0.04235, 0.00078),
    "output_norm": (0.35629, 0.00938),
    "grad_norm_kl": (0.00110, 0.00060),
}
"""The ablation of corrections (tab:sigmoid_mse): mean and deviation over runs, for the Sigmoid truth."""


def synthetic_row(model: str, options: Options) -> dict[str, str]:
    """Return the paper's errors of a model by truth. Empty if they are not comparable."""
    picks = alpha_of(model) is not None
    same = _same_policy(options) if picks else _same_task(options)
    row = SYNTHETIC.get(model, {}) if same else {}
    return {truth: row[truth] for truth in options.truths if truth in row}


def alpha_cell(model: str, truth: str, options: Options) -> tuple[float, str] | None:
    """Return the sweep's error and selection at a model's α. None if the paper has no comparable value."""
    alpha = alpha_of(model)
    return ALPHA.get(alpha) if alpha is not None and truth == "sigmoid" and _same_policy(options) else None


def correction_error(model: str, truth: str, options: Options) -> tuple[float, float] | None:
    """Return the paper's mean and deviation for a correction. None if the paper has no comparable value."""
    return CORRECTIONS.get(model) if truth == "sigmoid" and _same_policy(options) else None


def _same_task(options: Options) -> bool:
    return options.task == Task() and options.epochs == EPOCHS


def _same_policy(options: Options) -> bool:
    """Return whether Flex-Act runs a reading of the paper's policy with the same candidates on the same task."""
    same_candidates = set(options.candidates) == set(PAPER_CANDIDATES)
    return _same_task(options) and same_candidates and options.policy in ("paper", "literal")
