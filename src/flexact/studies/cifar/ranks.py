"""Training with several processes, which torchrun starts; a single process is the usual case.

Each rank trains on its part of every batch, and DistributedDataParallel averages the gradients. The statistics that the
policy reads are averaged over ranks as well (`routing.call_statistics`), so all ranks make the same picks. Only rank 0
writes files.

By default, batch norm uses the moments of the rank's own part of the batch. `SyncedBatchNorm` uses those of the whole
batch; training is then the same for any number of ranks, except for rounding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.routing.call_statistics import mean_over_ranks, rank_count

TIMEOUT = 600.0
"""Seconds that a rank waits for the others."""


class LostRank(FlexActError):
    """Another rank has ended or does not answer."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the number of ranks."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """The rank in torch.distributed; rank 0 of 1 if it is not initialized."""
        count = rank_count()
        return cls(dist.get_rank(), count) if count > 1 else cls()

    @property
    def writes(self) -> bool:
        """Whether this rank writes files, evaluates and reports."""
        return self.rank == 0

    def part(self, batch: int) -> slice:
        """This rank's part of a batch."""
        if batch % self.count:
            raise FlexActError(f"a batch of {batch} cannot be split over {self.count} ranks; give a multiple of that.")
        own = batch // self.count
        return slice(self.rank * own, (self.rank + 1) * own)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank; all ranks must call this."""
        if self.count == 1:
            return flag
        flags = torch.tensor(float(flag), device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def wrapped(self, network: nn.Module, device: torch.device) -> nn.Module:
        """The network with gradients averaged over ranks."""
        if self.count == 1:
            return network
        return nn.parallel.DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None)


@contextmanager
def started_by_torchrun(device: str, timeout: float = TIMEOUT) -> Iterator[torch.device]:
    """Join the other ranks if torchrun started several, and yield the device of this one.

    device: "cpu" or "cuda"; each rank uses one GPU. timeout: seconds to wait for a silent rank before
    `LostRank` is raised; if a rank dies, it is raised at once.
    """
    own = torch.device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield own
        return
    if own.type == "cuda":
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
    ranks = Ranks.current()
    try:
        yield own
    except RuntimeError as error:
        words = " ".join(str(error).split())
        if not isinstance(error, dist.DistError) and "gloo" not in words and "nccl" not in words.lower():
            raise
        raise LostRank(
            f"rank {ranks.rank} of {ranks.count} lost another rank ({words:.200}): it was killed, ran out of memory, "
            "or hangs. Start the same command again: it resumes from the last checkpoint."
        ) from error
    finally:
        with suppress(RuntimeError):  # the group is broken already
            dist.destroy_process_group()


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


def synced(network: nn.Module) -> None:
    """Make every batch norm of a network use the moments of all ranks."""
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncedBatchNorm


def _shared_mean(values: Tensor) -> Tensor:
    mean: Tensor = _MeanOverRanks.apply(values)  # type: ignore[no-untyped-call]
    return mean


class _MeanOverRanks(torch.autograd.Function):
    """The mean over ranks. All ranks' losses depend on it, so its gradient is the mean of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return mean_over_ranks(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return mean_over_ranks(gradient)
