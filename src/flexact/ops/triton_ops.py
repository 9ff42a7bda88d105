"""Triton's kernels as torch operators: differentiable, and open to torch.compile.

Where a kernel cannot be built on the machine at hand, the closed form takes its place for the rest of the run.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import triton_op
from triton.errors import TritonError

from flexact.ops import batch_norm, closed_form, kernels, triton
from flexact.ops.basis import blend
from flexact.ops.batch_norm import Norm

SEPARATOR = "\n"  # an operator takes one string, not several
CANNOT_BUILD = (TritonError, OSError, ImportError, subprocess.CalledProcessError)

Result = TypeVar("Result")


def _run(device: torch.device, kernel: Callable[[], Result], otherwise: Callable[[], Result]) -> Result:
    """Run a kernel on its tensors' device, or what stands in for it where it cannot be built."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        try:
            return kernel()
        except CANNOT_BUILD as error:
            kernels.give_up_triton(error)
            return otherwise()


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
    statistics: int,
) -> tuple[Tensor, Tensor]:
    """See `flexact.ops.routed_activation`."""
    names = keys.split(SEPARATOR)
    return _run(
        h.device,
        lambda: triton.forward(h, weights, blend(tuple(names), tuple(alive)), channel_dim, statistics),
        lambda: closed_form.forward(h, weights, names, alive, channel_dim, statistics),
    )


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
    names, routing = keys.split(SEPARATOR), (weights, probabilities, temperature)
    return _run(
        h.device,
        lambda: triton.backward(delta, h, *routing, blend(tuple(names), tuple(alive)), channel_dim, need_logits),
        lambda: closed_form.backward(delta, h, *routing, names, alive, channel_dim, need_logits),
    )


@triton_op("flexact::batch_moments", mutates_args={"running_mean", "running_var"})
def batch_moments(
    y: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """The mean and 1/√(variance + ε) of each channel of y; moves the running statistics on by one step."""
    return _run(
        y.device,
        lambda: batch_norm.moments(y, running_mean, running_var, momentum, eps),
        lambda: _plain_moments(y, running_mean, running_var, momentum, eps),
    )


@triton_op("flexact::normalised_activation", mutates_args={})
def normalised_activation(
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
    """The routed activation of norm(y) + residual; mean and rstd are taken for functions of y where they are of it."""
    names = keys.split(SEPARATOR)
    norm = Norm(mean, rstd, weight, bias)
    residual_norm = _norm(residual_mean, residual_rstd, residual_weight, residual_bias)

    def plain() -> tuple[Tensor, Tensor]:
        h = _pre_activation(y, norm, residual, residual_norm)
        return closed_form.forward(h, weights, names, alive, 1, statistics)

    parts = blend(tuple(names), tuple(alive))
    return _run(
        y.device,
        lambda: batch_norm.forward(y, norm, residual, residual_norm, weights, parts, statistics),
        plain,
    )


@triton_op("flexact::normalised_activation_backward", mutates_args={})
def normalised_activation_backward(
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
    """Gradients to y, to the residual (empty without one), the norms' parameters (3, channels), and the logits."""
    names, routing = keys.split(SEPARATOR), (weights, probabilities, temperature)
    norm = Norm(mean, rstd, weight, bias)
    residual_norm = _norm(residual_mean, residual_rstd, residual_weight, residual_bias)
    parts = blend(tuple(names), tuple(alive))

    def plain() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h = _pre_activation(y, norm, residual, residual_norm)
        to_h, to_logits = closed_form.backward(delta, h, *routing, names, alive, 1, need_logits)
        to_y, to_weight, to_bias = _plain_norm_backward(to_h, y, norm, batch_statistics)
        to_residual, to_residual_weight = to_h if residual is not None else y.new_empty(0), torch.zeros_like(to_weight)
        if residual is not None and residual_norm is not None:
            to_residual, to_residual_weight, _ = _plain_norm_backward(to_h, residual, residual_norm, batch_statistics)
        return to_y, to_residual, torch.stack([to_bias, to_weight, to_residual_weight]), to_logits

    return _run(
        y.device,
        lambda: batch_norm.backward(
            delta, y, norm, residual, residual_norm, *routing, parts, batch_statistics, need_logits
        ),
        plain,
    )


def _norm(mean: Tensor | None, rstd: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Norm | None:
    return None if mean is None or rstd is None else Norm(mean, rstd, weight, bias)


def _setup_routed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    h, _, weights, probabilities, temperature, ctx.keys, ctx.alive, ctx.channel_dim, _ = inputs
    ctx.save_for_backward(h, weights, probabilities, temperature)
    ctx.mark_non_differentiable(output[1])


def _routed_backward(ctx: Any, delta: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    need_h, need_logits = ctx.needs_input_grad[:2]
    gradient, to_logits = routed_activation_backward(
        delta, *ctx.saved_tensors, ctx.keys, ctx.alive, ctx.channel_dim, need_logits
    )
    return (gradient if need_h else None, to_logits if need_logits else None, *(None,) * 7)


routed_activation.register_autograd(_routed_backward, setup_context=_setup_routed)


def _setup_normalised(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.keys, ctx.alive, _, ctx.batch_statistics = inputs
    del tensors[10]  # the logits only receive a gradient
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(output[1])


def _normalised_backward(ctx: Any, delta: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad
    to_y, to_residual, parameters, to_logits = normalised_activation_backward(
        delta, *ctx.saved_tensors, ctx.keys, ctx.alive, ctx.batch_statistics, need[10]
    )
    to_bias, to_weight, to_residual_weight = parameters
    gradients = {0: to_y, 1: to_weight, 2: to_bias, 5: to_residual, 6: to_residual_weight, 7: to_bias, 10: to_logits}
    return tuple(gradients[i] if i in gradients and need[i] else None for i in range(18))


normalised_activation.register_autograd(_normalised_backward, setup_context=_setup_normalised)


def _plain_moments(
    y: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(y.float(), dim=(0, 2, 3), unbiased=False)
    if running_mean is not None and running_var is not None:
        elements = y.numel() // y.shape[1]
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * elements / (elements - 1)).to(running_var.dtype), momentum)
    return mean, (variance + eps).rsqrt()


def _plain_norm(y: Tensor, norm: Norm) -> Tensor:
    """What batch norm gives with these moments, in float32."""
    variance = norm.rstd.float().pow(-2)
    weight, bias = (None if one is None else one.float() for one in (norm.weight, norm.bias))
    return F.batch_norm(y.float(), norm.mean.float(), variance, weight, bias, False, 0.0, 0.0)


def _pre_activation(y: Tensor, norm: Norm, residual: Tensor | None, residual_norm: Norm | None) -> Tensor:
    h = _plain_norm(y, norm)
    if residual is not None:
        h = h + (residual if residual_norm is None else _plain_norm(residual, residual_norm))
    return h.to(y.dtype)


def _plain_norm_backward(to_h: Tensor, y: Tensor, norm: Norm, batch_statistics: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to y, weight and bias."""
    shape = (1, -1, 1, 1)
    gradient = to_h.float()
    normal = (y.float() - norm.mean.view(shape)) * norm.rstd.view(shape)
    to_bias, to_weight = gradient.sum((0, 2, 3)), (gradient * normal).sum((0, 2, 3))
    if batch_statistics:
        elements = y.numel() // y.shape[1]
        gradient = gradient - (to_bias.view(shape) + normal * to_weight.view(shape)) / elements
    scale = norm.rstd if norm.weight is None else norm.rstd * norm.weight.float()
    return (gradient * scale.view(shape)).to(y.dtype), to_weight, to_bias
