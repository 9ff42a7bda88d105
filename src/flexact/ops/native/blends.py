"""The derivatives of the routed activation at one input in C, for `higher_order`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from flexact.ops.blending import Blending
from flexact.ops.closed_form import dense, with_layout_of
from flexact.ops.native import library
from flexact.ops.native.routed import as_source, logit_gradient, plan_of


class NativeBlends:
    """See `higher_order.Blends`. Every candidate must have a formula in C."""

    def __init__(self, h: Tensor, blending: Blending) -> None:
        self._blending, self._dtype = blending, h.dtype
        self._h = as_source(dense(h))
        self._weights = blending.weights.contiguous()

    def blend(self, n: int) -> Tensor:
        """Return B_n."""
        _, _, _, keys, alive, *_ = self._blending
        chosen = plan_of(keys, alive, higher=n > 1, blended=n % 2, summed=-1)
        arrays = self._h.data_ptr(), None, self._weights.data_ptr(), None
        found = torch.empty_like(self._h)
        library.check(
            library.load().sweep(
                ctypes.addressof(chosen), *arrays, found.data_ptr(), None, found.numel(), torch.get_num_threads()
            )
        )
        return found

    def gradients(self, deltas: Mapping[int, Tensor], need_logits: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients of Σ_n ⟨δ_n, B_n⟩ with respect to h and the logits."""
        _, _, _, keys, alive, *_ = self._blending
        chosen = plan_of(keys, alive, blended=1, summed=0 if need_logits else -1)
        upstream = {n: as_source(with_layout_of(self._h, delta)) for n, delta in deltas.items()}
        addresses = [upstream[n].data_ptr() if n in upstream else None for n in range(3)]
        to_h = torch.empty_like(self._h)
        sums = torch.zeros(self._weights.shape[1], dtype=torch.float64, device=to_h.device)
        library.check(
            library.load().gradients(
                ctypes.addressof(chosen),
                self._h.data_ptr(),
                *addresses,
                self._weights.data_ptr(),
                to_h.data_ptr(),
                sums.data_ptr(),
                to_h.numel(),
                torch.get_num_threads(),
            )
        )
        return to_h.to(self._dtype), logit_gradient(sums, self._blending) if need_logits else to_h.new_empty(0)
