"""Activations that users write, which are not built in: those with generated code, and those without it.

Each entry of UNSUPPORTED has a part of the reason that is logged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact.candidates import registry

Function = Callable[[Tensor], Tensor]


class Swish(nn.Module):
    """With an elementwise backward of its own, as timm's and EfficientNet's memory-efficient activations."""

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h: Tensor) -> Tensor:
            ctx.save_for_backward(h)
            return h * torch.sigmoid(h)

        @staticmethod
        def backward(ctx, delta: Tensor) -> Tensor:
            (h,) = ctx.saved_tensors
            s = torch.sigmoid(h)
            return delta * (s * (1 + h * (1 - s)))

    def forward(self, h: Tensor) -> Tensor:
        return self.Run.apply(h)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.tensor(1.5))

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.sigmoid(self.rate * h)


class Learnable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.25, dtype=torch.float64))

    def forward(self, h: Tensor) -> Tensor:
        return torch.where(h > 0, h, self.slope.to(h.dtype) * h)


def gelu_of_gpt_2(h: Tensor) -> Tensor:
    return 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))


def in_place(h: Tensor) -> Tensor:
    x = h * 2
    x.mul_(0.25).add_(1)
    F.relu_(x)
    return x - 1


def by_view(h: Tensor) -> Tensor:
    x = h + 0
    view = x.view(-1)
    x.add_(h)
    return view.view(h.shape) * 0.5


SUPPORTED: dict[str, Function] = {
    "scaled_sigmoid": lambda h: h * torch.sigmoid(1.5 * h),
    "relu_and_square": lambda h: F.relu(h).square(),
    "snake_1": lambda h: h + torch.sin(h) ** 2,
    "swish_1702": lambda h: h * torch.sigmoid(1.702 * h),
    "mish_by_hand": lambda h: h * torch.tanh(F.softplus(h)),
    "gelu_by_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "gelu_of_gpt_2": gelu_of_gpt_2,
    "gelu_times_2": lambda h: 2 * F.gelu(h),
    "clipped": lambda h: torch.clamp(h, -1, 2),
    "clamped_below": lambda h: h.clamp(min=-0.5),
    "piecewise": lambda h: torch.where(h > 0, h, 0.1 * h * h),
    "by_masks": lambda h: h * (h > 0) + 0.1 * h * (h <= 0).float(),
    "masked_fill": lambda h: (h * h).masked_fill(~((h > -1) & (h < 1)), 1.0),
    "hardtanh_2": lambda h: F.hardtanh(h, -2, 2),
    "softshrink_2": lambda h: F.softshrink(h, 0.2),
    "hardshrink_2": lambda h: F.hardshrink(h, 0.2),
    "threshold": lambda h: F.threshold(h, 0.1, -0.3),
    "celu_half": lambda h: F.celu(h, alpha=0.5),
    "elu_2": lambda h: F.elu(h, alpha=2.0),
    "softplus_2": lambda h: F.softplus(h, beta=2.0),
    "leaky": lambda h: F.leaky_relu(h, 0.2),
    "erf_gate": lambda h: h.erf() * h,
    "log_of_exp": lambda h: torch.log1p(torch.exp(h)),
    "log_squash": lambda h: torch.sign(h) * torch.log1p(h.abs()),
    "maxout": lambda h: torch.maximum(h, 0.1 * h),
    "minimum": lambda h: torch.min(h, torch.full_like(h, 2.0)),
    "cubic": lambda h: 0.1 * h**3 + 0.5 * h,
    "square_root": lambda h: torch.sqrt(1 + h * h) - 1,
    "power": lambda h: (1 + h.abs()) ** 1.3,
    "inverse": lambda h: 1 / (1 + torch.exp(-h)),
    "rational": lambda h: (1 + h * h).rsqrt() * h,
    "triangle": lambda h: (torch.remainder(h, 2.0) - 1).abs(),
    "exponential": lambda h: torch.exp2(-h * h),
    "logarithm": lambda h: torch.log(1 + h * h) + torch.log2(2 + h.abs()),
    "minus_one": lambda h: torch.expm1(0.3 * h),
    "cosine": lambda h: h * torch.cos(h),
    "constant_inside": lambda h: h * torch.sigmoid(torch.tensor(0.7) * h),
    "own_backward": Swish(),
    "in_place": in_place,
    "identity_twice": lambda h: h,
    "constant": torch.ones_like,
    "add_alpha": lambda h: torch.add(torch.tanh(h), h, alpha=0.1),
}

UNSUPPORTED: dict[str, tuple[Function, str]] = {
    "arc_tangent": (torch.atan, "it calls prims.atan"),
    "in_double": (lambda h: torch.sin(h.double()).to(h.dtype), "it converts to torch.float64"),
    "by_table": (lambda h: torch.round(h).long().to(h.dtype), "round"),
    "buffered": (Buffered(), "a tensor that is not computed from its input"),
    "learnable": (Learnable(), "a tensor that is not computed from its input"),
    "data_dependent": (lambda h: h * 2 if bool((h < 100).all()) else h, "Unsupported"),
    "by_view": (by_view, "as_strided"),
    "random": (lambda h: h + 0 * torch.rand_like(h), "rand_like"),
    "by_size": (lambda h: h * (2.0 if h.numel() > 1000 else 1.0), "gives the value"),
}


def register_unchecked(name: str, function: Function) -> None:
    """Registers a candidate without the checks, which refuse some of the functions."""
    slope = partial(registry._by_autograd, function)
    registry._registry[name] = registry.Candidate(name, function, slope, nn.Identity)
