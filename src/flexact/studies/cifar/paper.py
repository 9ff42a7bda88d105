"""The paper's table of CIFAR results."""

from __future__ import annotations

CIFAR_EPOCHS = 200

_CIFAR_METHODS = ("relu", "prelu", "swish_beta", "affine", "parametric", "flexact-penultimate", "flexact-all")
_CIFAR_ROWS = {
    ("cifar10", "resnet18"): (
        (95.35, 0.06, ""),
        (94.94, 0.51, "0.154"),
        (94.76, 0.58, "0.075"),
        (94.65, 0.05, "<0.001"),
        (94.39, 0.47, "0.009"),
        (95.52, 0.05, "0.012"),
        (95.68, 0.05, "<0.001"),
    ),
    ("cifar100", "resnet18"): (
        (77.72, 0.11, ""),
        (77.62, 0.38, "0.643"),
        (77.38, 0.46, "0.237"),
        (76.79, 0.59, "0.019"),
        (76.92, 0.11, "<0.001"),
        (79.22, 0.11, "<0.001"),
        (79.29, 0.11, "<0.001"),
    ),
    ("cifar10", "resnet34"): (
        (95.31, 0.06, ""),
        (94.95, 0.57, "0.212"),
        (94.93, 0.52, "0.193"),
        (94.72, 0.50, "0.074"),
        (94.45, 0.45, "0.013"),
        (95.48, 0.05, "0.018"),
        (95.75, 0.05, "<0.001"),
    ),
    ("cifar100", "resnet34"): (
        (78.62, 0.11, ""),
        (78.76, 0.11, "0.312"),
        (78.72, 0.11, "0.469"),
        (78.26, 0.11, "0.022"),
        (77.96, 0.11, "<0.001"),
        (79.32, 0.11, "<0.001"),
        (79.42, 0.11, "<0.001"),
    ),
}
CIFAR: dict[tuple[str, str, str], tuple[float, float, str]] = {
    (*place, method): cell
    for place, row in _CIFAR_ROWS.items()
    for method, cell in zip(_CIFAR_METHODS, row, strict=True)
}
"""The image study (tab:cifar_results), 200 epochs, 10 runs: accuracy in percent, its deviation, and the p-value of a
paired t-test against ReLU; by data set, model and method. The paper's AReLU row is `parametric`; it has no SPLASH."""
