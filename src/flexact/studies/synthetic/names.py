"""Names of models, truths and corrections: in files and on the command line, and as titles."""

from __future__ import annotations

import re

DEFAULT = "flexact-default"
"""The model of `FlexConfig()`."""
KAN = "kan"
"""The model that is a Kolmogorov-Arnold layer."""

TITLES = {
    "relu": "ReLU",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "leaky_relu": "LeakyReLU",
    "identity": "Identity",
    "none": "no correction",
    "clip_logit_gradient": "logit-gradient clipping",
    "clipped_norm_kl": "KL from clipped norms",
    "output_norm": "output normalisation",
    "grad_norm_kl": "KL from gradient norms",
}
"""The paper's names of its truths and corrections."""

_ALPHA = re.compile(r"flexact-a(\d+)(\.\d+)?")


def title(name: str) -> str:
    """Return the title of a truth or a correction; any other name is returned unchanged."""
    return TITLES.get(name, name)


def alpha_of(model: str) -> float | None:
    """Return α of a model that is named after it; None for any other model.

    >>> alpha_of("flexact-a0.3"), alpha_of("relu")
    (0.3, None)
    """
    found = _ALPHA.fullmatch(model)
    return float(found[1] + (found[2] or "")) if found else None


def canonical(model: str) -> str:
    """Return the canonical name of a model, without redundant zeros.

    >>> canonical("flexact-a0.0"), canonical("flexact-a0.30"), canonical("relu")
    ('flexact-a0', 'flexact-a0.3', 'relu')
    """
    found = _ALPHA.fullmatch(model)
    if not found:
        return model
    fraction = (found[2] or "").rstrip("0").rstrip(".")
    return f"flexact-a{found[1].lstrip('0') or '0'}{fraction}"
