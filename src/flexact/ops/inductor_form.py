"""The closed form as a single expression that torch.compile fuses into one loop over the tensor.

On a CPU it is faster than the blocks of `closed_form`, but needs a C++ compiler and some seconds of compilation per set
of candidates. By default it runs for large tensors only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from flexact.candidates import lookup
from flexact.ops.closed_form import dense, logit_gradient

_numbers = itertools.count()


def forward(
    h: Tensor, weights: Tensor, keys: Sequence[str], alive: Sequence[int], channel_dim: int, statistics: bool
) -> tuple[Tensor, Tensor]:
    """Return the result of `closed_form.forward`, computed through torch.compile."""
    h = dense(h)
    flat, row_weights = _flattened(h, weights, channel_dim)
    run = _compiled(_forward, flat, tuple(keys), tuple(alive), statistics)
    x, sums = run(flat, row_weights)
    x = _with_layout(x, h)
    if not statistics:
        return x, weights.new_empty(0)
    gathered = weights.new_zeros(weights.shape)
    gathered[:, list(alive)] = (sums / max(h.numel() // weights.shape[0], 1)).to(weights.dtype)
    return x, gathered


def backward(
    delta: Tensor,
    h: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: Sequence[str],
    alive: Sequence[int],
    channel_dim: int,
    need_logits: bool,
) -> tuple[Tensor, Tensor]:
    """Return the result of `closed_form.backward`, computed through torch.compile."""
    h = dense(h)
    delta = delta if delta.stride() == h.stride() else torch.empty_like(h).copy_(delta)
    flat, row_weights = _flattened(h, weights, channel_dim)
    run = _compiled(_backward, flat, tuple(keys), tuple(alive), need_logits)
    gradient, sums = run(_flattened(delta, weights, channel_dim)[0], flat, row_weights)
    if not need_logits:
        return _with_layout(gradient, h), weights.new_empty(0)
    inner = weights.new_zeros(weights.shape)
    inner[:, list(alive)] = sums.to(weights.dtype)
    return _with_layout(gradient, h), logit_gradient(inner, probabilities, temperature)


def _flattened(h: Tensor, weights: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
    """Return a contiguous view of a dense tensor, (outer, channels, inner), and the weights as (rows, 1, K)."""
    channels = h.shape[channel_dim % h.dim()] if weights.shape[0] > 1 else 1
    inner = h.stride(channel_dim) if channels > 1 else h.numel()
    shape = (-1, channels, inner) if h.numel() else (0, channels, 1)
    return h.as_strided((h.numel(),), (1,)).view(shape), weights.unsqueeze(1)


def _with_layout(flat: Tensor, like: Tensor) -> Tensor:
    """Return the flat tensor with the shape and strides of `like`."""
    return flat.reshape(-1).as_strided(like.shape, like.stride())


def _compiled(function: Callable[..., Any], h: Tensor, *constants: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the compiled function with these constants, cached by h's dtype and by which of its sizes are 1."""
    return _compiled_for(function, (h.dtype, *(size > 1 for size in h.shape)), constants)


@functools.cache
def _compiled_for(
    function: Callable[..., Any], kind: tuple[Any, ...], constants: tuple[Any, ...]
) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = function(*tensors, *constants)
        return result

    # torch.compile limits how often one code object is recompiled, so every set of constants gets its own.
    own = FunctionType(
        run.__code__.replace(co_name=f"routed_{next(_numbers)}"), run.__globals__, closure=run.__closure__
    )
    return torch.compile(own, dynamic=True, fullgraph=True)


def _forward(
    h: Tensor, weights: Tensor, keys: tuple[str, ...], alive: tuple[int, ...], statistics: bool
) -> tuple[Tensor, Tensor]:
    wide = h if h.dtype == torch.float64 else h.float()
    candidates = [lookup(keys[k]) for k in alive]
    values = [candidate.function(wide) for candidate in candidates]
    x = _weighted_sum(weights, alive, values)
    if not statistics:
        return x.to(h.dtype), h.new_empty(0)
    slopes = [one.derivative(wide, value).abs() for one, value in zip(candidates, values, strict=True)]
    return x.to(h.dtype), torch.stack([_by_row(slope) for slope in slopes], -1)


def _backward(
    delta: Tensor, h: Tensor, weights: Tensor, keys: tuple[str, ...], alive: tuple[int, ...], need_logits: bool
) -> tuple[Tensor, Tensor]:
    double = h.dtype == torch.float64
    wide, upstream = (h, delta) if double else (h.float(), delta.float())
    candidates = [lookup(keys[k]) for k in alive]
    values = [candidate.function(wide) for candidate in candidates]
    slopes = [one.derivative(wide, value) for one, value in zip(candidates, values, strict=True)]
    gradient = upstream * _weighted_sum(weights, alive, slopes)
    inner = torch.stack([_by_row(upstream * value) for value in values], -1) if need_logits else h.new_empty(0)
    return gradient.to(h.dtype), inner


def _weighted_sum(weights: Tensor, alive: tuple[int, ...], values: list[Tensor]) -> Tensor:
    """Return Σ_k w_k values_k; a zero weight masks infinite values."""
    total = torch.zeros_like(values[0])
    for k, value in zip(alive, values, strict=True):
        weight = weights[..., k]
        total = total + torch.where(weight == 0, 0.0, weight * value)
    return total


def _by_row(values: Tensor) -> Tensor:
    """Return the sum over all dimensions but the channels."""
    return values.sum((0, 2), dtype=torch.float64)
