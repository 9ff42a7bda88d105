"""Reference implementation of the routed activation, for readers and as the oracle of the tests.

    log π = log_softmax(ℓ),  z = (log π + g)/τ,  p = softmax(z),  x = Σ_k p_k σ_k(h)

All gradients come from autograd, which saves every intermediate value, so it is slow and uses much memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexact.candidates import lookup


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
    """Return x, of h's shape. logits, noise, alive: (rows, K), with one row for the layer or one per channel."""
    log_pi = torch.log_softmax(logits.masked_fill(~alive, -torch.inf), dim=-1)
    p = torch.softmax((log_pi + noise) / temperature, dim=-1)
    weights = p
    if hard:  # straight-through: one-hot in the forward, the gradient of the soft blend in the backward
        weights = torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype) - p.detach() + p
    x = torch.zeros_like(h)
    for k, name in enumerate(candidates):
        if bool(alive[:, k].any()):
            x = x + _broadcastable(weights[:, k], h, channel_dim) * lookup(name).function(h)
    return x


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


def _broadcastable(weight: Tensor, h: Tensor, channel_dim: int) -> Tensor:
    """Return the weight of the layer, or the weights of the channels, shaped to broadcast against h."""
    if weight.numel() == 1:
        return weight.reshape(())
    shape = [1] * h.dim()
    shape[channel_dim] = -1
    return weight.reshape(shape)
