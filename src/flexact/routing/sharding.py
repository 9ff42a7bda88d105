"""Logits that are sharded over ranks by `torch.distributed.fsdp.fully_shard`.

Each rank holds a shard of every site's logits as a DTensor. Every rank computes with the full tensor and writes the
result to its shard. torch.distributed is not imported unless a tensor is sharded.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank holds only a shard of a tensor."""
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "full_tensor")  # the type check is faster


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor. For a sharded tensor this is a collective operation, which every rank must call."""
    if not is_sharded(tensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return gathered


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a full tensor, sharded like another tensor."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import DTensor, Replicate

    sharded: Any = like
    replicated = DTensor.from_local(
        full, sharded.device_mesh, [Replicate()] * sharded.device_mesh.ndim, run_check=False
    )
    return replicated.redistribute(sharded.device_mesh, sharded.placements).to_local()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, to write to."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def fsdp_modules(model: nn.Module, *kinds: str) -> list[Any]:
    """Return the modules of these types of torch.distributed.fsdp: those that fully_shard was applied to are of type
    FSDPModule. Their parameters may be unsharded at the moment."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    types = () if fsdp is None else tuple(getattr(fsdp, kind) for kind in kinds)
    return [module for module in model.modules() if isinstance(module, types)]


def has_shards(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is sharded over ranks."""
    return bool(fsdp_modules(model, "FSDPModule")) or any(is_sharded(parameter) for parameter in model.parameters())
