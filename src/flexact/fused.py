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
    return (
        isinstance(site, FlexAct)
        and is_untouched(site)
        and _takes(norm, y)
        and (residual_norm is None or (_takes(residual_norm, y) and _uses_batch(residual_norm) == _uses_batch(norm)))
        and (residual is None or (residual.shape, residual.dtype, residual.device) == (y.shape, y.dtype, y.device))
        and y.numel() > y.shape[1]  # as batch norm has it: more than one value a channel
        and (y.is_contiguous(memory_format=torch.channels_last) or y.is_contiguous())
        and (site.rows == 1 or site.config.channel_dim in (1, -3))
        and site.config.correction != "output_norm"
        and site.k <= MOST_CANDIDATES
        and runs_fused(y, tuple([site.keys[k] for k in site.alive]))
    )


def _takes(norm: nn.BatchNorm2d, y: Tensor) -> bool:
    """Whether this is torch's own batch norm, whole, and one that takes y (else torch says what is wrong)."""
    return (
        type(norm) is nn.BatchNorm2d
        and is_untouched(norm)
        and y.dim() == 4
        and norm.num_features == y.shape[1]
        and (norm.weight is None) == (norm.bias is None)
        and (norm.weight is None or norm.weight.device == y.device)
        and (norm.running_mean is None or norm.num_batches_tracked is not None)
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
    other = None if residual_norm is None or residual is None else _norm(residual_norm, residual)
    x, statistics = triton_ops.normalised(
        y,
        site.logits.detach() if site.committed else site.logits,
        triton_ops.Normalising(_norm(norm, y), residual, other, _uses_batch(norm)),
        triton_ops.Blending(
            routing.weights, routing.probabilities, routing.temperature, site.keys, site.alive, routing.statistics
        ),
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

    running = None
    if norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None:
        running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        if not norm.training:
            moments = torch.stack([running[0].float(), (running[1].float() + norm.eps).rsqrt()])
            return Norm(moments, norm.weight, norm.bias)
    tracked = running if norm.training and norm.track_running_stats else None
    return Norm(triton_ops.moments(y.detach(), tracked, norm.momentum, norm.eps), norm.weight, norm.bias)
