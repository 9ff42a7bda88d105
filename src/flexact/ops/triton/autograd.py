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
from flexact.ops import operators, stacked_form
from flexact.ops.blending import Blending, packed, unpacked
from flexact.ops.closed_form_blends import ClosedFormBlends
from flexact.ops.dispatch import CannotBuild
from flexact.ops.fallback import run
from flexact.ops.higher_order import Blends
from flexact.ops.triton import routed as routed_kernels
from flexact.ops.triton.blends import TritonBlends
from flexact.ops.triton.routed import Norm, Preactivation

__all__ = ["Norm", "Preactivation", "normalised", "routed"]


def normalised(y: Tensor, logits: Tensor, preactivation: Preactivation, blending: Blending) -> tuple[Tensor, Tensor]:
    """Return the routed activation of norm(y) + residual and its statistics."""
    norm, residual, residual_norm, batch_statistics = preactivation
    x: Tensor
    gathered: Tensor
    if operators.is_traced(y):
        norms = (*norm, residual, *(residual_norm or (None, None, None)), batch_statistics)
        x, gathered = _normalised_operator(y, logits, *norms, *packed(blending))
    else:
        _, weight, bias = norm
        _, *others = residual_norm or (None, None, None)
        # The last two arguments hold tensors that need no gradient, or that precede them.
        x, gathered = _Normalised.apply(y, logits, weight, bias, residual, *others, preactivation, blending)  # type: ignore[no-untyped-call]
    return x, gathered


def _routed_forward(h: Tensor, blending: Blending, _: list[Tensor] | None) -> tuple[Tensor, Tensor]:
    return run(routed_kernels.forward, stacked_form.forward, h, blending)


def _routed_backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, _: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    def fused(delta: Tensor) -> tuple[Tensor, Tensor]:
        gradient, _, to_logits = routed_kernels.backward(delta, h, blending, need_logits)
        return gradient, to_logits

    return run(fused, lambda delta: stacked_form.backward(delta, h, blending, need_logits), delta)


def _blends(h: Tensor, blending: Blending) -> Blends:
    return TritonBlends(h, blending) if h.numel() else ClosedFormBlends(h, blending)


_KERNELS = operators.Implementation(_routed_forward, _routed_backward, _blends)
routed = operators.RoutedActivation("routed_activation_triton", triton_op, lambda h, blending, keeps: _KERNELS)


def _normalised_forward(
    y: Tensor,
    logits: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_moments: Tensor | None,
    residual_weight: Tensor | None,
    residual_bias: Tensor | None,
    batch_statistics: bool,
    weights: Tensor | None,
    probabilities: Tensor,
    temperature: Tensor,
    keys: str,
    alive: Sequence[int],
    channel_dim: int,
    statistics: bool,
) -> tuple[Tensor, Tensor]:
    norms = (moments, weight, bias, residual, residual_moments, residual_weight, residual_bias)
    blending = unpacked(weights, probabilities, temperature, keys, alive, channel_dim, statistics)
    return routed_kernels.forward(y, blending, _preactivation(*norms, batch_statistics))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the inputs of `_normalised_forward` for the backward."""
    y, _, *norms, batch_statistics, weights, probabilities, temperature, keys, alive, channel_dim, statistics = inputs
    blending = unpacked(weights, probabilities, temperature, keys, alive, channel_dim, statistics)
    _save(ctx, y, _preactivation(*norms, batch_statistics), blending, output[1])


def _save(ctx: Any, y: Tensor, preactivation: Preactivation, blending: Blending, gathered: Tensor) -> None:
    norm, residual, residual_norm, ctx.batch_statistics = preactivation
    weights, probabilities, temperature, ctx.keys, ctx.alive, _, _ = blending
    norms = (*norm, residual, *(residual_norm or (None, None, None)))
    ctx.save_for_backward(y, weights, probabilities, temperature, *norms)
    ctx.set_materialize_grads(False)  # the statistics have no gradient
    ctx.mark_non_differentiable(gathered)


def _gradients(ctx: Any, delta: Tensor | None, need_logits: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients with respect to y, the logits, the weight and the bias of its norm, the residual, and the
    weight and the bias of the residual's norm."""
    if delta is None:
        return (None,) * 7
    if torch.is_grad_enabled():  # the backward runs with create_graph=True
        raise no_second_derivative()
    y, weights, probabilities, temperature, *norms = ctx.saved_tensors
    blending = Blending(weights, probabilities, temperature, ctx.keys, ctx.alive, 1, False)
    preactivation = _preactivation(*norms, ctx.batch_statistics)
    try:
        to_y, to_residual, results = routed_kernels.backward(delta, y, blending, need_logits, preactivation)
    except CannotBuild as error:
        raise FlexActError(
            "the backward of a site that is fused with its batch norm cannot be compiled, although its forward "
            f"was: {error}. Run again with FLEXACT_KERNELS=closed_form, or convert without fuse=True."
        ) from error
    has_residual_norm = preactivation.residual_norm is not None
    to_bias, to_weight, *others = routed_kernels.split_results(results, y.shape[1], has_residual_norm)
    # Both biases share one tensor, which torch copies for the second parameter.
    return to_y, others[-1], to_weight, to_bias, to_residual, others[0] if has_residual_norm else None, to_bias


def no_second_derivative() -> FlexActError:
    """Return the error for a backward of a fused site with create_graph=True."""
    return FlexActError(
        "create_graph=True was given, but a site that is fused with its batch norm has no second derivative. "
        "Convert without fuse=True."
    )


def _operator_gradients(ctx: Any, delta: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients with respect to the inputs of `_normalised_forward`; None if not needed."""
    needed = ctx.needs_input_grad
    to_y, to_logits, to_weight, to_bias, to_residual, *others = _gradients(ctx, delta, needed[1])
    found = (to_y, to_logits, None, to_weight, to_bias, to_residual, None, *others, *(None,) * 8)
    return tuple([gradient if need else None for gradient, need in zip(found, needed, strict=True)])


def _preactivation(
    moments: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *rest: Any
) -> Preactivation:
    *residual_norm, batch_statistics = rest
    other = None if residual_norm[0] is None else Norm(*residual_norm)
    return Preactivation(Norm(moments, weight, bias), residual, other, batch_statistics)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        preactivation, blending = rest[-2:]
        x, gathered = routed_kernels.forward(y, blending, preactivation)
        _save(ctx, y, preactivation, blending, gathered)
        return x, gathered

    @staticmethod
    def backward(ctx: Any, delta: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        found = _gradients(ctx, delta, needed[1])
        return *[gradient if need else None for gradient, need in zip(found, needed, strict=False)], None, None


_normalised_operator = triton_op("flexact::normalised_activation", mutates_args=())(_normalised_forward)
_normalised_operator.register_autograd(_operator_gradients, setup_context=_keep)
