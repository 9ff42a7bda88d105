"""The names of the studies: as they stand in files and on the command line, and as people read them."""

from __future__ import annotations

import re

DEFAULT = "flexact-default"
"""The model of `FlexConfig()`."""

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
"""The paper's truths and corrections, as it calls them."""

_ALPHA = re.compile(r"flexact-a(\d+)(\.\d+)?")


def title(name: str) -> str:
    """A truth or a correction as a person reads it; any other name as it is."""
    return TITLES.get(name, name)


def alpha_of(model: str) -> float | None:
    """α of a model that is named after it; None for any other.

    >>> alpha_of("flexact-a0.3"), alpha_of("relu")
    (0.3, None)
    """
    found = _ALPHA.fullmatch(model)
    return float(found[1] + (found[2] or "")) if found else None


def canonical(model: str) -> str:
    """The one way to write a model's name: without zeros that say nothing.

    >>> canonical("flexact-a0.0"), canonical("flexact-a0.30"), canonical("relu")
    ('flexact-a0', 'flexact-a0.3', 'relu')
    """
    found = _ALPHA.fullmatch(model)
    if not found:
        return model
    fraction = (found[2] or "").rstrip("0").rstrip(".")
    return f"flexact-a{found[1].lstrip('0') or '0'}{fraction}"
