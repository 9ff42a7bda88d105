"""Second and higher derivatives of the routed activation in closed form, for a backward with create_graph=True.

B_n(h, ℓ) = Σ_k w_k σ_k⁽ⁿ⁾(h) is the n-th derivative of the activation. Its own derivative with respect to h is
B_{n+1}, and the one with respect to the logits is Proposition 1 with σ_k⁽ⁿ⁾ in place of σ_k. So one autograd function,
`_Blend`, covers all orders with known formulas (`derivatives`). Beyond them, and for the derivatives of a logit
gradient, autograd differentiates the plain blend of those formulas (`differentiable`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flexact.candidates.registry import lookup
from flexact.ops import closed_form, derivatives, differentiable
from flexact.ops.blending import Blending
from flexact.ops.native import routed as native


class Terms:
    """σ_k⁽ⁿ⁾(h) of the alive candidates at one call. Each blend is computed once, when it is first needed."""

    def __init__(self, h: Tensor, blending: Blending) -> None:
        self.blending = blending
        h = closed_form.dense(h.detach())
        self._h = h if h.dtype == torch.float64 else h.float()
        self._native = native.supports(h, blending) and native.has_formulas(blending)
        self._blends: dict[int, Tensor] = {}
        if not self._native:
            self.sweep = closed_form.Sweep(h, blending)
            self.source = self.sweep.flat(self._h)
            self._orders: list[list[Tensor]] = []

    def order(self, n: int) -> list[Tensor]:
        """Return the n-th derivative of each alive candidate, flat, in torch operations."""
        known = self._orders
        while len(known) <= n:
            if not known:
                known.append([term.function(self.source) for term in self._terms])
            elif len(known) == 1:
                both = zip(self._terms, known[0], strict=True)
                known.append([term.derivative(self.source, value) for term, value in both])
            else:
                keys = [self.blending.keys[k] for k in self.blending.alive]
                pairs = [derivatives.higher(key, self.source, *of) for key, *of in zip(keys, *known, strict=True)]
                known += [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]
        return known[n]

    @functools.cached_property
    def _terms(self) -> list[closed_form.Term]:
        return self.sweep.terms(self.source)

    def blend(self, n: int) -> Tensor:
        """Return B_n in the shape of h; in float32 for half precision. Each call returns a new tensor object."""
        if n not in self._blends:
            if self._native:
                self._blends[n] = native.blend(self._h, self.blending, n)
            else:
                self._blends[n] = self.sweep.blend(self.order(n), self._terms, torch.empty_like(self.source))
        return self._blends[n].as_strided(self._h.shape, self._h.stride())

    def logit_gradient(self, delta: Tensor, n: int) -> Tensor:
        """Return the gradient of ⟨δ, B_n⟩ with respect to the logits, (rows·K,)."""
        if self._native:
            return native.logit_gradient(delta, self._h, self.blending, n)
        upstream = self.sweep.flat(closed_form.with_layout_of(self._h, delta)).to(self.sweep.dtype)
        inner = self.sweep.inner(upstream, self.order(n))
        return closed_form.logit_gradient(self.sweep.table([inner]), self.blending)


def gradients(
    ctx: Any, delta: Tensor, h: Tensor, logits: Tensor, terms: Terms, n: int = 0
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of ⟨δ, B_n(h, ℓ)⟩ w.r.t. h and ℓ, with a graph if one is recorded; None if not needed.

    ctx: the node of B_n, whose first two inputs are h and the logits.
    """
    need_h, need_logits = ctx.needs_input_grad[:2]
    recording = torch.is_grad_enabled()
    to_h = to_logits = None
    slope: Tensor
    if need_h:
        if not recording:
            slope = terms.blend(n + 1)
        elif n + 1 < derivatives.MOST:
            slope = _Blend.apply(h, logits, terms, n + 1)  # type: ignore[no-untyped-call]
        else:
            slope = _plain_blend(h, logits, terms.blending, n + 1)
        to_h = (delta.to(slope.dtype) * slope).to(h.dtype)
    wants_logits = need_logits and _is_wanted(ctx.next_functions[1][0])
    if wants_logits and recording:
        to_logits = _plain_logit_gradient(delta, h, logits, terms.blending, n)
    elif wants_logits:
        to_logits = terms.logit_gradient(delta, n)
    return to_h, to_logits


def _is_wanted(node: Any) -> bool:
    """Return whether the running backward pass needs the gradient of a node. `needs_input_grad` is not
    enough: it is True for the logits even if autograd.grad was called for the network's input alone."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that was passed to autograd.grad
        return True


class _Blend(torch.autograd.Function):
    """B_n for n ≥ 1."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, logits: Tensor, terms: Terms, n: int) -> Tensor:
        ctx.save_for_backward(h, logits)
        ctx.terms, ctx.n = terms, n
        return terms.blend(n)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        h, logits = ctx.saved_tensors
        return *gradients(ctx, delta, h, logits, ctx.terms, ctx.n), None, None


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
