"""The closed form for small tensors on a CPU, which are bound by the number of torch calls, not by their arithmetic.

The values of all candidates are stacked, (alive, elements), so that a blend, the inner products and the statistics are
one matrix product or one sum each. The few numbers per candidate are computed in Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexact.candidates import lookup
from flexact.ops.blending import Blending

MOST = (1 << 14) - 1
"""Maximum number of elements. From the next on, candidates share a sigmoid (see `closed_form`)."""


def takes(h: Tensor, blending: Blending) -> bool:
    """Return whether the small form computes this call: one pick per layer, and no weight of 0, whose infinite values
    a matrix product would not mask."""
    small = h.device.type == "cpu" and 0 < h.numel() <= MOST and blending.weights.shape[0] == 1
    return small and all(_alive_weights(blending))


def forward(h: Tensor, blending: Blending, kept: list[Tensor] | None) -> tuple[Tensor, Tensor]:
    """See `closed_form.forward`. h: dense. It keeps the blended slope and the stacked values."""
    source = _flat(h)
    weights = source.new_tensor(_alive_weights(blending))
    candidates = [lookup(blending.keys[k]) for k in blending.alive]
    values = [one.function(source) for one in candidates]
    stacked = torch.stack(values)
    x = torch.mv(stacked.t(), weights).to(h.dtype).as_strided(h.shape, h.stride())
    if kept is None and not blending.statistics:
        return x, blending.weights.new_empty(0)
    slopes = torch.stack([one.derivative(source, value) for one, value in zip(candidates, values, strict=True)])
    if kept is not None:
        kept += [torch.mv(slopes.t(), weights), stacked]
    if not blending.statistics:
        return x, blending.weights.new_empty(0)
    sums: list[float] = slopes.abs_().sum(1).tolist()
    return x, _table([one / source.numel() for one in sums], blending)


def backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, kept: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """See `closed_form.backward`. h: dense, with delta in the same layout."""
    if not kept:
        found: list[Tensor] = []
        forward(h, blending._replace(statistics=False), found)
        kept = found
    slope, values = kept
    upstream = _flat(delta)
    gradient = (slope * upstream).to(h.dtype).as_strided(h.shape, h.stride())
    if not need_logits:
        return gradient, blending.weights.new_empty(0)
    return gradient, logit_gradient(torch.mv(values, upstream).tolist(), blending)


def logit_gradient(inner: list[float], blending: Blending) -> Tensor:
    """Return `closed_form.logit_gradient` from the inner products of the alive candidates of a layer."""
    alive, p, tau = blending.alive, blending.probabilities[0].tolist(), blending.temperature.item()
    shares = [p[k] for k in alive]
    inner = [one if share else 0.0 for one, share in zip(inner, shares, strict=True)]  # 0·∞ would be NaN
    centred = [sum([share * (own - one) for share, one in zip(shares, inner, strict=True)]) for own in inner]
    return _table([share * one / tau for share, one in zip(shares, centred, strict=True)], blending).flatten()


def _alive_weights(blending: Blending) -> list[float]:
    weights: list[float] = blending.weights[0].tolist()
    return weights if len(weights) == len(blending.alive) else [weights[k] for k in blending.alive]


def _flat(tensor: Tensor) -> Tensor:
    """Return a flat view of a dense tensor, in float32 for half precision."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat if tensor.dtype == torch.float64 else flat.float()


def _table(numbers: list[float], blending: Blending) -> Tensor:
    """Return numbers of the alive candidates as (1, K), with 0 for the others."""
    if len(numbers) < len(blending.keys):
        own = dict(zip(blending.alive, numbers, strict=True))
        numbers = [own.get(k, 0.0) for k in range(len(blending.keys))]
    return blending.weights.new_tensor(numbers).view(1, -1)
