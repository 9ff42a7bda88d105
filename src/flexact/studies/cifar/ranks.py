"""Training with several processes, as torchrun starts them; one alone is the usual case.

Each rank takes its part of every batch, and DistributedDataParallel averages the gradients. What the policy reads is
averaged over ranks as well (`routing.call_statistics`), so the logits, and with them the picks, are the same
everywhere. Only rank 0 writes.

Batch norm sees the rank's own part of the batch, and rank 0's running statistics are the ones that count: with two
ranks and a batch of 128, moments are those of 64 images. `SyncedBatchNorm` takes the whole batch instead, and training
is then the same for any number of ranks but for rounding, at the cost of two small collectives a layer.
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


@dataclass(frozen=True)
class Ranks:
    """Which of the processes this is."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """As torch.distributed has it; one alone where it is not in use."""
        count = rank_count()
        return cls(dist.get_rank(), count) if count > 1 else cls()

    @property
    def writes(self) -> bool:
        """Whether this is the one that writes files, evaluates and reports."""
        return self.rank == 0

    def part(self, batch: int) -> slice:
        """This rank's part of a batch."""
        if batch % self.count:
            raise FlexActError(f"a batch of {batch} cannot be split over {self.count} ranks; give a multiple of that.")
        own = batch // self.count
        return slice(self.rank * own, (self.rank + 1) * own)

    def agree(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank; all of them have to ask."""
        if self.count == 1:
            return flag
        told = torch.tensor(float(flag), device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told)

    def check_same(self, number: int, device: torch.device, told: str) -> None:
        """Raise an error with this message where the ranks do not have the same number."""
        if self.count > 1:
            ends = torch.tensor([number, -number], device=device)
            dist.all_reduce(ends, op=dist.ReduceOp.MAX)
            most, least = ends.tolist()
            if most != -least:
                raise FlexActError(told)

    def wrapped(self, network: nn.Module, device: torch.device) -> nn.Module:
        """The network whose gradients are averaged over ranks."""
        if self.count == 1:
            return network
        return nn.parallel.DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None)


TIMEOUT = 600.0
"""Seconds that a rank waits for the others before it gives up."""


class LostRank(FlexActError):
    """Another rank has ended, or does not answer any more."""


@contextmanager
def started_by_torchrun(device: str, timeout: float = TIMEOUT) -> Iterator[torch.device]:
    """Join the other processes where torchrun started several; the device of this one.

    device: "cpu" or "cuda"; torchrun's processes take one GPU each.
    timeout: seconds. A rank that dies ends the others at once, one that hangs after so long, with `LostRank`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield torch.device(device)
        return
    own = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.startswith("cuda")
        else torch.device(device)
    )
    if own.type == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
    try:
        with _losses_told():
            yield own
    finally:
        with suppress(RuntimeError):  # of a group that is broken already
            dist.destroy_process_group()


@contextmanager
def _losses_told() -> Iterator[None]:
    """What a collective says when another rank is gone, as an error that says what to do."""
    ranks = Ranks.current()
    try:
        yield
    except RuntimeError as error:
        words = str(error)
        if not isinstance(error, dist.DistError) and "gloo" not in words and "nccl" not in words.lower():
            raise
        raise LostRank(
            f"rank {ranks.rank} of {ranks.count} lost another one ({' '.join(words.split()):.200}): it was killed, ran "
            "out of memory, or hangs. Start the same command again: it goes on from the last checkpoint."
        ) from error


class SyncedBatchNorm(nn.BatchNorm2d):
    """Batch norm with the moments of the whole batch over all ranks, on any device; alone, it is nn.BatchNorm2d.

    nn.SyncBatchNorm does the same on a GPU only.
    """

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
        x = (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)
        return x


def synced(network: nn.Module) -> nn.Module:
    """Give every batch norm of a network the moments of all ranks."""
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncedBatchNorm
    return network


def _shared_mean(values: Tensor) -> Tensor:
    """The mean over ranks, differentiable."""
    mean: Tensor = _MeanOverRanks.apply(values)  # type: ignore[no-untyped-call]
    return mean


class _MeanOverRanks(torch.autograd.Function):
    """Each rank's loss depends on the mean through itself and the others: the gradient is the mean of all ranks'."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return mean_over_ranks(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return mean_over_ranks(gradient)
