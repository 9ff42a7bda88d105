"""The closed form as a single expression that torch.compile fuses into one loop over the tensor.

It needs a C++ compiler on a CPU, and some seconds of compilation per set of candidates, so it only runs on request.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from flexact.candidates.registry import lookup
from flexact.ops.blending import Blending
from flexact.ops.closed_form import by_candidate, dense, logit_gradient, with_layout_of

_numbers = itertools.count()


def forward(h: Tensor, blending: Blending) -> tuple[Tensor, Tensor]:
    """Return the result of `closed_form.forward`, computed through torch.compile."""
    h, weights, statistics = dense(h), blending.weights, blending.statistics
    x, sums = _run(_forward, (_flat(h, blending),), blending, statistics)
    x = _with_layout(x, h)
    if not statistics:
        return x, weights.new_empty(0)
    return x, by_candidate(sums / max(h.numel() // weights.shape[0], 1), blending)


def backward(delta: Tensor, h: Tensor, blending: Blending, need_logits: bool) -> tuple[Tensor, Tensor]:
    """Return the result of `closed_form.backward`, computed through torch.compile."""
    h = dense(h)
    flat = _flat(h, blending), _flat(with_layout_of(h, delta), blending)
    gradient, sums = _run(_backward, flat, blending, need_logits)
    gradient = _with_layout(gradient, h)
    if not need_logits:
        return gradient, blending.weights.new_empty(0)
    return gradient, logit_gradient(by_candidate(sums, blending), blending)


def _flat(h: Tensor, blending: Blending) -> Tensor:
    """Return a contiguous view of a dense tensor, (outer, channels, inner), with one channel for the layer."""
    channels = blending.weights.shape[0]
    inner = h.stride(blending.channel_dim) if channels > 1 else h.numel()
    return h.as_strided((h.numel(),), (1,)).view((-1, channels, inner) if h.numel() else (0, channels, 1))


def _with_layout(flat: Tensor, like: Tensor) -> Tensor:
    """Return the flat tensor with the shape and strides of `like`."""
    return flat.reshape(-1).as_strided(like.shape, like.stride())


def _run(
    function: Callable[..., Any], flat: tuple[Tensor, ...], blending: Blending, need_sums: bool
) -> tuple[Tensor, Tensor]:
    """Run the function, compiled for these constants, the dtype of h, and the set of its dimensions of size 1."""
    kind = (flat[0].dtype, *(size > 1 for size in flat[0].shape))
    run = _compiled(function, kind, tuple(blending.keys), tuple(blending.alive), need_sums)
    found: tuple[Tensor, Tensor] = run(*flat, blending.weights.unsqueeze(1))
    return found


@functools.cache
def _compiled(function: Callable[..., Any], kind: tuple[Any, ...], *constants: Any) -> Callable[..., Any]:
    def run(*tensors: Tensor) -> Any:
        return function(*tensors, *constants)

    # torch.compile limits how often one code object is recompiled, so every set of constants gets its own.
    own = FunctionType(
        run.__code__.replace(co_name=f"routed_{next(_numbers)}"), run.__globals__, closure=run.__closure__
    )
    return torch.compile(own, dynamic=True, fullgraph=True)


def _forward(
    h: Tensor, weights: Tensor, keys: tuple[str, ...], alive: tuple[int, ...], statistics: bool
) -> tuple[Tensor, Tensor]:
    values, slopes = _evaluated(h, keys, alive)
    x = _weighted_sum(weights, alive, values).to(h.dtype)
    return x, _by_row([slope.abs() for slope in slopes]) if statistics else h.new_empty(0)


def _backward(
    h: Tensor, delta: Tensor, weights: Tensor, keys: tuple[str, ...], alive: tuple[int, ...], need_logits: bool
) -> tuple[Tensor, Tensor]:
    values, slopes = _evaluated(h, keys, alive)
    upstream = _wide(delta)
    gradient = (upstream * _weighted_sum(weights, alive, slopes)).to(h.dtype)
    return gradient, _by_row([upstream * value for value in values]) if need_logits else h.new_empty(0)


def _evaluated(h: Tensor, keys: tuple[str, ...], alive: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the values and the slopes of the alive candidates; the compiler removes those that are not used."""
    wide, candidates = _wide(h), [lookup(keys[k]) for k in alive]
    values = [candidate.function(wide) for candidate in candidates]
    return values, [one.derivative(wide, value) for one, value in zip(candidates, values, strict=True)]


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _weighted_sum(weights: Tensor, alive: tuple[int, ...], values: list[Tensor]) -> Tensor:
    """Return Σ_k w_k values_k; a zero weight masks infinite values."""
    total = torch.zeros_like(values[0])
    for k, value in zip(alive, values, strict=True):
        weight = weights[..., k]
        total = total + torch.where(weight == 0, 0.0, weight * value)
    return total


def _by_row(values: list[Tensor]) -> Tensor:
    """Return the sums over all dimensions but the channels, (rows, number of values)."""
    return torch.stack([value.sum((0, 2), dtype=torch.float64) for value in values], -1)
