"""Candidates that are rational functions of one sigmoid, for large float32 tensors on a CPU.

torch's own tanh, ELU and Mish take 3 to 9 times as long as its sigmoid. With s = sigmoid(h) and q = 1 − s, so that
s/q = eʰ, each needs a few more operations, and s is computed once for all. Values differ from torch's by at most 6e-7,
relative to max(1, |value|).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexact.candidates.registry import SELU_ALPHA, SELU_SCALE

Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]

SLOW = frozenset({"tanh", "elu", "selu", "mish"})
"""The candidates that are faster when computed from the shared sigmoid."""


def pairs(h: Tensor) -> dict[str, Pair]:
    """Return, by candidate, the function of h, and the derivative from h and the value; both are for this h only."""
    s = torch.sigmoid(h)
    q = 1 - s
    one, aten = h.new_ones(()).expand_as(h), torch.ops.aten

    def tanh(h: Tensor) -> Tensor:
        """(s − q)/(s² + q²)."""
        return (s - q).div_((s * s).addcmul_(q, q))

    def negative_part() -> Tensor:
        """min(eʰ − 1, 0) = min((s − q)/q, 0)."""
        return (s - q).div_(q).clamp_(max=0)

    def selu(h: Tensor) -> Tensor:
        return torch.relu(h).mul_(SELU_SCALE).add_(negative_part(), alpha=SELU_ALPHA * SELU_SCALE)

    def mish(h: Tensor) -> Tensor:
        """h·(1 − q²)/(1 + q²)."""
        square = q * q
        return (1 - square).div_(square.add_(1)).mul_(h)

    def mish_slope(h: Tensor, a: Tensor) -> Tensor:
        """g + 4·h·s·q²/(1 + q²)² with g = (1 − q²)/(1 + q²)."""
        square = q * q
        divisor = 1 + square
        slope = (4 * h).mul_(s).mul_(square).div_(divisor).add_(1).sub_(square)
        return slope.div_(divisor)

    return {
        "sigmoid": (lambda h: s, lambda h, a: s * q),
        "silu": (lambda h: h * s, lambda h, a: torch.addcmul(s, a, q)),
        "tanh": (tanh, lambda h, a: aten.tanh_backward(one, a)),
        "elu": (lambda h: torch.relu(h).add_(negative_part()), lambda h, a: aten.elu_backward(one, 1, 1, 1, True, a)),
        "selu": (selu, lambda h, a: aten.elu_backward(one, SELU_ALPHA, SELU_SCALE, 1, True, a)),
        "mish": (mish, mish_slope),
    }
