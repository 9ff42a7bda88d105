"""Logits that are spread over ranks, as `torch.distributed.fsdp.fully_shard` leaves them.

A rank then holds a part of each site's few numbers as a DTensor. What is computed from them is computed from the whole,
on every rank, and written back to the part. Nothing here imports torch.distributed, which an ordinary run does without.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a part of a tensor only."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Where it is sharded every rank has to ask, as they wait for each other."""
    if not is_sharded(tensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return gathered


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has whole, split as another one is."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import DTensor, Replicate

    sharded: Any = like
    replicated = DTensor.from_local(
        full, sharded.device_mesh, [Replicate()] * sharded.device_mesh.ndim, run_check=False
    )
    return replicated.redistribute(sharded.device_mesh, sharded.placements).to_local()


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds, to write to."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def has_shards(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is spread over ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # it may hold its parameters whole at the moment
    if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules()):
        return True
    return any(is_sharded(parameter) for parameter in model.parameters())
