"""The memory that a training step needs on a GPU, and how it is released afterwards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import torch


def allocated(device: torch.device) -> int:
    """Return the bytes that are allocated now; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def peak_mb(run: Callable[[], None], device: torch.device, before: int) -> float | None:
    """Run something, and return its peak memory in MB beyond `before`, weights included; None without a GPU."""
    if device.type != "cuda":
        run()
        return None
    allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def release(device: torch.device) -> None:
    """Free compiled code, graphs and cached memory of networks that are no longer referenced."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
