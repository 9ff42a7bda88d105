"""Second and higher derivatives of the routed activation in closed form, for a backward with create_graph=True.

B_n(h, ℓ) = Σ_k w_k σ_k⁽ⁿ⁾(h) is the n-th derivative of the activation. Its own derivative with respect to h is
B_{n+1}, and the one with respect to the logits is Proposition 1 with σ_k⁽ⁿ⁾ in place of σ_k.

Every differentiable backward of a call is therefore one kind of node, Σ_n δ_n·B_{n+1}(h, ℓ). In a later backward pass,
such a node does not differentiate B_{n+1} itself. It adds its δ to those of the call, and the node of the call, which
the pass reaches last, computes the gradients of all Σ_n ⟨δ_n, B_n⟩ in one sweep over h. The nodes take an empty output
of the call, its `anchor`, in place of h and ℓ, so that autograd runs them in this order.

Beyond the known formulas (`derivatives`), and for the derivatives of a logit gradient, autograd differentiates the
plain blend of those formulas (`differentiable`).
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
"""δ_n by n."""


class Blends(Protocol):
    """The derivatives of the activation at one input. Half precision is computed in float32."""

    def blend(self, n: int) -> Tensor:
        """Return B_n for n = 1 or 2, in the shape of h."""

    def gradients(self, deltas: Deltas, need_logits: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients of Σ_n ⟨δ_n, B_n⟩, n ≤ 2, with respect to h and the logits, (rows·K,), empty if not
        needed."""


class Call:
    """A call of a site that was differentiated with create_graph=True."""

    def __init__(self, blends: Blends) -> None:
        self.gradients = blends.gradients
        self.blend = functools.cache(blends.blend)
        self._deltas: dict[int, dict[int, Tensor]] = {}

    def add(self, n: int, upstream: Tensor, delta: Tensor) -> None:
        """Add the product of two tensors to δ_n in the running backward pass."""
        deltas = self._deltas.setdefault(torch._C._current_graph_task_id(), {})
        upstream = _wide(upstream)
        deltas[n] = torch.addcmul(deltas[n], upstream, delta) if n in deltas else upstream * delta

    def take(self) -> dict[int, Tensor]:
        """Return and remove the δ_n of the running backward pass."""
        return self._deltas.pop(torch._C._current_graph_task_id(), {})


def gradients(
    ctx: Any, deltas: dict[int, Tensor], tensors: tuple[Tensor, Tensor, Tensor], blending: Blending
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of Σ_n ⟨δ_n, B_n⟩ w.r.t. h and the logits, with a graph if one is recorded; None if not
    needed.

    ctx: the node of the call, whose first two inputs are h and the logits.
    tensors: h, the logits, and the anchor of the call.
    """
    h, logits, anchor = tensors
    call: Call = ctx.call
    need_h, need_logits = ctx.needs_input_grad[:2]
    need_logits = need_logits and _is_wanted(ctx.next_functions[1][0])
    if not torch.is_grad_enabled():
        to_h, to_logits = call.gradients(deltas, need_logits)
        return to_h if need_h else None, to_logits if need_logits else None
    found: list[Tensor | None] = [None, None]
    if need_h:
        known = [n for n in deltas if n + 1 < derivatives.MOST]
        terms = [_with_graph(anchor, call, h.dtype, {n: deltas[n] for n in known})] if known else []
        for n in deltas.keys() - known:
            terms.append((_wide(deltas[n]) * _plain_blend(h, logits, blending, n + 1)).to(h.dtype))
        found[0] = functools.reduce(torch.add, terms)
    if need_logits:
        found[1] = sum(_plain_logit_gradient(delta, h, logits, blending, n) for n, delta in deltas.items())
    return found[0], found[1]


def _is_wanted(node: Any) -> bool:
    """Return whether the running backward pass needs the gradient of a node. `needs_input_grad` is not
    enough: it is True for the logits even if autograd.grad was called for the network's input alone."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that was passed to autograd.grad
        return True


def _with_graph(anchor: Tensor, call: Call, dtype: torch.dtype, deltas: Deltas) -> Tensor:
    found: Tensor = _InputGradient.apply(anchor, call, dtype, tuple(deltas), *deltas.values())  # type: ignore[no-untyped-call]
    return found


class _InputGradient(torch.autograd.Function):
    """Σ_n δ_n·B_{n+1}, the gradient of Σ_n ⟨δ_n, B_n⟩ with respect to h."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, call: Call, dtype: torch.dtype, orders: tuple[int, ...], *deltas: Tensor
    ) -> Tensor:
        ctx.save_for_backward(anchor, *deltas)
        ctx.call, ctx.orders = call, orders
        total = deltas[0] * call.blend(orders[0] + 1)
        for n, delta in zip(orders[1:], deltas[1:], strict=True):
            total = torch.addcmul(total, delta, call.blend(n + 1))
        return total.to(dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        anchor, *deltas = ctx.saved_tensors
        call, needed = ctx.call, ctx.needs_input_grad[4:]
        # The node of the call itself counts as executed as well if only the gradient of its x is wanted.
        before = [node for node, _ in ctx.next_functions[0][0].next_functions if node is not None]
        reaches_call = any(map(_is_wanted, before))
        found: list[Tensor | None] = [None] * len(deltas)
        for i, (n, delta) in enumerate(zip(ctx.orders, deltas, strict=True)):
            if reaches_call:
                call.add(n + 1, upstream, delta)
            if needed[i] and torch.is_grad_enabled():
                found[i] = _with_graph(anchor, call, delta.dtype, {n: upstream})
            elif needed[i]:
                found[i] = (upstream * call.blend(n + 1)).to(delta.dtype)
        return None, None, None, None, *found


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


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
