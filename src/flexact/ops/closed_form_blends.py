"""The derivatives of the routed activation at one input in plain torch, for `higher_order`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from flexact.ops import derivatives
from flexact.ops.blending import Blending
from flexact.ops.closed_form import BlockSweep, dense, logit_gradient, with_layout_of
from flexact.ops.stacked_form import Stack, stacks


class ClosedFormBlends:
    """See `higher_order.Blends`. The candidates' derivatives are computed when they are first needed, and kept."""

    def __init__(self, h: Tensor, blending: Blending) -> None:
        h = dense(h)
        self._blending, self._dtype = blending, h.dtype
        self._h = h if h.dtype == torch.float64 else h.float()
        self._sweep = Stack(h, blending) if stacks(h) else BlockSweep(h, blending)
        self._source = self._sweep.flat(self._h)
        self._orders: list[list[Tensor]] = []
        self._blends: dict[int, Tensor] = {}

    def blend(self, n: int) -> Tensor:
        """Return B_n in the shape of h."""
        return self._flat_blend(n).as_strided(self._h.shape, self._h.stride())

    def gradients(self, deltas: Mapping[int, Tensor], need_logits: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients of Σ_n ⟨δ_n, B_n⟩ with respect to h and the logits."""
        flat = {n: self._sweep.flat(with_layout_of(self._h, delta.to(self._h.dtype))) for n, delta in deltas.items()}
        gradient = functools.reduce(torch.add, [delta * self._flat_blend(n + 1) for n, delta in flat.items()])
        to_h = gradient.as_strided(self._h.shape, self._h.stride()).to(self._dtype)
        if not need_logits:
            return to_h, to_h.new_empty(0)
        inner = functools.reduce(torch.add, [self._sweep.inner(delta, self._order(n)) for n, delta in flat.items()])
        return to_h, logit_gradient(self._sweep.table(inner), self._blending)

    def _flat_blend(self, n: int) -> Tensor:
        if n not in self._blends:
            self._blends[n] = self._sweep.blended(self._order(n))
        return self._blends[n]

    def _order(self, n: int) -> list[Tensor]:
        """Return the n-th derivative of each candidate that is not dropped, flat."""
        known = self._orders
        if not known:
            known += self._sweep.evaluated(self._source)
        if n > 1 and len(known) == 2:
            keys = [self._blending.keys[k] for k in self._blending.alive]
            pairs = [derivatives.higher(key, self._source, *of) for key, *of in zip(keys, *known, strict=True)]
            known += [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]
        return known[n]
