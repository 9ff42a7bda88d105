"""A site together with the batch norm, and the residual addition, before it.

`convert(..., fuse=True)` rewrites the forwards in which BatchNorm2d → site or BatchNorm2d → add → site occurs so that
they call `normalised_site`. Where no kernel can do it in one go, the parts run one after the other, as in the plain
network.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexact.layer import FlexAct
from flexact.ops import runs_fused


def normalised_site(
    site: FlexAct,
    norm: nn.BatchNorm2d,
    y: Tensor,
    residual: Tensor | None = None,
    residual_norm: nn.BatchNorm2d | None = None,
) -> Tensor:
    """site(norm(y) + residual), where the residual may go through a batch norm of its own."""
    if _fits(site, norm, y, residual, residual_norm):
        return _in_one_go(site, norm, y, residual, residual_norm)
    h = norm(y)
    if residual is not None:
        h = h + (residual if residual_norm is None else residual_norm(residual))
    x: Tensor = site(h)
    return x


def _fits(
    site: FlexAct,
    norm: nn.BatchNorm2d,
    y: Tensor,
    residual: Tensor | None,
    residual_norm: nn.BatchNorm2d | None,
) -> bool:
    """Whether the kernels take these tensors."""
    dense = any(y.is_contiguous(memory_format=order) for order in (torch.contiguous_format, torch.channels_last))
    alike = residual is None or (residual.shape == y.shape and residual.dtype == y.dtype)
    together = residual_norm is None or residual_norm.training == norm.training
    by_channel_elsewhere = site.rows > 1 and site.config.channel_dim not in (1, -3)
    keys = [site.keys[k] for k in site.alive]
    return (
        y.dim() == 4
        and y.numel() > y.shape[1]  # as batch norm has it: more than one value a channel
        and dense
        and alike
        and together
        and not by_channel_elsewhere
        and site.config.correction != "output_norm"
        and runs_fused(y, keys)
    )


def _in_one_go(
    site: FlexAct,
    norm: nn.BatchNorm2d,
    y: Tensor,
    residual: Tensor | None,
    residual_norm: nn.BatchNorm2d | None,
) -> Tensor:
    from flexact.ops import triton_ops

    site.check_input(y)
    routing = site.routing(y)
    mean, rstd = _moments(norm, y)
    residual_tensors: tuple[Tensor | None, ...] = (None,) * 5
    if residual is not None:
        if residual.stride() != y.stride():
            residual = torch.empty_like(y).copy_(residual)
        residual_tensors = (residual, *(None,) * 4)
        if residual_norm is not None:
            residual_tensors = (residual, residual_norm.weight, residual_norm.bias, *_moments(residual_norm, residual))
    x, statistics = triton_ops.normalised_activation(
        y,
        norm.weight,
        norm.bias,
        mean,
        rstd,
        *residual_tensors,
        site.logits.detach() if site.committed else site.logits,
        routing.weights,
        routing.probabilities,
        routing.temperature,
        triton_ops.SEPARATOR.join(site.keys),
        list(site.alive),
        routing.statistics,
        _uses_batch(norm),
    )
    site.gather(routing, statistics)
    result: Tensor = x
    return result


def _uses_batch(norm: nn.BatchNorm2d) -> bool:
    """Whether a batch norm normalises with the moments of its input."""
    return norm.training or norm.running_mean is None


def _moments(norm: nn.BatchNorm2d, y: Tensor) -> tuple[Tensor, Tensor]:
    """What a batch norm normalises with; in training its running statistics go on by one step, as in its forward."""
    from flexact.ops import triton_ops

    if not _uses_batch(norm):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        return norm.running_mean.float(), (norm.running_var.float() + norm.eps).rsqrt()
    tracks = norm.training and norm.track_running_stats
    momentum = 0.0 if norm.momentum is None else norm.momentum
    if tracks and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # a cumulative average
            momentum = 1.0 / float(norm.num_batches_tracked)
    running = (norm.running_mean, norm.running_var) if tracks else (None, None)
    mean, rstd = triton_ops.batch_moments(y.detach(), *running, momentum, norm.eps)
    return mean, rstd
