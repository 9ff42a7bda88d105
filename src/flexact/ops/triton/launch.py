"""Launching a Triton kernel with as little work for the host as can be.

A step of a small network is bound by the host, and Triton's own way to a launch takes longer there than the kernel on
the card. So what stays the same from call to call is prepared once, as a `Launch`, and a kernel that was built once is
run directly. What it was specialised on, beside what its launch has, is the key it is found by.

Running it directly takes Triton's private launcher. With a Triton whose launcher is not known, or differs from the one
that is, every launch is an ordinary one.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from flexact.ops import dispatch

NEWEST_LAUNCHER = (3, 6)
"""The last Triton whose launcher is known to take what it is called with here."""

_OF_THE_CARD = ("CUDA error", "Triton Error [CUDA]")
"""In messages about the card or an earlier launch on it, not about what is built."""

_log = logging.getLogger(__name__)


class CannotBuild(Exception):
    """A kernel does not build on this machine; the cause says why."""


class Launch:
    """A kernel with all that it takes but its tensors: its grid, the numbers behind the tensors, and the compile-time
    constants behind these. Called with the tensors, it runs."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], constants: tuple[Any, ...], warps: int
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants, self.warps = kernel, grid, numbers, constants, warps
        self._interpreted = not isinstance(kernel, triton.JITFunction)
        self._behind = (*numbers, *constants)
        self._built: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}

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
        if key not in self._built:
            self._built[key] = self._build(tensors)
            return
        launcher = self._built[key]
        if launcher is None:
            self._ordinary(tensors)
            return
        # As Triton's own launch does it, without the hooks of its profiler; with addresses instead of tensors, since it
        # would ask the driver about each of those.
        run, grid, stream_of, function, metadata = launcher
        try:
            run(*grid, stream_of(device), function, metadata, None, None, None, *addresses, *self._behind)
        except Exception as error:
            if _is_of_the_card(error):
                raise
            _say_once(f"{type(error).__name__}: {error}")
            self._built[key] = None
            self._ordinary(tensors)

    def _ordinary(self, tensors: tuple[Tensor, ...]) -> Any:
        """Launch as Triton documents it; the kernel that was built."""
        return self.kernel[self.grid](*tensors, *self._behind, num_warps=self.warps)

    def _build(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...] | None:
        """Build the kernel, and run it for the first time. Triton's compiler fails with errors of many types."""
        try:
            built = self._ordinary(tensors)
        except Exception as error:
            if _is_of_the_card(error):
                raise
            raise CannotBuild(f"{self.kernel.__name__}: {type(error).__name__}: {error}") from error
        return _launcher(built, (*self.grid, 1, 1)[:3])


def _launcher(built: Any, grid: tuple[int, ...]) -> tuple[Any, ...] | None:
    """What runs a built kernel directly; None where this Triton's launcher is not known."""
    if dispatch.triton_version() > NEWEST_LAUNCHER:
        _say_once(f"Triton {triton.__version__} is newer than {'.'.join(map(str, NEWEST_LAUNCHER))}")
        return None
    try:
        stream_of = triton.runtime.driver.active.get_current_stream
        return built.run, grid, stream_of, built.function, built.packed_metadata
    except AttributeError as error:
        _say_once(str(error))
        return None


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning("Triton's launcher is not the one known (%s): each launch of a kernel takes the host longer.", reason)


def _is_of_the_card(error: Exception) -> bool:
    """Whether an error is about the card or an earlier launch on it."""
    return isinstance(error, torch.OutOfMemoryError) or any(one in str(error) for one in _OF_THE_CARD)


def is_traced(tensor: Tensor) -> bool:
    """Whether torch.compile, or another tracer, is looking at what is done with a tensor."""
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter)
