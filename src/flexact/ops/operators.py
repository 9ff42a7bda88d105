"""The routed activation as a differentiable function: an autograd function in eager mode, operators when traced.

torch.library's operators can be compiled and exported. In eager mode their dispatch takes longer than the arithmetic of
a small tensor, so an autograd function is called instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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

Decorator = Callable[..., Callable[[Callable[..., Any]], CustomOpDef]]
"""torch.library.custom_op or torch.library.triton_op."""


class RoutedActivation:
    """The routed activation in one implementation, with the operators `flexact::name` and `flexact::name_backward`."""

    def __init__(self, name: str, decorator: Decorator, forward: Forward, backward: Backward) -> None:
        self._forward, self._backward = forward, backward
        self.operator, self.backward_operator = _define(name, decorator, forward, backward)

    def __call__(self, h: Tensor, logits: Tensor, blending: Blending) -> tuple[Tensor, Tensor]:
        """Return the routed activation of h and its statistics. See `flexact.ops.routed_activation`."""
        if is_traced(h):
            x, gathered = self.operator(h, logits, *packed(blending))
        elif torch.is_grad_enabled() and (h.requires_grad or logits.requires_grad):
            x, gathered = _Eager.apply(h, logits, blending, self._forward, self._backward)  # type: ignore[no-untyped-call]
        else:
            x, gathered = self._forward(h.detach(), blending, None)
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
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, logits: Tensor, blending: Blending, forward: Forward, backward: Backward
    ) -> tuple[Tensor, Tensor]:
        weights, probabilities, temperature, ctx.keys, ctx.alive, ctx.channel_dim, _ = blending
        ctx.run_backward, ctx.terms = backward, None
        ctx.set_materialize_grads(False)  # the statistics have no gradient
        kept: list[Tensor] = []
        x, gathered = forward(h, blending, kept)
        ctx.save_for_backward(h, logits, weights, probabilities, temperature, *kept)
        ctx.mark_non_differentiable(gathered)
        return x, gathered

    @staticmethod
    def backward(ctx: Any, delta: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if delta is None:
            return (None,) * 5
        need_h, need_logits = ctx.needs_input_grad[:2]
        h, logits, weights, probabilities, temperature, *kept = ctx.saved_tensors
        blending = Blending(weights, probabilities, temperature, ctx.keys, ctx.alive, ctx.channel_dim, False)
        if torch.is_grad_enabled():  # the backward runs with create_graph=True
            if ctx.terms is None and not derivatives.known(blending):
                return *differentiable.gradients(delta, h, logits, (need_h, need_logits), blending), None, None, None
            ctx.terms = ctx.terms or higher_order.Terms(h, blending, kept)
            return *higher_order.gradients(ctx, delta, h, logits, ctx.terms), None, None, None
        gradient, to_logits = ctx.run_backward(delta, h, blending, need_logits, kept)
        return gradient if need_h else None, to_logits if need_logits else None, None, None, None


def _define(name: str, decorator: Decorator, forward: Forward, backward: Backward) -> tuple[CustomOpDef, CustomOpDef]:

    @decorator(f"flexact::{name}", mutates_args=())
    def operator(
        h: Tensor,
        logits: Tensor,
        weights: Tensor,
        probabilities: Tensor,
        temperature: Tensor,
        keys: str,
        alive: Sequence[int],
        channel_dim: int,
        statistics: bool,
    ) -> tuple[Tensor, Tensor]:
        return forward(h, unpacked(weights, probabilities, temperature, keys, alive, channel_dim, statistics), None)

    @decorator(f"flexact::{name}_backward", mutates_args=())
    def backward_operator(
        delta: Tensor,
        h: Tensor,
        weights: Tensor,
        probabilities: Tensor,
        temperature: Tensor,
        keys: str,
        alive: Sequence[int],
        channel_dim: int,
        need_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        blending = unpacked(weights, probabilities, temperature, keys, alive, channel_dim, False)
        return backward(delta, h, blending, need_logits, ())

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
