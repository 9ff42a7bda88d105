"""The memory that a training step needs, and how it is released afterwards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import torch
from torch import Tensor


class Memory:
    """A meter of memory. Create it before the network: memory that is allocated by then is not counted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self._settle()
            self._before = torch.cuda.memory_allocated(device)

    def of(self, run: Callable[[], None]) -> float:
        """Return MB: on a GPU the peak during a run, weights included; on a CPU what autograd saves for backward."""
        if self.device.type != "cuda":
            return saved_for_backward(run) / 2**20
        self._settle()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - self._before) / 2**20

    def _settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)


def saved_for_backward(run: Callable[[], None]) -> int:
    """Return the bytes that autograd keeps during a run. Each storage counts once; parameters are included.

    >>> h = torch.randn(256, requires_grad=True)
    >>> saved_for_backward(lambda: h.tanh().sum().backward())
    1024
    """
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in sizes:
            kept.append(tensor.detach())
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(sizes.values())


def release(device: torch.device) -> None:
    """Free compiled code, graphs and cached memory of networks that are no longer referenced."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
