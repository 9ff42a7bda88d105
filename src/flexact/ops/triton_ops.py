"""Triton's kernels, differentiable: `routed` and `normalised`.

To torch.compile they are operators that it can look into. Outside of it they are autograd functions, which take the
host a fraction of an operator's time. Where a kernel cannot be built on the machine at hand, plain torch takes its
place for the rest of the run.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.library import triton_op
from triton.errors import TritonError

from flexact.ops import batch_norm, batch_norm_plain, closed_form, kernels, triton
from flexact.ops.basis import blend
from flexact.ops.batch_norm import Norm
from flexact.ops.launching import is_traced

_CANNOT_BUILD = (TritonError, OSError, ImportError, subprocess.CalledProcessError)
_SEPARATOR = "\n"  # an operator takes one string, not several

Names = tuple[str, ...]
Alive = tuple[int, ...]
Result = TypeVar("Result")


def routed(
    h: Tensor,
    logits: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: Names,
    alive: Alive,
    channel_dim: int,
    statistics: int,
) -> tuple[Tensor, Tensor]:
    """See `flexact.ops.routed_activation`."""
    tensors = (h, logits, weights, probabilities, temperature)
    if is_traced(h):
        x, gathered = _routed_operator(*tensors, _SEPARATOR.join(keys), list(alive), channel_dim, statistics)
    else:
        x, gathered = _Routed.apply(*tensors, keys, alive, channel_dim, statistics)  # type: ignore[no-untyped-call]
    return x, gathered


def normalised(
    y: Tensor,
    norm: Norm,
    residual: Tensor | None,
    residual_norm: Norm | None,
    logits: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: Names,
    alive: Alive,
    statistics: int,
    batch_statistics: bool,
) -> tuple[Tensor, Tensor]:
    """The routed activation of norm(y) + residual, and its statistics.

    residual_norm: the batch norm that the residual goes through first.
    batch_statistics: whether the moments in the norms are those of their inputs, and the gradient goes through them.
    """
    own = (norm.weight, norm.bias, norm.mean, norm.rstd)
    other: tuple[Tensor | None, ...] = (None,) * 4
    if residual_norm is not None:
        other = (residual_norm.weight, residual_norm.bias, residual_norm.mean, residual_norm.rstd)
    tensors = (y, *own, residual, *other, logits, weights, probabilities, temperature)
    if is_traced(y):
        names = _SEPARATOR.join(keys)
        x, gathered = _normalised_operator(*tensors, names, list(alive), statistics, batch_statistics)
    else:
        x, gathered = _Normalised.apply(*tensors, keys, alive, statistics, batch_statistics)  # type: ignore[no-untyped-call]
    return x, gathered


@triton_op("flexact::batch_moments", mutates_args={"running_mean", "running_var"})
def batch_moments(
    y: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float
) -> Tensor:
    """The mean and 1/√(variance + ε) of each channel of y, (2, channels); the running statistics go on by one step."""
    return moments(y, running_mean, running_var, momentum, eps)


def moments(y: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float) -> Tensor:
    """`batch_moments` without the operator around it."""
    arguments = (y, running_mean, running_var, momentum, eps)
    return _run(y, lambda: batch_norm.moments(*arguments), lambda: batch_norm_plain.moments(*arguments))


def _run(tensor: Tensor, kernel: Callable[[], Result], otherwise: Callable[[], Result]) -> Result:
    """Run a kernel on its tensors' device, or what stands in for it where it cannot be built."""
    elsewhere = tensor.is_cuda and tensor.device.index != torch.cuda.current_device()
    with torch.cuda.device(tensor.device) if elsewhere else contextlib.nullcontext():
        try:
            return kernel()
        except _CANNOT_BUILD as error:
            kernels.give_up_triton(error)
            return otherwise()


# The routed activation


def _routed_forward(
    h: Tensor, weights: Tensor, keys: Names, alive: Alive, channel_dim: int, statistics: int
) -> tuple[Tensor, Tensor]:
    return _run(
        h,
        lambda: triton.forward(h, weights, blend(keys, alive), channel_dim, statistics),
        lambda: closed_form.forward(h, weights, keys, alive, channel_dim, statistics),
    )


