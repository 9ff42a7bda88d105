"""The paper's table of CIFAR results (tab:cifar_results): 200 epochs, 10 runs."""

from __future__ import annotations

CIFAR_EPOCHS = 200

_METHODS = ("relu", "prelu", "swish_beta", "affine", "parametric", "flexact-penultimate", "flexact-all")
_PLACES = (("cifar10", "resnet18"), ("cifar100", "resnet18"), ("cifar10", "resnet34"), ("cifar100", "resnet34"))
_MEANS = (
    (95.35, 94.94, 94.76, 94.65, 94.39, 95.52, 95.68),
    (77.72, 77.62, 77.38, 76.79, 76.92, 79.22, 79.29),
    (95.31, 94.95, 94.93, 94.72, 94.45, 95.48, 95.75),
    (78.62, 78.76, 78.72, 78.26, 77.96, 79.32, 79.42),
)
_DEVIATIONS = (
    (0.06, 0.51, 0.58, 0.05, 0.47, 0.05, 0.05),
    (0.11, 0.38, 0.46, 0.59, 0.11, 0.11, 0.11),
    (0.06, 0.57, 0.52, 0.50, 0.45, 0.05, 0.05),
    (0.11, 0.11, 0.11, 0.11, 0.11, 0.11, 0.11),
)
_P_VALUES = (
    ("", "0.154", "0.075", "<0.001", "0.009", "0.012", "<0.001"),
    ("", "0.643", "0.237", "0.019", "<0.001", "<0.001", "<0.001"),
    ("", "0.212", "0.193", "0.074", "0.013", "0.018", "<0.001"),
    ("", "0.312", "0.469", "0.022", "<0.001", "<0.001", "<0.001"),
)
CIFAR: dict[tuple[str, str, str], tuple[float, float, str]] = {
    (*place, method): (mean, deviation, p)
    for place, means, deviations, p_values in zip(_PLACES, _MEANS, _DEVIATIONS, _P_VALUES, strict=True)
    for method, mean, deviation, p in zip(_METHODS, means, deviations, p_values, strict=True)
}
"""Accuracy in percent, its deviation, and the p-value of a paired t-test against ReLU, by data set, model and method.
The paper's AReLU row is `parametric`; it has no SPLASH."""
