"""Triton kernel launches with low CPU overhead.

A training step of a small network is bound by the CPU, where Triton's own launch takes longer than the kernel on the
GPU. A `Launch` therefore prepares everything that is constant across calls, and calls the launcher of a compiled kernel
directly. Compiled kernels are cached by the properties of the tensors that Triton specialises on.

The direct call uses Triton's private launcher. If a version of Triton has another launcher, every launch falls back to
Triton's documented one.
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
from flexact.ops.operators import is_traced

NEWEST_LAUNCHER = (3, 6)
"""The newest Triton whose private launcher is known to work here."""

_GPU_ERRORS = ("CUDA error", "Triton Error [CUDA]")
"""Substrings of errors about the GPU or an earlier launch on it, as opposed to the compilation of a kernel."""

_log = logging.getLogger(__name__)


class CannotBuild(Exception):
    """Raised if a kernel cannot be compiled on this machine; the cause gives the reason."""


class Launch:
    """A kernel with its grid and all arguments but the tensors; call it with the tensors to launch it.

    numbers, constants: the runtime and the compile-time arguments, which follow the tensors in this order.
    warps: warps per program.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], constants: tuple[Any, ...], warps: int = 4
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants, self.warps = kernel, grid, numbers, constants, warps
        self._interpreted = not isinstance(kernel, triton.JITFunction)
        self._arguments = (*numbers, *constants)
        self._built: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}

    def __call__(self, *tensors: Tensor) -> None:
        if self._interpreted:
            self.kernel[self.grid](*tensors, *self._arguments)
            return
        first = tensors[0]
        if is_traced(first):
            wrap_triton(self.kernel)[self.grid](*tensors, *self._arguments, num_warps=self.warps)
            return
        device = first.get_device()
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (device, *[tensor.dtype for tensor in tensors], *[address % 16 == 0 for address in addresses])
        if key not in self._built:
            self._built[key] = self._build(tensors)
            return
        launcher = self._built[key]
        if launcher is None:
            self._launch_documented(tensors)
            return
        # As in Triton's own launch, but without its profiler hooks, and with addresses instead of tensors, for each of
        # which it would query the driver.
        run, grid, stream_of, function, metadata = launcher
        try:
            run(*grid, stream_of(device), function, metadata, None, None, None, *addresses, *self._arguments)
        except Exception as error:
            if _is_gpu_error(error):
                raise
            _log_once(f"{type(error).__name__}: {error}")
            self._built[key] = None
            self._launch_documented(tensors)

    def _launch_documented(self, tensors: tuple[Tensor, ...]) -> Any:
        """Launch through Triton's documented interface, and return the compiled kernel."""
        return self.kernel[self.grid](*tensors, *self._arguments, num_warps=self.warps)

    def _build(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...] | None:
        """Compile the kernel, launch it for the first time, and return its launcher."""
        try:
            built = self._launch_documented(tensors)
        except Exception as error:  # Triton's compiler raises errors of many types
            if _is_gpu_error(error):
                raise
            raise CannotBuild(f"{self.kernel.__name__}: {type(error).__name__}: {error}") from error
        return _launcher(built, (*self.grid, 1, 1)[:3])


def _launcher(built: Any, grid: tuple[int, ...]) -> tuple[Any, ...] | None:
    """Return the private launcher of a compiled kernel and its arguments, or None if this Triton has another one."""
    if dispatch.triton_version() > NEWEST_LAUNCHER:
        _log_once(f"Triton {triton.__version__} is newer than {'.'.join(map(str, NEWEST_LAUNCHER))}")
        return None
    try:
        stream_of = triton.runtime.driver.active.get_current_stream
        return built.run, grid, stream_of, built.function, built.packed_metadata
    except AttributeError as error:
        _log_once(str(error))
        return None


@functools.cache
def _log_once(reason: str) -> None:
    """Log once per reason that launches fall back to Triton's documented interface."""
    _log.warning("unknown Triton launcher (%s): falling back to Triton's own, which has a higher CPU overhead.", reason)


def _is_gpu_error(error: Exception) -> bool:
    """Return whether an error is about the GPU or an earlier launch on it."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _GPU_ERRORS)
