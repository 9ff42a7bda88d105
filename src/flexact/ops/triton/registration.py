"""The Triton kernels as torch.library operators, which torch.compile can trace into. `triton_ops` selects them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.library import triton_op

from flexact.ops.triton import fallback
from flexact.ops.triton.batch_norm import Norm, split_results
from flexact.ops.triton.fallback import Blending, Normalising

_SEPARATOR = "\n"  # joins the keys, because a custom operator takes no list of strings


def routed(h: Tensor, logits: Tensor, blending: Blending, channel_dim: int) -> tuple[Tensor, Tensor]:
    """Return the routed activation and its statistics. See `triton_ops.routed`."""
    *routing, keys, alive, statistics = blending
    x, gathered = routed_activation(h, logits, *routing, _SEPARATOR.join(keys), list(alive), channel_dim, statistics)
    return x, gathered


def normalised(y: Tensor, logits: Tensor, normalising: Normalising, blending: Blending) -> tuple[Tensor, Tensor]:
    """Return the routed activation of norm(y) + residual and its statistics. See `triton_ops.normalised`."""
    own, residual, other, batch_statistics = normalising
    *routing, keys, alive, statistics = blending
    x, gathered = normalised_activation(
        y,
        *own,
        residual,
        *(other or (None,) * 3),
        logits,
        *routing,
        _SEPARATOR.join(keys),
        list(alive),
        statistics,
        batch_statistics,
    )
    return x, gathered


@triton_op("flexact::batch_moments", mutates_args={"running_mean", "running_var", "batches"})
def batch_moments(
    y: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """Return the moments of each channel. See `triton_ops.moments`."""
    if running_mean is None or running_var is None or batches is None:
        return fallback.moments(y, None, momentum, eps)
    return fallback.moments(y, (running_mean, running_var, batches), momentum, eps)


@triton_op("flexact::routed_activation_triton", mutates_args={})
def routed_activation(
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
    """Return the routed activation and its statistics."""
    blending = _blending(weights, probabilities, temperature, keys, alive, statistics)
    return fallback.routed_forward(h, blending, channel_dim)


@triton_op("flexact::routed_activation_triton_backward", mutates_args={})
def routed_activation_backward(
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
    """Return the gradients of the routed activation to h and to the logits."""
    blending = _blending(weights, probabilities, temperature, keys, alive)
    return fallback.routed_backward(delta, h, blending, channel_dim, need_logits)


@triton_op("flexact::normalised_activation", mutates_args={})
def normalised_activation(
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
    """Return the routed activation of norm(y) + residual and its statistics."""
    norms = (moments, weight, bias), (residual_moments, residual_weight, residual_bias)
    normalising = _normalising(*norms, residual, batch_statistics)
    blending = _blending(weights, probabilities, temperature, keys, alive, statistics)
    return fallback.normalised_forward(y, normalising, blending)


@triton_op("flexact::normalised_activation_backward", mutates_args={})
def normalised_activation_backward(
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
    """Return the gradients as `batch_norm.backward` does, with an empty tensor if there is no residual."""
    norms = (moments, weight, bias), (residual_moments, residual_weight, residual_bias)
    normalising = _normalising(*norms, residual, batch_statistics)
    blending = _blending(weights, probabilities, temperature, keys, alive)
    to_y, to_residual, results = fallback.normalised_backward(delta, y, normalising, blending, need_logits)
    return to_y, y.new_empty(0) if to_residual is None else to_residual, results


def _blending(
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: str,
    alive: Sequence[int],
    statistics: bool = False,
) -> Blending:
    return Blending(weights, probabilities, temperature, tuple(keys.split(_SEPARATOR)), tuple(alive), statistics)


def _normalising(
    own: tuple[Any, ...], other: tuple[Any, ...], residual: Tensor | None, batch_statistics: bool
) -> Normalising:
    return Normalising(Norm(*own), residual, None if other[0] is None else Norm(*other), batch_statistics)


def _keep_routed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    h, _, *routing, ctx.keys, ctx.alive, ctx.channel_dim, _ = inputs
    ctx.save_for_backward(h, *routing)
    ctx.mark_non_differentiable(output[1])


def _differentiate_routed(ctx: Any, delta: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    need_h, need_logits = ctx.needs_input_grad[:2]
    gradient, to_logits = routed_activation_backward(
        delta, *ctx.saved_tensors, ctx.keys, ctx.alive, ctx.channel_dim, need_logits
    )
    return (gradient if need_h else None, to_logits if need_logits else None, *(None,) * 7)


_ARGUMENTS = (
    *("y", "moments", "weight", "bias"),
    *("residual", "residual_moments", "residual_weight", "residual_bias", "logits"),
)
"""The first arguments of `normalised_activation`; the other seven need no gradient."""


def _keep_normalised(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.keys, ctx.alive, _, ctx.batch_statistics = inputs
    logits = _ARGUMENTS.index("logits")
    ctx.save_for_backward(*tensors[:logits], *tensors[logits + 1 :])
    ctx.mark_non_differentiable(output[1])


def _differentiate_normalised(ctx: Any, delta: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = dict(zip(_ARGUMENTS, ctx.needs_input_grad[: len(_ARGUMENTS)], strict=True))
    _, moments, _, _, _, residual_moments, *_ = ctx.saved_tensors
    to_y, to_residual, results = normalised_activation_backward(
        delta, *ctx.saved_tensors, ctx.keys, ctx.alive, ctx.batch_statistics, needed["logits"]
    )
    to_bias, to_weight, *rest = split_results(results, moments.shape[1], residual_moments is not None)
    found = {"y": to_y, "weight": to_weight, "bias": to_bias, "residual": to_residual, "logits": rest[-1]}
    found |= {"residual_weight": rest[0], "residual_bias": to_bias}
    return (*(found[name] if need else None for name, need in needed.items()), *(None,) * 7)


routed_activation.register_autograd(_differentiate_routed, setup_context=_keep_routed)
normalised_activation.register_autograd(_differentiate_normalised, setup_context=_keep_normalised)
