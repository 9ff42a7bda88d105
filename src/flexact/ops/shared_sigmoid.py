"""Candidates that are rational functions of one sigmoid, for large float32 tensors on a CPU.

torch's own tanh, ELU and Mish take 3 to 9 times as long as its sigmoid. With s = sigmoid(h) and q = 1 − s, so that
s/q = eʰ, each needs a few more operations, and s is computed once for all. Values differ from torch's by at most 6e-7,
relative to max(1, |value|).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexact.candidates import SELU_ALPHA, SELU_SCALE

Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]

SLOW = frozenset({"tanh", "elu", "selu", "mish"})
"""The candidates that are faster when computed from the shared sigmoid."""
NAMES = SLOW | {"sigmoid", "silu"}


class SharedSigmoid:
    """The functions and derivatives of `NAMES` at one tensor."""

    def __init__(self, h: Tensor) -> None:
        self.s = torch.sigmoid(h)
        self.q = 1 - self.s

    def pair(self, name: str) -> Pair:
        """Return a candidate's function of h, and its derivative from h and the value."""
        return getattr(self, f"_{name}"), getattr(self, f"_{name}_slope")

    def _sigmoid(self, h: Tensor) -> Tensor:
        return self.s

    def _sigmoid_slope(self, h: Tensor, a: Tensor) -> Tensor:
        return self.s * self.q

    def _silu(self, h: Tensor) -> Tensor:
        return h * self.s

    def _silu_slope(self, h: Tensor, a: Tensor) -> Tensor:
        return torch.addcmul(self.s, a, self.q)

    def _tanh(self, h: Tensor) -> Tensor:
        """(s − q)/(s² + q²)."""
        return (self.s - self.q).div_((self.s * self.s).addcmul_(self.q, self.q))

    def _tanh_slope(self, h: Tensor, a: Tensor) -> Tensor:
        slope: Tensor = torch.ops.aten.tanh_backward(h.new_ones(()).expand_as(h), a)
        return slope

    def _negative_part(self) -> Tensor:
        """min(eʰ − 1, 0) = min((s − q)/q, 0)."""
        return (self.s - self.q).div_(self.q).clamp_(max=0)

    def _elu(self, h: Tensor) -> Tensor:
        return torch.relu(h).add_(self._negative_part())

    def _elu_slope(self, h: Tensor, a: Tensor) -> Tensor:
        slope: Tensor = torch.ops.aten.elu_backward(h.new_ones(()).expand_as(h), 1, 1, 1, True, a)
        return slope

    def _selu(self, h: Tensor) -> Tensor:
        return torch.relu(h).mul_(SELU_SCALE).add_(self._negative_part(), alpha=SELU_ALPHA * SELU_SCALE)

    def _selu_slope(self, h: Tensor, a: Tensor) -> Tensor:
        slope: Tensor = torch.ops.aten.elu_backward(h.new_ones(()).expand_as(h), SELU_ALPHA, SELU_SCALE, 1, True, a)
        return slope

    def _mish(self, h: Tensor) -> Tensor:
        """h·(1 − q²)/(1 + q²)."""
        square = self.q * self.q
        return (1 - square).div_(square.add_(1)).mul_(h)

    def _mish_slope(self, h: Tensor, a: Tensor) -> Tensor:
        """g + 4·h·s·q²/(1 + q²)² with g = (1 − q²)/(1 + q²)."""
        square = self.q * self.q
        divisor = 1 + square
        slope = (4 * h).mul_(self.s).mul_(square).div_(divisor).add_(1).sub_(square)
        return slope.div_(divisor)
