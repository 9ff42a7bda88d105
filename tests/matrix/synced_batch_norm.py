"""Batch norm over all ranks, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexact.routing.call_statistics import mean_over_ranks, rank_count


class SyncedBatchNorm(nn.BatchNorm2d):
    """Batch norm with the moments of the whole batch over all ranks. nn.SyncBatchNorm does this on a GPU only."""

    def forward(self, x: Tensor) -> Tensor:
        ranks = rank_count()
        if not self.training or ranks == 1:
            return super().forward(x)
        h = x if x.dtype == torch.float64 else x.float()
        mean = _shared_mean(h.mean((0, 2, 3)))
        centred = h - mean[:, None, None]
        variance = _shared_mean(centred.square().mean((0, 2, 3)))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is not None and self.running_var is not None:
            momentum = 1 / float(self.num_batches_tracked or 1) if self.momentum is None else self.momentum
            count = ranks * h.numel() / h.shape[1]
            with torch.no_grad():
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(variance * count / max(count - 1, 1), momentum)
        scale = torch.rsqrt(variance + self.eps) * self.weight
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)


def _shared_mean(values: Tensor) -> Tensor:
    mean: Tensor = _MeanOverRanks.apply(values)  # type: ignore[no-untyped-call]
    return mean


class _MeanOverRanks(torch.autograd.Function):
    """Mean over ranks. All ranks' losses depend on it, so its gradient is the mean of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return mean_over_ranks(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return mean_over_ranks(gradient)
