"""Plain-torch fallback of `batch_norm` and `moments`, used if a kernel cannot be compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.ops import closed_form
from flexact.ops.blending import Blending
from flexact.ops.triton.batch_norm import Norm, Normalising
from flexact.ops.triton.moments import Running


def moments(y: Tensor, running: Running | None, momentum: float | None, eps: float) -> Tensor:
    """Return the mean and 1/√(variance + ε) of each channel, (2, channels). Update the running statistics in place."""
    variance, mean = torch.var_mean(y.detach().float(), dim=(0, 2, 3), unbiased=False)
    if running is not None:
        running_mean, running_var, batches = running
        batches.add_(1)
        elements = y.numel() // y.shape[1]
        weight = 1 / batches if momentum is None else torch.tensor(momentum, device=y.device)
        running_mean.lerp_(mean.to(running_mean.dtype), weight.to(running_mean.dtype))
        running_var.lerp_((variance * elements / (elements - 1)).to(running_var.dtype), weight.to(running_var.dtype))
    return torch.stack([mean, (variance + eps).rsqrt()])


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
    h = _normalised(y, norm)[1]
    if residual is not None:
        h = h + (residual if residual_norm is None else _normalised(residual, residual_norm)[1])
    return h.to(y.dtype)


def _normalised(y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return (y − mean)·rstd and the output of the norm, in float32."""
    mean, rstd = norm.moments
    normalised = (y.float() - _per_channel(mean)) * _per_channel(rstd)
    if norm.weight is None or norm.bias is None:
        return normalised, normalised
    return normalised, normalised * _per_channel(norm.weight) + _per_channel(norm.bias)


def _backward(to_h: Tensor, y: Tensor, norm: Norm, batch_statistics: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to y, weight and bias."""
    gradient, normalised = to_h.float(), _normalised(y, norm)[0]
    to_bias, to_weight = gradient.sum((0, 2, 3)), (gradient * normalised).sum((0, 2, 3))
    if batch_statistics:
        elements = y.numel() // y.shape[1]
        gradient = gradient - (_per_channel(to_bias) + normalised * _per_channel(to_weight)) / elements
    rstd = norm.moments[1]
    scale = rstd if norm.weight is None else rstd * norm.weight.float()
    return (gradient * _per_channel(scale)).to(y.dtype), to_weight, to_bias


def _per_channel(values: Tensor) -> Tensor:
    """Return one value per channel, shaped to broadcast against (batch, channels, height, width)."""
    return values.float().view(1, -1, 1, 1)
