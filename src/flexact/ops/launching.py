"""Launching a Triton kernel with as little work for the host as can be.

A step of a small network is bound by the host, and Triton's own way to a launch takes longer there than the kernel on
the card. So what stays the same from call to call is prepared once, as a `Launch`, and a kernel that was built once is
run directly. What it was specialised on, beside what its launch has, is the key it is found by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_OF_THE_CARD = ("CUDA error", "Triton Error [CUDA]")
"""In messages about the card or an earlier launch on it, not about what is built."""


class CannotBuild(Exception):
    """A kernel does not build on this machine; the cause says why."""


class Launch:
    """A kernel with all that it takes but its tensors: its grid, the numbers behind the tensors, and the compile-time
    constants behind these. Called with the tensors, it runs."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], constants: tuple[Any, ...], warps: int
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants, self.warps = kernel, grid, numbers, constants, warps
        self._interpreted = not isinstance(kernel, JITFunction)
        self._behind = (*numbers, *constants)
        self._built: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        if self._interpreted:
            self.kernel[self.grid](*tensors, *self._behind)
            return
        first = tensors[0]
        if is_traced(first):
            wrap_triton(self.kernel)[self.grid](*tensors, *self._behind, num_warps=self.warps)
            return
        device = first.get_device()
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (device, *[tensor.dtype for tensor in tensors], *[address % 16 == 0 for address in addresses])
        built = self._built.get(key)
        if built is None:
            self._built[key] = self._build(tensors)
            return
        # As Triton's own launch does it, without the hooks of its profiler; with addresses instead of tensors, since it
        # would ask the driver about each of those.
        run, grid, stream_of, function, metadata = built
        run(*grid, stream_of(device), function, metadata, None, None, None, *addresses, *self._behind)

    def _build(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Build the kernel, and run it for the first time. Triton's compiler fails with errors of many types."""
        try:
            built = self.kernel[self.grid](*tensors, *self._behind, num_warps=self.warps)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or any(one in str(error) for one in _OF_THE_CARD):
                raise
            raise CannotBuild(f"{self.kernel.__name__}: {type(error).__name__}: {error}") from error
        grid = (*self.grid, 1, 1)[:3]
        return built.run, grid, driver.active.get_current_stream, built.function, built.packed_metadata


def is_traced(tensor: Tensor) -> bool:
    """Whether torch.compile, or another tracer, is looking at what is done with a tensor."""
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter)
