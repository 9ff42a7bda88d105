"""Activations that torch has no module for: functions, modules, and the derivatives that are too long for `BUILT_IN`.

`hardsigmoid` replaces F.hardsigmoid, which has no second derivative; `gelu_tanh_derivative` avoids torch's overflow.

A derivative takes the input and the value. At a kink it equals what autograd computes for the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STAR_RELU_SCALE, STAR_RELU_BIAS = 0.8944, -0.4472
"""With these, StarReLU of a normally distributed input has mean 0 and variance 1."""
LAPLACE_MEAN, LAPLACE_DEVIATION = 0.707107, 0.282095
"""The constants of `transformers.activations.LaplaceActivation`."""
QUICK_GELU_RATE = 1.702
GELU_LIMIT = 10.0


def relu_squared(h: Tensor) -> Tensor:
    """max(h, 0)²; infinite where it overflows, in float16 for h ≥ 256."""
    return torch.square(F.relu(h))


def star_relu(h: Tensor) -> Tensor:
    """0.8944·max(h, 0)² − 0.4472, the StarReLU of MetaFormer with its constants fixed."""
    return STAR_RELU_SCALE * torch.square(F.relu(h)) + STAR_RELU_BIAS


def snake(h: Tensor) -> Tensor:
    """h + sin²(h), the Snake of Ziyin et al. with a = 1."""
    return h + torch.sin(h).square()


def quick_gelu(h: Tensor) -> Tensor:
    """h·sigmoid(1.702·h), as in CLIP."""
    return h * torch.sigmoid(QUICK_GELU_RATE * h)


def quick_gelu_derivative(h: Tensor, value: Tensor) -> Tensor:
    """s + 1.702·h·s·(1 − s) with s = sigmoid(1.702·h)."""
    s = torch.sigmoid(QUICK_GELU_RATE * h)
    return s + QUICK_GELU_RATE * h * s * (1 - s)


def gelu_tanh_derivative(h: Tensor, value: Tensor) -> Tensor:
    """torch's derivative at h clamped to ±100, beyond which it is 1 or 0: torch squares h, which may overflow."""
    slope: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(h), h.clamp(-100, 100), approximate="tanh")
    return slope


def clipped_gelu(h: Tensor) -> Tensor:
    """GELU clipped at 10, as in quantised transformers."""
    return torch.clip(F.gelu(h), -GELU_LIMIT, GELU_LIMIT)


def clipped_gelu_derivative(h: Tensor, value: Tensor) -> Tensor:
    """The derivative of GELU up to 10, and 0 above."""
    slope: Tensor = torch.ops.aten.gelu_backward((h <= GELU_LIMIT).to(h.dtype), h)
    return slope


def hard_mish(h: Tensor) -> Tensor:
    """h/2·clamp(h + 2, 0, 2), as in timm."""
    return 0.5 * h * (h + 2).clamp(0, 2)


def hard_mish_derivative(h: Tensor, value: Tensor) -> Tensor:
    """h + 1 from −2 to 0; 0 below and 1 above."""
    return torch.where(h < -2, 0.0, torch.where(h > 0, 1.0, h + 1))


def laplace(h: Tensor) -> Tensor:
    """The cumulative distribution function of a normal distribution; in MEGA it replaces max(h, 0)² in attention."""
    return 0.5 * (1 + torch.erf((h - LAPLACE_MEAN).div(LAPLACE_DEVIATION * math.sqrt(2))))


def laplace_derivative(h: Tensor, value: Tensor) -> Tensor:
    """The density of that distribution."""
    z = (h - LAPLACE_MEAN) / LAPLACE_DEVIATION
    return torch.exp(-0.5 * z.square()) / (LAPLACE_DEVIATION * math.sqrt(2 * math.pi))


def sqrt_softplus(h: Tensor) -> Tensor:
    """√log(1 + exp(h)), as in the router of DeepSeek V4; exp(h/2) below −40, where the logarithm may underflow."""
    return torch.where(h < -40, torch.exp(0.5 * h.clamp(max=-40)), F.softplus(h.clamp(min=-40)).sqrt())


def sqrt_softplus_derivative(h: Tensor, value: Tensor) -> Tensor:
    """softplus′(h)/(2·value); half of the value below −40, where the value is exp(h/2)."""
    slope = torch.ops.aten.softplus_backward(torch.ones_like(h), h, 1, 20)
    return torch.where(h < -40, 0.5 * value, slope / (2 * value))


def hardsigmoid(h: Tensor) -> Tensor:
    """clamp(h + 3, 0, 6)/6, computed like torch's `F.hardsigmoid`, which has no second derivative."""
    wide = h if h.dtype == torch.float64 else h.float()
    return (F.relu6(wide + 3) / 6).to(h.dtype)


class _Elementwise(nn.Module):
    """A module that applies an elementwise function."""

    function: Callable[[Tensor], Tensor]

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


def _module_type(name: str, function: Callable[[Tensor], Tensor]) -> type[_Elementwise]:
    """Return a module type that applies a function. Pickles find it in this file by its name."""
    return type(name, (_Elementwise,), {"function": staticmethod(function), "__module__": __name__})


ReLUSquared = _module_type("ReLUSquared", relu_squared)
StarReLU = _module_type("StarReLU", star_relu)
Sine = _module_type("Sine", torch.sin)
"""It has no frequency parameter: scale the weights of the layer before it instead."""
Snake = _module_type("Snake", snake)
QuickGELU = _module_type("QuickGELU", quick_gelu)
ClippedGELU = _module_type("ClippedGELU", clipped_gelu)
HardMish = _module_type("HardMish", hard_mish)
Laplace = _module_type("Laplace", laplace)
SqrtSoftplus = _module_type("SqrtSoftplus", sqrt_softplus)
