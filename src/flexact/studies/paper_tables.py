"""What the paper prints, to stand beside ours."""

from __future__ import annotations

_COLUMNS = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")

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
    model: dict(zip(_COLUMNS, row, strict=True)) for model, row in _MSE_ROWS.items()
}
"""Table 1 (tab:mse_results): by model, then by truth; ± is the spread over the grid."""

ALPHA: dict[str, tuple[float, str]] = {
    "flexact-a0.0": (60.0e-4, "diffuse (ReLU + LeakyReLU)"),
    "flexact-a0.1": (16.0e-4, "Sigmoid"),
    "flexact-a0.2": (7.0e-4, "Sigmoid"),
    "flexact-a0.3": (3.0e-4, "Sigmoid"),
    **{f"flexact-a{tenths / 10:.1f}": (2.0e-4, "Sigmoid") for tenths in range(4, 11)},
}
"""The appendix's sweep (tab:alpha_sweep): error and what was selected, for the Sigmoid truth."""

CORRECTIONS: dict[str, str] = {
    "none": "0.00590 ± 0.00000",
    "clip_logit_gradient": "0.00590 ± 0.00000",
    "clipped_norm_kl": "0.04235 ± 0.00078",
    "output_norm": "0.35629 ± 0.00938",
    "grad_norm_kl": "0.00110 ± 0.00060",
}
"""The ablation of corrections (tab:sigmoid_mse): mean ± std over runs, for the Sigmoid truth."""
