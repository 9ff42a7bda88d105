"""The routed activation as a differentiable function: an autograd function in eager mode, operators when traced.

torch.library's operators can be compiled and exported. In eager mode their dispatch takes longer than the arithmetic of
a small tensor, so an autograd function is called instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flexact.ops import derivatives, differentiable, higher_order
from flexact.ops.blending import Blending, packed, unpacked

Forward = Callable[[Tensor, Blending, list[Tensor] | None], tuple[Tensor, Tensor]]
"""(h, blending, kept) -> x and its statistics. The forward may append tensors to the list `kept`, for its backward."""
Backward = Callable[[Tensor, Tensor, Blending, bool, Sequence[Tensor]], tuple[Tensor, Tensor]]
"""(delta, h, blending, need_logits, kept) -> the gradients w.r.t. h and the logits."""


class Implementation(NamedTuple):
    """A forward, the backward for what it keeps, and the blends of a detached h for further derivatives."""

    forward: Forward
    backward: Backward
    blends: Callable[[Tensor, Blending], higher_order.Blends]


Choice = Callable[[Tensor, Blending, bool], Implementation]
"""(h, blending, keeps) -> the implementation that runs on this input. keeps: whether its forward may keep tensors for
its backward."""

Decorator = Callable[..., Callable[[Callable[..., Any]], CustomOpDef]]
"""torch.library.custom_op or torch.library.triton_op."""


class RoutedActivation:
    """The routed activation, with the operators `flexact::name` and `flexact::name_backward`."""

    def __init__(self, name: str, decorator: Decorator, choose: Choice) -> None:
        self._choose = choose
        self.operator, self.backward_operator = _define(name, decorator, choose)

    def __call__(self, h: Tensor, logits: Tensor, blending: Blending) -> tuple[Tensor, Tensor]:
        """Return the routed activation of h and its statistics. See `flexact.ops.routed_activation`."""
        if is_traced(h):
            x, gathered = self.operator(h, logits, *packed(blending))
        elif torch.is_grad_enabled() and (h.requires_grad or logits.requires_grad):
            statistics: list[Tensor] = []
            x, *_ = _Eager.apply(h, logits, blending, self._choose(h, blending, True), statistics)  # type: ignore[no-untyped-call]
            (gathered,) = statistics
        else:
            x, gathered = self._choose(h, blending, False).forward(h.detach(), blending, None)
        return x, gathered


def is_traced(tensor: Tensor) -> bool:
    """Return whether torch.compile, a dispatch mode or another tracer sees the operations on a tensor."""
    return is_recorded(tensor) or torch._C._len_torch_dispatch_stack() > 0


def is_recorded(tensor: Tensor) -> bool:
    """Return whether the operations on a tensor go into a graph. A dispatch mode that only observes them, such as
    a FLOP counter, does not record them."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in (Tensor, torch.nn.Parameter)
        or torch._C._get_tracing_state() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and get_proxy_mode() is not None)
    )


class _Eager(torch.autograd.Function):
    """Returns x, and stand-ins for its derivatives; see `higher_order`. The statistics, which have no gradient, are
    appended to a list."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, logits: Tensor, blending: Blending, implementation: Implementation, found: list[Tensor]
    ) -> tuple[Tensor, ...]:
        weights, probabilities, temperature, ctx.keys, ctx.alive, ctx.channel_dim, _ = blending
        ctx.implementation, ctx.values = implementation, None
        ctx.set_materialize_grads(False)
        kept: list[Tensor] = []
        x, gathered = implementation.forward(h, blending, kept)
        found.append(gathered)
        first, second = higher_order.stand_ins(h)
        ctx.save_for_backward(h, logits, first, second, weights, probabilities, temperature, *kept)
        return x, first, second

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor | None) -> tuple[Tensor | None, ...]:
        given = {n: delta for n, delta in enumerate(deltas) if delta is not None}
        if not given:
            return (None,) * 5
        need_h, need_logits = ctx.needs_input_grad[:2]
        h, logits, first, second, weights, probabilities, temperature, *kept = ctx.saved_tensors
        blending = Blending(weights, probabilities, temperature, ctx.keys, ctx.alive, ctx.channel_dim, False)
        if ctx.values is None and torch.is_grad_enabled():  # the backward runs with create_graph=True
            if not derivatives.known(ctx.keys, ctx.alive):
                found = differentiable.gradients(given[0], h, logits, (need_h, need_logits), blending)
                return *found, None, None, None
            ctx.values = higher_order.Values(ctx.implementation.blends(h.detach(), blending))
        if ctx.values is not None:
            tensors = (h, logits, first, second)
            return *higher_order.gradients(ctx, ctx.values, given, tensors, blending), None, None, None
        gradient, to_logits = ctx.implementation.backward(given[0], h, blending, need_logits, kept)
        return gradient if need_h else None, to_logits if need_logits else None, None, None, None


def _define(name: str, decorator: Decorator, choose: Choice) -> tuple[CustomOpDef, CustomOpDef]:

    @decorator(f"flexact::{name}", mutates_args=())
    def operator(
        h: Tensor,
        logits: Tensor,
        weights: Tensor | None,
        probabilities: Tensor,
        temperature: Tensor,
        keys: str,
        alive: Sequence[int],
        channel_dim: int,
        statistics: bool,
    ) -> tuple[Tensor, Tensor]:
        blending = unpacked(weights, probabilities, temperature, keys, alive, channel_dim, statistics)
        return choose(h, blending, False).forward(h, blending, None)

    @decorator(f"flexact::{name}_backward", mutates_args=())
    def backward_operator(
        delta: Tensor,
        h: Tensor,
        weights: Tensor | None,
        probabilities: Tensor,
        temperature: Tensor,
        keys: str,
        alive: Sequence[int],
        channel_dim: int,
        need_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        blending = unpacked(weights, probabilities, temperature, keys, alive, channel_dim, False)
        return choose(h, blending, False).backward(delta, h, blending, need_logits, ())

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.keys, ctx.alive, ctx.channel_dim, _ = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(output[1])

    def differentiate(ctx: Any, delta: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        need_h, need_logits = ctx.needs_input_grad[:2]
        h, logits, *tensors = ctx.saved_tensors
        routing = (*tensors, ctx.keys, ctx.alive, ctx.channel_dim)
        if torch.is_grad_enabled():  # the backward runs with create_graph=True
            found = differentiable.gradients(delta, h, logits, (need_h, need_logits), unpacked(*routing, False))
            return *found, *(None,) * 7
        gradient, to_logits = backward_operator(delta, h, *routing, need_logits)
        return gradient if need_h else None, to_logits if need_logits else None, *(None,) * 7

    operator.register_autograd(differentiate, setup_context=keep)
    return operator, backward_operator
