"""The Triton kernels with a fallback: if one cannot be compiled on this machine, plain torch runs instead."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from triton.errors import TritonError

from flexact.ops import closed_form, dispatch
from flexact.ops.triton import batch_norm, batch_norm_plain
from flexact.ops.triton import moments as batch_moments
from flexact.ops.triton import routed as triton
from flexact.ops.triton.basis import Blend, blend
from flexact.ops.triton.batch_norm import Norm
from flexact.ops.triton.launch import CannotBuild
from flexact.ops.triton.moments import Running

_CANNOT_BUILD = (CannotBuild, TritonError, OSError, ImportError, subprocess.CalledProcessError)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Gradients = tuple[Tensor, Tensor | None, Tensor]
"""Gradients to y, to the residual, and all others in one flat tensor. See `batch_norm.backward`."""


class Blending(NamedTuple):
    """The inputs of a routed activation besides h and the logits. See `flexact.ops.routed_activation`."""

    weights: Tensor
    probabilities: Tensor
    temperature: Tensor
    keys: tuple[str, ...]
    alive: tuple[int, ...]
    statistics: bool

    @property
    def blend(self) -> Blend:
        """The alive candidates in the form that the kernels take."""
        return blend(self.keys, self.alive)


class Normalising(NamedTuple):
    """How a fused site computes h = norm(y) + residual in one forward."""

    norm: Norm
    residual: Tensor | None
    residual_norm: Norm | None
    """The batch norm of the residual, if it has one."""
    batch_statistics: bool
    """Whether the moments are those of the batch, so that the gradient goes through them."""


def run(kernel: Callable[..., Result], fallback: Callable[..., Result], tensor: Tensor, *rest: Any) -> Result:
    """Run a kernel on the device of its first argument.

    If it cannot be compiled, warn, call the fallback, and disable Triton for the rest of the process.
    """
    try:
        if tensor.is_cuda and _several_gpus() and tensor.device.index != torch.cuda.current_device():
            with torch.cuda.device(tensor.device):
                return kernel(tensor, *rest)
        return kernel(tensor, *rest)
    except _CANNOT_BUILD as error:
        dispatch.give_up_triton(error)
        return fallback(tensor, *rest)


@functools.cache
def _several_gpus() -> bool:
    return torch.cuda.device_count() > 1


def with_fallback(
    fallback: Callable[Arguments, Result],
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator that calls a kernel through `run` with this fallback."""
    return lambda kernel: cast(Callable[Arguments, Result], functools.partial(run, kernel, fallback))


def moments(y: Tensor, running: Running | None, momentum: float | None, eps: float) -> Tensor:
    """Return the mean and 1/√(variance + ε) of each channel, (2, channels). Update the running statistics in place."""
    return run(batch_moments.moments, batch_norm_plain.moments, y, running, momentum, eps)


def _plain_routed_forward(h: Tensor, blending: Blending, channel_dim: int) -> tuple[Tensor, Tensor]:
    weights, _, _, keys, alive, statistics = blending
    return closed_form.forward(h, weights, keys, alive, channel_dim, statistics)


@with_fallback(_plain_routed_forward)
def routed_forward(h: Tensor, blending: Blending, channel_dim: int) -> tuple[Tensor, Tensor]:
    """Return the routed activation x of h and its statistics."""
    return triton.forward(h, blending.weights, blending.blend, channel_dim, blending.statistics)


def _plain_routed_backward(
    delta: Tensor, h: Tensor, blending: Blending, channel_dim: int, need_logits: bool
) -> tuple[Tensor, Tensor]:
    return closed_form.backward(delta, h, *blending[:5], channel_dim, need_logits)


@with_fallback(_plain_routed_backward)
def routed_backward(
    delta: Tensor, h: Tensor, blending: Blending, channel_dim: int, need_logits: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients to h and to the logits."""
    return triton.backward(delta, h, *blending[:3], blending.blend, channel_dim, need_logits)


def _plain_normalised_forward(y: Tensor, normalising: Normalising, blending: Blending) -> tuple[Tensor, Tensor]:
    return _plain_routed_forward(batch_norm_plain.pre_activation(y, *normalising[:3]), blending, 1)


@with_fallback(_plain_normalised_forward)
def normalised_forward(y: Tensor, normalising: Normalising, blending: Blending) -> tuple[Tensor, Tensor]:
    """Return the routed activation x of norm(y) + residual and its statistics."""
    return batch_norm.forward(y, *normalising[:3], blending.weights, blending.blend, blending.statistics)


def _plain_normalised_backward(
    delta: Tensor, y: Tensor, normalising: Normalising, blending: Blending, need_logits: bool
) -> Gradients:
    h = batch_norm_plain.pre_activation(y, *normalising[:3])
    to_h, to_logits = _plain_routed_backward(delta, h, blending, 1, need_logits)
    to_y, to_residual, sums = batch_norm_plain.backward(to_h, y, *normalising)
    return to_y, to_residual, torch.cat([*sums, to_logits])


@with_fallback(_plain_normalised_backward)
def normalised_backward(
    delta: Tensor, y: Tensor, normalising: Normalising, blending: Blending, need_logits: bool
) -> Gradients:
    """Return the gradients of a fused site."""
    routing, batch_statistics = blending[:3], normalising.batch_statistics
    return batch_norm.backward(delta, y, *normalising[:3], *routing, blending.blend, batch_statistics, need_logits)
