"""The Triton kernels as differentiable functions: `routed` and `normalised`.

Under torch.compile they dispatch to custom operators, which it can trace into (`triton_operators`). In eager mode they
are autograd functions, whose CPU overhead is a fraction of an operator's and grows with the number of arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexact.errors import FlexActError
from flexact.ops import differentiable
from flexact.ops.triton import batch_norm, fallback, registration
from flexact.ops.triton.batch_norm import Norm
from flexact.ops.triton.fallback import Blending, Normalising
from flexact.ops.triton.launch import is_traced
from flexact.ops.triton.moments import Running

__all__ = ["Blending", "Norm", "Normalising", "moments", "normalised", "routed"]


def routed(h: Tensor, logits: Tensor, blending: Blending, channel_dim: int) -> tuple[Tensor, Tensor]:
    """Return the routed activation of h and its statistics. See `flexact.ops.routed_activation`."""
    if is_traced(h):
        return registration.routed(h, logits, blending, channel_dim)
    x, gathered = _Routed.apply(h, logits, blending, channel_dim)  # type: ignore[no-untyped-call]
    return x, gathered


def normalised(y: Tensor, logits: Tensor, normalising: Normalising, blending: Blending) -> tuple[Tensor, Tensor]:
    """Return the routed activation of norm(y) + residual and its statistics."""
    if is_traced(y):
        return registration.normalised(y, logits, normalising, blending)
    own, residual, other, _ = normalising
    affine = (own.weight, own.bias, None, None) if other is None else (own.weight, own.bias, other.weight, other.bias)
    x, gathered = _Normalised.apply(y, logits, residual, *affine, normalising, blending)  # type: ignore[no-untyped-call]
    return x, gathered


def moments(y: Tensor, running: Running | None, momentum: float | None, eps: float) -> Tensor:
    """Return the mean and 1/√(variance + ε) of each channel, (2, channels), without a graph.

    The running statistics are updated in place.
    """
    if is_traced(y):
        found: Tensor = registration.batch_moments(y.detach(), *(running or (None, None, None)), momentum, eps)
        return found
    return fallback.moments(y, running, momentum, eps)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, logits: Tensor, blending: Blending, channel_dim: int) -> tuple[Tensor, Tensor]:
        ctx.keys, ctx.alive, ctx.channel_dim = blending.keys, blending.alive, channel_dim
        ctx.save_for_backward(h, logits, blending.weights, blending.probabilities, blending.temperature)
        ctx.set_materialize_grads(False)  # none for the statistics
        x, gathered = fallback.routed_forward(h, blending, channel_dim)
        ctx.mark_non_differentiable(gathered)
        return x, gathered

    @staticmethod
    def backward(ctx: Any, delta: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if delta is None:
            return None, None, None, None
        need_h, need_logits, _, _ = ctx.needs_input_grad
        h, logits, weights, probabilities, temperature = ctx.saved_tensors
        if torch.is_grad_enabled():  # the backward runs with create_graph=True
            routing = (weights, probabilities, temperature, ctx.keys, ctx.alive, ctx.channel_dim)
            return (*differentiable.gradients(delta, h, logits, (need_h, need_logits), *routing), None, None)
        blending = Blending(weights, probabilities, temperature, ctx.keys, ctx.alive, False)
        gradient, to_logits = fallback.routed_backward(delta, h, blending, ctx.channel_dim, need_logits)
        return gradient if need_h else None, to_logits if need_logits else None, None, None


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        logits: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        residual_weight: Tensor | None,
        residual_bias: Tensor | None,
        normalising: Normalising,
        blending: Blending,
    ) -> tuple[Tensor, Tensor]:
        own, _, other, ctx.batch_statistics = normalising
        ctx.keys, ctx.alive = blending.keys, blending.alive
        norms = (own.moments, weight, bias, None if other is None else other.moments, residual_weight, residual_bias)
        ctx.save_for_backward(y, residual, *norms, *blending[:3])
        ctx.set_materialize_grads(False)  # none for the statistics
        x, gathered = fallback.normalised_forward(y, normalising, blending)
        ctx.mark_non_differentiable(gathered)
        return x, gathered

    @staticmethod
    def backward(ctx: Any, delta: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if delta is None:
            return (None,) * 9
        if torch.is_grad_enabled():  # the backward runs with create_graph=True
            raise FlexActError(
                "create_graph=True was given, but a site that is fused with its batch norm has no second derivative. "
                "Convert without fuse=True."
            )
        y, residual, moments, weight, bias, residual_moments, residual_weight, residual_bias, *rest = ctx.saved_tensors
        weights, probabilities, temperature = rest
        other = None if residual_moments is None else Norm(residual_moments, residual_weight, residual_bias)
        normalising = Normalising(Norm(moments, weight, bias), residual, other, ctx.batch_statistics)
        blending = Blending(weights, probabilities, temperature, ctx.keys, ctx.alive, False)
        need = ctx.needs_input_grad
        to_y, to_residual, results = fallback.normalised_backward(delta, y, normalising, blending, need[1])
        to_bias, to_weight, *others = batch_norm.split_results(results, moments.shape[1], other is not None)
        return (
            to_y if need[0] else None,
            others[-1] if need[1] else None,
            to_residual if need[2] else None,
            to_weight if need[3] else None,
            to_bias if need[4] else None,
            others[0] if need[5] else None,
            to_bias if need[6] else None,  # a shared tensor: torch copies it for the second parameter
            None,
            None,
        )
