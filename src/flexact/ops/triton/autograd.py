"""The Triton kernels as differentiable functions: `routed`, with the closed form as a fallback, and `normalised`.

Under torch.compile they dispatch to operators, which it can trace into. In eager mode they are autograd functions,
whose CPU overhead is a fraction of an operator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from flexact.errors import FlexActError
from flexact.ops import closed_form, operators
from flexact.ops.blending import Blending, packed, unpacked
from flexact.ops.triton import batch_norm
from flexact.ops.triton import moments as moment_kernels
from flexact.ops.triton import routed as routed_kernels
from flexact.ops.triton.batch_norm import Norm, Normalising
from flexact.ops.triton.fallback import run
from flexact.ops.triton.launch import CannotBuild
from flexact.ops.triton.moments import Running

__all__ = ["Norm", "Normalising", "moments", "normalised", "routed"]


def normalised(y: Tensor, logits: Tensor, normalising: Normalising, blending: Blending) -> tuple[Tensor, Tensor]:
    """Return the routed activation of norm(y) + residual and its statistics."""
    norm, residual, residual_norm, batch_statistics = normalising
    inputs = (y, *norm, residual, *(residual_norm or (None, None, None)), logits)
    if operators.is_traced(y):
        *routing, _, statistics = packed(blending)
        x, gathered = _normalised_operator(*inputs, *routing, statistics, batch_statistics)
    else:
        x, gathered = _Normalised.apply(*inputs, normalising, blending)  # type: ignore[no-untyped-call]
    return x, gathered


def moments(y: Tensor, running: Running | None, momentum: float | None, eps: float) -> Tensor:
    """Return the mean and 1/√(variance + ε) of each channel, (2, channels), without a graph.

    The running statistics are updated in place.
    """
    if operators.is_traced(y):
        found: Tensor = _moments_operator(y.detach(), *(running or (None, None, None)), momentum, eps)
        return found
    return moment_kernels.moments(y, running, momentum, eps)


def _routed_forward(h: Tensor, blending: Blending, _: list[Tensor] | None) -> tuple[Tensor, Tensor]:
    return run(routed_kernels.forward, closed_form.forward, h, blending)


def _routed_backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, _: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    return run(routed_kernels.backward, closed_form.backward, delta, h, blending, need_logits)


routed = operators.RoutedActivation("routed_activation_triton", triton_op, _routed_forward, _routed_backward)


@triton_op("flexact::batch_moments", mutates_args={"running_mean", "running_var", "batches"})
def _moments_operator(
    y: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    momentum: float | None,
    eps: float,
) -> Tensor:
    running = None
    if running_mean is not None and running_var is not None and batches is not None:
        running = (running_mean, running_var, batches)
    return moment_kernels.moments(y, running, momentum, eps)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        y, *norms, _, normalising, blending = inputs
        ctx.batch_statistics, ctx.keys, ctx.alive = normalising.batch_statistics, blending.keys, blending.alive
        ctx.save_for_backward(y, *norms, *blending[:3])
        ctx.set_materialize_grads(False)  # the statistics have no gradient
        x, gathered = batch_norm.forward(y, normalising, blending)
        ctx.mark_non_differentiable(gathered)
        return x, gathered

    @staticmethod
    def backward(ctx: Any, delta: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if delta is None:
            return (None,) * 11
        if torch.is_grad_enabled():  # the backward runs with create_graph=True
            raise FlexActError(
                "create_graph=True was given, but a site that is fused with its batch norm has no second derivative. "
                "Convert without fuse=True."
            )
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[:9]
        y, *norms, weights, probabilities, temperature = saved
        blending = Blending(weights, probabilities, temperature, ctx.keys, ctx.alive, 1, False)
        try:
            found = batch_norm.backward(delta, y, _normalising(*norms, ctx.batch_statistics), blending, needed[8])
        except CannotBuild as error:
            raise FlexActError(
                "the backward of a site that is fused with its batch norm cannot be compiled, although its forward "
                f"was: {error}. Run again with FLEXACT_KERNELS=closed_form, or convert without fuse=True."
            ) from error
        return *_by_input(saved, needed, *found), None, None


@triton_op("flexact::normalised_activation", mutates_args=())
def _normalised_operator(
    y: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_moments: Tensor | None,
    residual_weight: Tensor | None,
    residual_bias: Tensor | None,
    logits: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: str,
    alive: Sequence[int],
    statistics: bool,
    batch_statistics: bool,
) -> tuple[Tensor, Tensor]:
    norms = (moments, weight, bias, residual, residual_moments, residual_weight, residual_bias)
    blending = unpacked(weights, probabilities, temperature, keys, alive, 1, statistics)
    return batch_norm.forward(y, _normalising(*norms, batch_statistics), blending)


@triton_op("flexact::normalised_activation_backward", mutates_args=())
def _normalised_backward_operator(
    delta: Tensor,
    y: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_moments: Tensor | None,
    residual_weight: Tensor | None,
    residual_bias: Tensor | None,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: str,
    alive: Sequence[int],
    batch_statistics: bool,
    need_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    norms = (moments, weight, bias, residual, residual_moments, residual_weight, residual_bias)
    blending = unpacked(weights, probabilities, temperature, keys, alive, 1, False)
    normalising = _normalising(*norms, batch_statistics)
    to_y, to_residual, results = batch_norm.backward(delta, y, normalising, blending, need_logits)
    return to_y, y.new_empty(0) if to_residual is None else to_residual, results


def _keep_normalised(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.keys, ctx.alive, _, ctx.batch_statistics = inputs
    ctx.save_for_backward(*tensors[:8], *tensors[9:])
    ctx.mark_non_differentiable(output[1])


def _differentiate_normalised(ctx: Any, delta: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    saved, needed = ctx.saved_tensors, ctx.needs_input_grad[:9]
    found = _normalised_backward_operator(delta, *saved, ctx.keys, ctx.alive, ctx.batch_statistics, needed[8])
    return *_by_input(saved, needed, *found), *(None,) * 7


_normalised_operator.register_autograd(_differentiate_normalised, setup_context=_keep_normalised)


def _normalising(
    moments: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *rest: Any
) -> Normalising:
    *residual_norm, batch_statistics = rest
    other = None if residual_norm[0] is None else Norm(*residual_norm)
    return Normalising(Norm(moments, weight, bias), residual, other, batch_statistics)


def _by_input(
    saved: Sequence[Tensor], needed: Sequence[bool], to_y: Tensor, to_residual: Tensor | None, results: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients w.r.t. the nine inputs y to logits of `_normalised_operator`; None if not needed."""
    channels, has_residual_norm = saved[0].shape[1], saved[5] is not None
    to_bias, to_weight, *others = batch_norm.split_results(results, channels, has_residual_norm)
    # Both biases share one tensor, which torch copies for the second parameter.
    found = (to_y, None, to_weight, to_bias, to_residual, None, others[0], to_bias, others[-1])
    return tuple(gradient if need else None for gradient, need in zip(found, needed, strict=True))
