"""Second and higher derivatives of the routed activation in closed form, for a backward with create_graph=True.

B_n(h, ℓ) = Σ_k w_k σ_k⁽ⁿ⁾(h) is the n-th derivative of the activation. Its own derivative with respect to h is
B_{n+1}, and the one with respect to the logits is Proposition 1 with σ_k⁽ⁿ⁾ in place of σ_k.

A call of a site is one node of the autograd graph, with the outputs x = B_0, B_1 and B_2. The forward returns stand-ins
for B_1 and B_2, which hold no values. A differentiable backward computes their values, and only multiplies by them and
adds. A later backward pass therefore arrives at the same node, with the gradients δ_n of all three, and computes the
gradients of Σ_n ⟨δ_n, B_n⟩ in one sweep over h.

For B_3, and for the derivatives of a logit gradient, autograd differentiates the plain blend of the candidates'
formulas (`derivatives`, `differentiable`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from flexact.candidates.registry import lookup
from flexact.ops import derivatives, differentiable
from flexact.ops.blending import Blending

Deltas = Mapping[int, Tensor]
"""δ_n by n, for those that are not 0."""


class Blends(Protocol):
    """The derivatives of the activation at one input. Half precision is computed in float32."""

    def blend(self, n: int) -> Tensor:
        """Return B_n for n = 1 or 2, in the shape of h."""

    def gradients(self, deltas: Deltas, need_logits: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients of Σ_n ⟨δ_n, B_n⟩ with respect to h and the logits, (rows·K,), empty if not needed."""


class Values:
    """The values of B_1 and B_2 at one call, each computed when it is first needed."""

    def __init__(self, blends: Blends) -> None:
        self._blends = blends
        self.gradients = blends.gradients
        self._known: dict[int, Tensor] = {}

    def fill(self, n: int, stand_in: Tensor) -> Tensor:
        """Give the stand-in for B_n its values."""
        if n not in self._known:
            self._known[n] = self._blends.blend(n)
        stand_in.data = self._known[n]
        return stand_in


def stand_ins(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors for B_1 and B_2, with the shape of h and the memory of one number."""
    shape, strides, dtype = h.shape, (0,) * h.dim(), torch.float64 if h.dtype == torch.float64 else torch.float32
    first = torch.empty_strided(shape, strides, dtype=dtype, device=h.device)
    return first, torch.empty_strided(shape, strides, dtype=dtype, device=h.device)


def gradients(
    ctx: Any, values: Values, deltas: Deltas, tensors: tuple[Tensor, ...], blending: Blending
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of Σ_n ⟨δ_n, B_n⟩ w.r.t. h and the logits, with a graph if one is recorded; None if not
    needed.

    ctx: the node of the call, whose first two inputs are h and the logits.
    tensors: h, the logits, and the stand-ins.
    """
    need_h, need_logits = ctx.needs_input_grad[:2]
    need_logits = need_logits and _is_wanted(ctx.next_functions[1][0])
    if not torch.is_grad_enabled():
        to_h, to_logits = values.gradients(deltas, need_logits)
        return to_h if need_h else None, to_logits if need_logits else None
    h, logits, *outputs = tensors
    found: list[Tensor | None] = [None, None]
    if need_h:
        slopes = [
            values.fill(n + 1, outputs[n]) if n + 1 < derivatives.MOST else _plain_blend(h, logits, blending, n + 1)
            for n in deltas
        ]
        terms = [delta.to(slope.dtype) * slope for delta, slope in zip(deltas.values(), slopes, strict=True)]
        found[0] = functools.reduce(torch.add, terms).to(h.dtype)
    if need_logits:
        terms = [_plain_logit_gradient(delta, h, logits, blending, n) for n, delta in deltas.items()]
        found[1] = functools.reduce(torch.add, terms)
    return found[0], found[1]


def _is_wanted(node: Any) -> bool:
    """Return whether the running backward pass needs the gradient of a node. `needs_input_grad` is not
    enough: it is True for the logits even if autograd.grad was called for the network's input alone."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that was passed to autograd.grad
        return True


def _plain_logit_gradient(delta: Tensor, h: Tensor, logits: Tensor, blending: Blending, n: int) -> Tensor:
    """Return the gradient of ⟨δ, B_n⟩ with respect to the logits as differentiable torch operations."""
    logits = logits.view_as(logits)  # the logits themselves may determine h, through an earlier call of the site
    blend = _plain_blend(h, logits, blending, n)
    (found,) = torch.autograd.grad(blend, logits, delta.to(blend.dtype), create_graph=True)
    return found


def _plain_blend(h: Tensor, logits: Tensor, blending: Blending, n: int) -> Tensor:
    """Return B_n as differentiable torch operations, in float32 for half precision."""
    functions = {k: functools.partial(_derivative, blending.keys[k], n) for k in blending.alive}
    return differentiable.blended(h, logits, blending, functions)


def _derivative(key: str, n: int, h: Tensor) -> Tensor:
    """Return the n-th derivative of a built-in candidate."""
    candidate = lookup(key)
    value = candidate.function(h)
    if n == 0:
        return value
    slope = candidate.derivative(h, value)
    return slope if n == 1 else derivatives.higher(key, h, value, slope)[n - 2]
