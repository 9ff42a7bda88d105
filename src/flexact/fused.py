"""A site together with the batch norm, and the residual addition, before it.

`convert(..., fuse=True)` rewrites the forwards in which BatchNorm2d → site or BatchNorm2d → add → site occurs so that
they call `normalised_site`. Where no kernel can do it in one go, the parts run one after the other, as in the plain
network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flexact.layer import FlexAct
from flexact.ops import runs_fused

if TYPE_CHECKING:
    from flexact.ops.batch_norm import Norm

MOST_CANDIDATES = 16
"""Of a site: as many columns the kernels have room for."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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


def is_untouched(module: nn.Module) -> bool:
    """Whether a module's call is its type's own forward and nothing else."""
    return "forward" not in vars(module) and not any(getattr(module, hooks) for hooks in _HOOKS)


def _fits(
    site: FlexAct,
    norm: nn.BatchNorm2d,
    y: Tensor,
    residual: Tensor | None,
    residual_norm: nn.BatchNorm2d | None,
) -> bool:
    """Whether the kernels take these tensors, and nobody put something else in a part's place since the conversion."""
    parts = (norm,) if residual_norm is None else (norm, residual_norm)
    as_found = isinstance(site, FlexAct) and all(type(part) is nn.BatchNorm2d and is_untouched(part) for part in parts)
    if not as_found or not is_untouched(site):
        return False
    dense = any(y.is_contiguous(memory_format=order) for order in (torch.contiguous_format, torch.channels_last))
    alike = residual is None or (residual.shape == y.shape and residual.dtype == y.dtype)
    together = residual_norm is None or _uses_batch(residual_norm) == _uses_batch(norm)
    by_channel_elsewhere = site.rows > 1 and site.config.channel_dim not in (1, -3)
    keys = tuple([site.keys[k] for k in site.alive])
    return (
        y.dim() == 4
        and all(one is None or one.num_features == y.shape[1] for one in (norm, residual_norm))  # else torch says so
        and y.numel() > y.shape[1]  # as batch norm has it: more than one value a channel
        and dense
        and alike
        and together
        and not by_channel_elsewhere
        and site.config.correction != "output_norm"
        and site.k <= MOST_CANDIDATES
        and runs_fused(y, keys)
    )


def _in_one_go(
    site: FlexAct,
    norm: nn.BatchNorm2d,
    y: Tensor,
    residual: Tensor | None,
    residual_norm: nn.BatchNorm2d | None,
) -> Tensor:
    from flexact.ops import triton_ops  # needs Triton

    site.check_input(y)
    routing = site.routing(y)
    if residual is not None and residual.stride() != y.stride():
        residual = torch.empty_like(y).copy_(residual)
    x, statistics = triton_ops.normalised(
        y,
        _norm(norm, y),
        residual,
        None if residual_norm is None or residual is None else _norm(residual_norm, residual),
        site.logits.detach() if site.committed else site.logits,
        routing.weights,
        routing.probabilities,
        routing.temperature,
        site.keys,
        site.alive,
        routing.statistics,
        _uses_batch(norm),
    )
    site.gather(routing, statistics)
    return x


def _uses_batch(norm: nn.BatchNorm2d) -> bool:
    """Whether a batch norm normalises with the moments of its input."""
    return norm.training or norm.running_mean is None


def _norm(norm: nn.BatchNorm2d, y: Tensor) -> Norm:
    """What a batch norm does to y; in training its running statistics go on by one step, as in its own forward."""
    from flexact.ops import triton_ops
    from flexact.ops.batch_norm import Norm
    from flexact.ops.launching import is_traced

    if not _uses_batch(norm):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        rstd = (norm.running_var.float() + norm.eps).rsqrt()
        return Norm(norm.running_mean.float(), rstd, norm.weight, norm.bias)
    tracks = norm.training and norm.track_running_stats
    momentum = 0.0 if norm.momentum is None else norm.momentum
    if tracks and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # a cumulative average
            momentum = 1.0 / float(norm.num_batches_tracked)
    running = (norm.running_mean, norm.running_var) if tracks else (None, None)
    moments = triton_ops.batch_moments if is_traced(y) else triton_ops.moments
    mean, rstd = moments(y.detach(), *running, momentum, norm.eps).unbind()
    return Norm(mean, rstd, norm.weight, norm.bias)
