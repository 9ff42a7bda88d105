"""Learnable activations that the paper compares with or discusses.

Their parameters are per layer or per channel.

>>> import torch
>>> from flexact import baselines
>>> baselines.make("swish_beta")(torch.tensor([0.0, 1.0]))
tensor([0.0000, 0.7311], grad_fn=...)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from flexact.baselines.deu import DifferentialEquationUnit
from flexact.baselines.formulas import AffineCombination, ConvexCombination, GeneralParametric, PReLU, Splash, SwishBeta
from flexact.baselines.kan import KolmogorovArnoldLayer, SplineEdge
from flexact.baselines.nmode import NeuralMemoryUnit
from flexact.io.value_checks import check_known

__all__ = [
    "BASELINES",
    "AffineCombination",
    "ConvexCombination",
    "DifferentialEquationUnit",
    "GeneralParametric",
    "KolmogorovArnoldLayer",
    "NeuralMemoryUnit",
    "PReLU",
    "Splash",
    "SplineEdge",
    "SwishBeta",
    "make",
]

BASELINES: dict[str, Callable[[int | None, int], nn.Module]] = {
    "prelu": PReLU,
    "swish_beta": SwishBeta,
    "splash": Splash,
    "affine": AffineCombination,
    "convex": ConvexCombination,
    "parametric": GeneralParametric,
    "deu": DifferentialEquationUnit,
    "nmode": NeuralMemoryUnit,
    "spline": SplineEdge,
}
"""Baseline classes by name; each takes (channels, channel_dim)."""


def make(name: str, channels: int | None = None, channel_dim: int = 1) -> nn.Module:
    """Return a new baseline activation. channels: number of parameter sets; None shares one set across the layer."""
    check_known("baseline", name, BASELINES)
    return BASELINES[name](channels, channel_dim)
