"""Reference implementation of the routed activation, for readers and as the oracle of the tests.

    log π = log_softmax(ℓ),  z = (log π + g)/τ,  p = softmax(z),  x = Σ_k p_k σ_k(h)

All gradients come from autograd, which saves every intermediate value, so it is slow and uses much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexact.candidates.registry import lookup


def routed_activation(
    h: Tensor,
    logits: Tensor,
    noise: Tensor,
    temperature: Tensor | float,
    candidates: Sequence[str],
    alive: Tensor,
    hard: bool = False,
    channel_dim: int = 1,
) -> Tensor:
    """Return x. h: any shape. logits, noise, alive: (rows, K), one row for the layer or one per channel."""
    log_pi = torch.log_softmax(logits.masked_fill(~alive, -torch.inf), dim=-1)
    p = torch.softmax((log_pi + noise) / temperature, dim=-1)
    functions = {k: lookup(name).function for k, name in enumerate(candidates) if bool(alive[:, k].any())}
    return blend(h, straight_through(p) if hard else p, functions, channel_dim)


def blend(
    h: Tensor,
    weights: Tensor,
    functions: Mapping[int, Callable[[Tensor], Tensor]],
    channel_dim: int,
    divisor: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return Σ_k w_k f_k(h), where f_k is the function of column k of the weights, (rows, K).

    divisor: maps the value f_k(h) to the divisor of its term.
    """
    shape = [1] * h.dim()
    if weights.shape[0] > 1:
        shape[channel_dim] = -1
    x = torch.zeros_like(h)
    for k, function in functions.items():
        value = function(h)
        term = weights[:, k].view(shape) * value
        x = x + (term if divisor is None else term / divisor(value))
    return x


def straight_through(p: Tensor) -> Tensor:
    """Return the one-hot vector of the likeliest candidate, with the gradient of p."""
    return torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype) - p.detach() + p


def mean_sensitivity(h: Tensor, candidates: Sequence[str], rows: int = 1, channel_dim: int = 1) -> Tensor:
    """Return ḡ_k = mean |σ_k′(h)|, (rows, K), by autograd."""
    columns = []
    for name in candidates:
        leaf = h.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(lookup(name).function(leaf).sum(), leaf)
        slope = slope.abs()
        columns.append(
            slope.mean().reshape(1) if rows == 1 else slope.movedim(channel_dim, 0).reshape(rows, -1).mean(1)
        )
    return torch.stack(columns, dim=-1)
