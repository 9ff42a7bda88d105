"""The closed form for small tensors on a CPU, which are bound by the number of torch calls, not by their arithmetic.

The values of the candidates are stacked, so that a blend, the inner products and the statistics are one matrix product
or one sum each. The few numbers per candidate are computed in Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexact.candidates import Candidate, lookup
from flexact.ops.blending import Blending

MOST = (1 << 14) - 1
"""Maximum number of elements. Larger tensors compute their candidates from one sigmoid (see `closed_form`)."""
CHEAP = frozenset({"relu", "leaky_relu", "identity", "relu6", "hardtanh", "hardswish"})
"""The candidates whose values are never kept, because recomputing them takes no longer than loading them."""

Indexed = list[tuple[int, Candidate]]


def takes(h: Tensor, blending: Blending) -> bool:
    """Return whether the small form computes this call: one pick per layer, and no weight of 0, whose infinite values
    a matrix product would not mask."""
    if h.device.type != "cpu" or not 0 < h.numel() <= MOST or blending.weights.shape[0] != 1:
        return False
    weights = blending.weights[0].tolist()
    return all(weights[k] for k in blending.alive) and any(not _is_cheap(blending.keys[k]) for k in blending.alive)


def forward(h: Tensor, blending: Blending, kept: list[Tensor] | None) -> tuple[Tensor, Tensor]:
    """See `closed_form.forward`. h: dense. It keeps the blended slope and the stacked values of all but the cheap."""
    source, own, found = _flat(h), _ordered(blending), blending.weights[0].tolist()
    weights = torch.tensor([found[k] for k, _ in own], dtype=source.dtype, device="cpu")
    values = [one.function(source) for _, one in own]
    costly = sum(one.name not in CHEAP for _, one in own)
    stacked = torch.stack(values[:costly])
    x = torch.mv(stacked.t(), weights[:costly])
    for (k, _), value in zip(own[costly:], values[costly:], strict=True):
        x.add_(value, alpha=found[k])
    x = x.to(h.dtype).as_strided(h.shape, h.stride())
    if kept is None and not blending.statistics:
        return x, blending.weights.new_empty(0)
    slopes = torch.stack([one.derivative(source, value) for (_, one), value in zip(own, values, strict=True)])
    if kept is not None:
        kept += [torch.mv(slopes.t(), weights), stacked]
    if not blending.statistics:
        return x, blending.weights.new_empty(0)
    sums: list[float] = slopes.abs_().sum(1).tolist()
    return x, _table([one / source.numel() for one in sums], own, blending)


def backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, kept: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """See `closed_form.backward`. h: dense, with delta in the same layout."""
    if not kept:
        found: list[Tensor] = []
        forward(h, blending._replace(statistics=False), found)
        kept = found
    slope, stacked = kept
    upstream = _flat(delta)
    gradient = (slope * upstream).to(h.dtype).as_strided(h.shape, h.stride())
    if not need_logits:
        return gradient, blending.weights.new_empty(0)
    source, own = _flat(h), _ordered(blending)
    products: list[float] = torch.mv(stacked, upstream).tolist()
    products += [torch.dot(upstream, one.function(source)).item() for _, one in own[len(stacked) :]]
    p, tau = blending.probabilities[0].tolist(), blending.temperature.item()
    centred = _centred(products, [p[k] for k, _ in own])
    return gradient, _table([one / tau for one in centred], own, blending).flatten()


def values(stacked: Tensor, h: Tensor, blending: Blending) -> list[Tensor]:
    """Return the values of the alive candidates, flat, from the stacked ones that `forward` kept."""
    source, own = _flat(h), _ordered(blending)
    found = {k: value for (k, _), value in zip(own, stacked.unbind(), strict=False)}
    return [found[k] if k in found else lookup(blending.keys[k]).function(source) for k in blending.alive]


def _centred(products: list[float], p: list[float]) -> list[float]:
    """Return p_k Σ_j p_j (⟨δ, a_k⟩ − ⟨δ, a_j⟩). See `closed_form.logit_gradient`."""
    inner = [one if share else 0.0 for one, share in zip(products, p, strict=True)]  # 0·∞ would be NaN
    sums = [sum([share * (own - one) for share, one in zip(p, inner, strict=True)]) for own in inner]
    return [share * one for share, one in zip(p, sums, strict=True)]


def _ordered(blending: Blending) -> Indexed:
    """Return the alive candidates with their indices, the cheap ones last."""
    own = [(k, lookup(blending.keys[k])) for k in blending.alive]
    own.sort(key=_comes_last)
    return own


def _comes_last(indexed: tuple[int, Candidate]) -> bool:
    return indexed[1].name in CHEAP


def _is_cheap(key: str) -> bool:
    return lookup(key).name in CHEAP


def _flat(tensor: Tensor) -> Tensor:
    """Return a flat view of a dense tensor, in float32 for half precision."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat if tensor.dtype == torch.float64 else flat.float()


def _table(numbers: list[float], own: Indexed, blending: Blending) -> Tensor:
    """Return numbers of these candidates as (1, K), with 0 for the dropped ones."""
    row = [0.0] * len(blending.keys)
    for (k, _), number in zip(own, numbers, strict=True):
        row[k] = number
    return torch.tensor([row], dtype=blending.weights.dtype, device="cpu")