def _routed_backward(
    delta: Tensor,
    h: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: Names,
    alive: Alive,
    channel_dim: int,
    need_logits: bool,
) -> tuple[Tensor, Tensor]:
    tensors = (delta, h, weights, probabilities, temperature)
    return _run(
        h,
        lambda: triton.backward(*tensors, blend(keys, alive), channel_dim, need_logits),
        lambda: closed_form.backward(*tensors, keys, alive, channel_dim, need_logits),
    )


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        weights, probabilities, temperature, ctx.keys, ctx.alive, ctx.channel_dim, statistics = rest
        x, gathered = _routed_forward(h, weights, ctx.keys, ctx.alive, ctx.channel_dim, statistics)
        ctx.save_for_backward(h, weights, probabilities, temperature)
        ctx.mark_non_differentiable(gathered)
        return x, gathered

    @staticmethod
    def backward(ctx: Any, delta: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        need_h, need_logits = ctx.needs_input_grad[:2]
        h, weights, probabilities, temperature = ctx.saved_tensors
        gradient, to_logits = _routed_backward(
            delta, h, weights, probabilities, temperature, ctx.keys, ctx.alive, ctx.channel_dim, need_logits
        )
        return (gradient if need_h else None, to_logits if need_logits else None, *(None,) * 7)


@triton_op("flexact::routed_activation_triton", mutates_args={})
def _routed_operator(
    h: Tensor,
    logits: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: str,
    alive: Sequence[int],
    channel_dim: int,
    statistics: int,
) -> tuple[Tensor, Tensor]:
    return _routed_forward(h, weights, tuple(keys.split(_SEPARATOR)), tuple(alive), channel_dim, statistics)


@triton_op("flexact::routed_activation_triton_backward", mutates_args={})
def _routed_backward_operator(
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
    tensors = (delta, h, weights, probabilities, temperature)
    return _routed_backward(*tensors, tuple(keys.split(_SEPARATOR)), tuple(alive), channel_dim, need_logits)


def _set_up_routed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    h, _, weights, probabilities, temperature, ctx.keys, ctx.alive, ctx.channel_dim, _ = inputs
    ctx.save_for_backward(h, weights, probabilities, temperature)
    ctx.mark_non_differentiable(output[1])


def _differentiate_routed(ctx: Any, delta: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    need_h, need_logits = ctx.needs_input_grad[:2]
    gradient, to_logits = _routed_backward_operator(
        delta, *ctx.saved_tensors, ctx.keys, ctx.alive, ctx.channel_dim, need_logits
    )
    return (gradient if need_h else None, to_logits if need_logits else None, *(None,) * 7)


_routed_operator.register_autograd(_differentiate_routed, setup_context=_set_up_routed)


# The same with batch norm and residual. Arguments 0 to 13 are tensors:
# y, weight, bias, mean, rstd, residual, its weight, bias, mean, rstd, logits, weights, probabilities, temperature.

_LOGITS = 10
_COUNT = 18


def _norms(
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual_weight: Tensor | None,
    residual_bias: Tensor | None,
    residual_mean: Tensor | None,
    residual_rstd: Tensor | None,
) -> tuple[Norm, Norm | None]:
    own = Norm(mean, rstd, weight, bias)
    if residual_mean is None or residual_rstd is None:
        return own, None
    return own, Norm(residual_mean, residual_rstd, residual_weight, residual_bias)


def _normalised_forward(
    y: Tensor,
    norms: tuple[Norm, Norm | None],
    residual: Tensor | None,
    weights: Tensor,
    keys: Names,
    alive: Alive,
    statistics: int,
) -> tuple[Tensor, Tensor]:
    own, other = norms

    def plain() -> tuple[Tensor, Tensor]:
        h = batch_norm_plain.pre_activation(y, own, residual, other)
        return closed_form.forward(h, weights, keys, alive, 1, statistics)

    return _run(y, lambda: batch_norm.forward(y, own, residual, other, weights, blend(keys, alive), statistics), plain)


def _normalised_backward(
    delta: Tensor,
    saved: tuple[Any, ...],
    keys: Names,
    alive: Alive,
    batch_statistics: bool,
    need_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, weight, bias, mean, rstd, residual, *other_norm, weights, probabilities, temperature = saved
    own, other = _norms(weight, bias, mean, rstd, *other_norm)
    routing = (weights, probabilities, temperature)

    def plain() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h = batch_norm_plain.pre_activation(y, own, residual, other)
        to_h, to_logits = closed_form.backward(delta, h, *routing, keys, alive, 1, need_logits)
        return *batch_norm_plain.backward(to_h, y, own, residual, other, batch_statistics), to_logits

    return _run(
        y,
        lambda: batch_norm.backward(
            delta, y, own, residual, other, *routing, blend(keys, alive), batch_statistics, need_logits
        ),
        plain,
    )


def _by_argument(gradients: tuple[Tensor, Tensor, Tensor, Tensor], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Gradients to y, residual, parameters and logits, at the places of the arguments that need one."""
    to_y, to_residual, parameters, to_logits = gradients
    to_bias, to_weight = parameters[0], parameters[1]
    placed = {0: to_y, 1: to_weight, 2: to_bias, 5: to_residual, 6: parameters[-1], 7: to_bias, _LOGITS: to_logits}
    return tuple(placed[i] if i in placed and needed[i] else None for i in range(_COUNT))


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.keys, ctx.alive, statistics, ctx.batch_statistics = inputs
        y, weight, bias, mean, rstd, residual, *other_norm, _, weights, _, _ = tensors
        norms = _norms(weight, bias, mean, rstd, *other_norm)
        x, gathered = _normalised_forward(y, norms, residual, weights, ctx.keys, ctx.alive, statistics)
        ctx.save_for_backward(*tensors[:_LOGITS], *tensors[_LOGITS + 1 :])
        ctx.mark_non_differentiable(gathered)
        return x, gathered

    @staticmethod
    def backward(ctx: Any, delta: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        need_logits = ctx.needs_input_grad[_LOGITS]
        found = _normalised_backward(delta, ctx.saved_tensors, ctx.keys, ctx.alive, ctx.batch_statistics, need_logits)
        return _by_argument(found, ctx.needs_input_grad)


@triton_op("flexact::normalised_activation", mutates_args={})
def _normalised_operator(
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    residual_weight: Tensor | None,
    residual_bias: Tensor | None,
    residual_mean: Tensor | None,
    residual_rstd: Tensor | None,
    logits: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: str,
    alive: Sequence[int],
    statistics: int,
    batch_statistics: bool,
) -> tuple[Tensor, Tensor]:
    norms = _norms(weight, bias, mean, rstd, residual_weight, residual_bias, residual_mean, residual_rstd)
    return _normalised_forward(y, norms, residual, weights, tuple(keys.split(_SEPARATOR)), tuple(alive), statistics)


@triton_op("flexact::normalised_activation_backward", mutates_args={})
def _normalised_backward_operator(
    delta: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    residual_weight: Tensor | None,
    residual_bias: Tensor | None,
    residual_mean: Tensor | None,
    residual_rstd: Tensor | None,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: str,
    alive: Sequence[int],
    batch_statistics: bool,
    need_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = (y, weight, bias, mean, rstd)
    other = (residual, residual_weight, residual_bias, residual_mean, residual_rstd)
    saved = (*own, *other, weights, probabilities, temperature)
    names = tuple(keys.split(_SEPARATOR))
    return _normalised_backward(delta, saved, names, tuple(alive), batch_statistics, need_logits)


def _set_up_normalised(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.keys, ctx.alive, _, ctx.batch_statistics = inputs
    ctx.save_for_backward(*tensors[:_LOGITS], *tensors[_LOGITS + 1 :])
    ctx.mark_non_differentiable(output[1])


def _differentiate_normalised(ctx: Any, delta: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    need_logits = ctx.needs_input_grad[_LOGITS]
    found = _normalised_backward_operator(
        delta, *ctx.saved_tensors, ctx.keys, ctx.alive, ctx.batch_statistics, need_logits
    )
    return _by_argument(found, ctx.needs_input_grad)


_normalised_operator.register_autograd(_differentiate_normalised, setup_context=_set_up_normalised)
