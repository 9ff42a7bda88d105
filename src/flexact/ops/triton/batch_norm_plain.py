"""Plain-torch fallback of `batch_norm` and `moments`, used if a kernel cannot be compiled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flexact.ops import closed_form
from flexact.ops.blending import Blending
from flexact.ops.triton.batch_norm import Norm, Normalising
from flexact.ops.triton.moments import Running


def moments(y: Tensor, running: Running | None, momentum: float | None, eps: float) -> Tensor:
    """Return the mean and 1/√(variance + ε) of each channel, (2, channels). Update the running statistics in place."""
    running_mean, running_var, batches = running or (None, None, None)
    if batches is not None:
        batches.add_(1)
        momentum = 1 / float(batches) if momentum is None else momentum
    running_stats = (running_mean, running_var, True, momentum or 0.0, eps)
    _, mean, rstd = torch.native_batch_norm(y.detach(), None, None, *running_stats)
    return torch.stack([mean, rstd]).float()


def forward(y: Tensor, normalising: Normalising, blending: Blending) -> tuple[Tensor, Tensor]:
    """Return the result of `batch_norm.forward`."""
    return closed_form.forward(_pre_activation(y, normalising), blending)


def backward(
    delta: Tensor, y: Tensor, normalising: Normalising, blending: Blending, need_logits: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the result of `batch_norm.backward`."""
    norm, residual, residual_norm, batch_statistics = normalising
    to_h, to_logits = closed_form.backward(delta, _pre_activation(y, normalising), blending, need_logits)
    to_y, to_weight, to_bias = _backward(to_h, y, norm, batch_statistics)
    if residual is None or residual_norm is None:
        return to_y, None if residual is None else to_h, torch.cat([to_bias, to_weight, to_logits])
    to_residual, to_residual_weight, _ = _backward(to_h, residual, residual_norm, batch_statistics)
    return to_y, to_residual, torch.cat([to_bias, to_weight, to_residual_weight, to_logits])


def _pre_activation(y: Tensor, normalising: Normalising) -> Tensor:
    """Return h = norm(y) + residual."""
    norm, residual, residual_norm, _ = normalising
    h = _normalised(y, norm)
    if residual is not None:
        h = h + (residual if residual_norm is None else _normalised(residual, residual_norm))
    return h.to(y.dtype)


def _normalised(y: Tensor, norm: Norm) -> Tensor:
    """Return the output of the norm in float32."""
    mean, rstd = norm.moments
    weight, bias = (None if one is None else one.float() for one in (norm.weight, norm.bias))
    return F.batch_norm(y.float(), mean, rstd**-2, weight, bias, eps=0)


def _backward(to_h: Tensor, y: Tensor, norm: Norm, batch_statistics: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to y, weight and bias."""
    mean, rstd = norm.moments
    to_y, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
        to_h.float(), y.float(), None if norm.weight is None else norm.weight.float(),
        mean, rstd**-2, mean, rstd, batch_statistics, 0.0, [True, True, True],
    )  # fmt: skip
    return to_y.to(y.dtype), to_weight, to_bias
