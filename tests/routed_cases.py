"""Calls of the routed activation as test cases, with the reference implementation in float64 as their oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexact.candidates.registry import lookup
from flexact.ops import reference, routed_activation

FIVE = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")
SIXTEEN = (
    *FIVE, "gelu", "silu", "mish", "elu", "selu", "softplus", "hardswish", "relu6", "softsign", "relu_squared", "sine"
)  # fmt: skip
MORE = (
    "hardsigmoid", "hardtanh", "logsigmoid", "tanhshrink", "hardshrink", "softshrink", "gelu_tanh", "quick_gelu",
    "clipped_gelu", "hard_mish", "laplace", "sqrt_softplus", "star_relu", "snake"
)  # fmt: skip
ALL = (*SIXTEEN, *MORE)
HALF = {torch.bfloat16: 1e-2, torch.float16: 1e-2}


class Result(NamedTuple):
    x: Tensor
    statistics: Tensor
    to_h: Tensor
    to_logits: Tensor


@dataclass(frozen=True)
class Case:
    """One call of the operation. logits and alive: (rows, K)."""

    h: Tensor
    delta: Tensor
    logits: Tensor
    alive: Tensor
    names: tuple[str, ...]
    hard: bool = False
    channel_dim: int = 1
    temperature: float = 0.7

    @property
    def rows(self) -> int:
        return self.logits.shape[0]

    def probabilities(self) -> Tensor:
        """Returns p in float64, without noise."""
        log_pi = torch.log_softmax(self.logits.double().masked_fill(~self.alive, -torch.inf), -1)
        return torch.softmax(log_pi / self.temperature, -1)

    def run(self, statistics: bool = True) -> Result:
        h, logits = self.h.detach().requires_grad_(), self.logits.flatten().requires_grad_()
        p = self.probabilities().float()
        weights = nn.functional.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype) if self.hard else p
        alive = torch.nonzero(self.alive.any(0)).flatten().tolist()
        temperature = torch.tensor(self.temperature, device=h.device)
        x, gathered = routed_activation(
            h, logits, weights, p, temperature, self.names, alive, self.channel_dim, statistics
        )
        to_h, to_logits = torch.autograd.grad(x, (h, logits), self.delta)
        return Result(x.detach(), gathered, to_h, to_logits.view(self.logits.shape))

    def exact(self) -> Result:
        """Computes the same with the reference implementation and autograd, in float64. Statistics are those of
        candidates that are alive in some row.
        """
        h, logits = self.h.detach().double().requires_grad_(), self.logits.double().requires_grad_()
        x = reference.routed_activation(
            h, logits, torch.zeros_like(logits), self.temperature, self.names, self.alive, self.hard, self.channel_dim
        )
        to_h, to_logits = torch.autograd.grad(x, (h, logits), self.delta.double())
        sensitivity = reference.mean_sensitivity(h, self.names, self.rows, self.channel_dim)
        return Result(x.detach(), sensitivity * self.alive.any(0), to_h, to_logits)

    def largest_inner_product(self) -> float:
        """Returns max |⟨δ, a_k⟩|/τ: the gradient of the logits is a difference of such terms."""
        h, delta = self.h.double(), self.delta.double()
        products = [self._by_row(delta * lookup(name).function(h)).sum(1) for name in self.names]
        return float(torch.stack(products).abs().max()) / self.temperature

    def _by_row(self, values: Tensor) -> Tensor:
        return values.reshape(1, -1) if self.rows == 1 else values.movedim(self.channel_dim, 0).reshape(self.rows, -1)

    def check(self, result: Result | None = None) -> None:
        result, exact = self.run() if result is None else result, self.exact()
        assert (result.x.dtype, result.x.shape) == (self.h.dtype, self.h.shape)
        assert (result.to_h.dtype, result.to_h.shape) == (self.h.dtype, self.h.shape)
        assert error(result.x, exact.x) < HALF.get(self.h.dtype, 1e-6)
        assert error(result.to_h, exact.to_h) < HALF.get(self.h.dtype, 1e-6)
        # Sums are in float32 for any dtype of h, but a GPU evaluates with fewer bits in half precision.
        summed = 1e-2 if self.h.dtype in HALF and self.h.is_cuda else 1e-6
        assert error(result.statistics, exact.statistics) < summed
        assert float((result.to_logits - exact.to_logits).abs().max()) < summed * self.largest_inner_product()


def error(ours: Tensor, exact: Tensor) -> float:
    """Asserts a small relative error in the Euclidean norm, with 0.1 as the least reference (tails such as gelu
    below −4).
    """
    return float((ours.double() - exact).norm() / exact.norm().clamp(min=max(0.1 * exact.numel() ** 0.5, 1e-30)))


def case(h: Tensor, names: tuple[str, ...], rows: int = 1, dropped: float = 0.0, seed: int = 0, **options: Any) -> Case:
    """Returns a case with random logits and upstream gradient. Each candidate of each row is dropped with some
    probability.
    """
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(h.shape, generator=generator) + 0.5  # so that no inner product is a small difference
    alive = torch.rand(rows, len(names), generator=generator) >= dropped
    alive[torch.arange(rows), torch.randint(len(names), (rows,), generator=generator)] = True
    logits = torch.randn(rows, len(names), generator=generator)
    return Case(h, delta.to(h.device, h.dtype), logits.to(h.device), alive.to(h.device), names, **options)


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Returns numbers from −9 to 9, in random order."""
    size = torch.Size(shape).numel()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return torch.linspace(-9, 9, size)[order].reshape(shape)


RANDOM = Callable[..., Tensor]
DENSE: dict[str, Callable[[RANDOM], Tensor]] = {
    "contiguous": lambda randn: randn(2, 3, 5, 7),
    "channels last": lambda randn: randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "transposed": lambda randn: randn(7, 3, 4).transpose(0, 2),
    "permuted": lambda randn: randn(4, 5, 3).permute(1, 2, 0),
    "from the middle of memory": lambda randn: randn(2, 5, 3, 2)[1],
    "not aligned": lambda randn: randn(46)[1:].view(5, 3, 3),
    "one channel": lambda randn: randn(5, 1, 3),
    "one element": lambda randn: randn(1, 1),
    "channels alone": lambda randn: randn(1, 3),
}
GAPPED: dict[str, Callable[[RANDOM], Tensor]] = {
    "slice": lambda randn: randn(4, 6, 5)[:, ::2],
    "transposed slice": lambda randn: randn(5, 3, 8)[:, :, ::2].transpose(0, 2),
    "expanded": lambda randn: randn(4, 3, 1).expand(4, 3, 5),
}


def laid_out(layout: str, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    return {**DENSE, **GAPPED}[layout](randn)
