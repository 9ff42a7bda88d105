"""What a training step keeps in memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

PEAK, SAVED = "peak allocated", "saved for backward"

_MB = 2**20


class Memory:
    """Made before a contender is built; what others hold by then is not counted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = PEAK if device.type == "cuda" else SAVED
        if device.type == "cuda":
            self._settle()
            self._before = torch.cuda.memory_allocated(device)

    def of(self, run: Callable[[], None]) -> float:
        """MB: on a GPU the peak during a run, the contender's own weights included; else what autograd saves."""
        if self.device.type != "cuda":
            return saved_for_backward(run) / _MB
        self._settle()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - self._before) / _MB

    def _settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)


def saved_for_backward(run: Callable[[], None]) -> int:
    """Bytes that autograd keeps during a run, each piece of memory once; parameters, which are there anyway, too.

    >>> h = torch.randn(256, requires_grad=True)
    >>> saved_for_backward(lambda: h.tanh().sum().backward())
    1024
    """
    pieces: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in pieces:
            kept.append(tensor.detach())
        pieces[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(pieces.values())
