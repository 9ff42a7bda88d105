"""Triton kernel launches with low CPU overhead.

A training step of a small network is bound by the CPU, where Triton's own launch takes longer than the kernel on the
GPU. A `Launch` therefore prepares everything that is constant across calls, and calls the launcher of a compiled kernel
directly. Compiled kernels are cached by the properties of the tensors that Triton specialises on.

Before a kernel is compiled, compilation of the kernels that a training step launches next is started in the background
(`prepares`).

The direct call uses Triton's private launcher, which is the same in Triton 3.4 to 3.6. With newer versions, every
launch falls back to Triton's documented interface.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from flexact.ops import dispatch
from flexact.ops.dispatch import CannotBuild
from flexact.ops.operators import is_recorded
from flexact.ops.triton import ahead

NEWEST_LAUNCHER = (3, 6)
"""The newest Triton whose private launcher is known."""

_GPU_ERRORS = ("CUDA error", "Triton Error [CUDA]")
"""Substrings of errors about the GPU or an earlier launch on it, as opposed to the compilation of a kernel."""

_log = logging.getLogger(__name__)

Dtypes = tuple[torch.dtype, ...]
"""The dtypes of the tensors of a launch, in their order."""


class Launch:
    """A kernel with its grid and all arguments but the tensors; call it with the tensors to launch it.

    numbers, constants: the runtime and the compile-time arguments, which follow the tensors in this order.
    warps: warps per program.
    missing: the number of tensors that the kernel takes before the given ones, and that are None in every launch.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[Any, ...],
        constants: tuple[Any, ...],
        warps: int = 4,
        missing: int = 0,
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants, self.warps = kernel, grid, numbers, constants, warps
        self.missing = (None,) * missing
        self._interpreted = not isinstance(kernel, triton.JITFunction)
        self._arguments = (*numbers, *constants)
        self._built: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}
        self._prepared: list[tuple[Launch, Callable[..., Iterable[torch.dtype]]]] = []

    def build_ahead(self, device: int, dtypes: Dtypes) -> None:
        """Build this kernel for aligned tensors, and those registered with `prepares`, in the background."""
        ahead.start(self._build_key(device, dtypes), functools.partial(self._compile, device, dtypes))
        self._build_prepared_ahead(device, dtypes)

    def prepares(self, other: Launch, dtypes: Callable[..., Iterable[torch.dtype]]) -> None:
        """Build another kernel in the background when this one is built.

        dtypes: returns the dtypes of the other launch, given those of this one.
        """
        self._prepared.append((other, dtypes))

    def __call__(self, *tensors: Tensor) -> None:
        if self._interpreted:
            self.kernel[self.grid](*self.missing, *tensors, *self._arguments)
            return
        first = tensors[0]
        if is_recorded(first):
            arguments = (*[first] * len(self.missing), *tensors, *self._arguments)  # the compiler expects tensors
            wrap_triton(self.kernel)[self.grid](*arguments, num_warps=self.warps)
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
        # As in Triton's own launch, but without its profiler hooks. Addresses replace the tensors, because Triton
        # queries the driver for each tensor.
        run, grid, stream_of, function, metadata = launcher
        arguments = (*self.missing, *addresses, *self._arguments)
        run(*grid, stream_of(device), function, metadata, None, None, None, *arguments)

    def _launch_documented(self, tensors: tuple[Tensor, ...]) -> Any:
        """Launch through Triton's documented interface, and return the compiled kernel."""
        return self.kernel[self.grid](*self.missing, *tensors, *self._arguments, num_warps=self.warps)

    def _build(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...] | None:
        """Compile the kernel, launch it for the first time, and return its launcher."""
        device, dtypes = tensors[0].get_device(), tuple([tensor.dtype for tensor in tensors])
        self._build_prepared_ahead(device, dtypes)
        ahead.wait_for(self._build_key(device, dtypes))
        try:
            built = self._launch_documented(tensors)
        except Exception as error:  # Triton's compiler raises errors of many types
            if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _GPU_ERRORS):
                raise
            raise CannotBuild(f"{self.kernel.__name__}: {type(error).__name__}: {error}") from error
        return _launcher(built, (*self.grid, 1, 1)[:3])

    def _build_key(self, device: int, dtypes: Dtypes) -> tuple[Any, ...]:
        """Return the key of a compilation. The runtime numbers are left out, although Triton specialises on multiples
        of 16."""
        return device, self.kernel, self.constants, self.warps, dtypes

    def _build_prepared_ahead(self, device: int, dtypes: Dtypes) -> None:
        for other, dtypes_of in self._prepared:
            other.build_ahead(device, tuple(dtypes_of(*dtypes)))

    def _compile(self, device: int, dtypes: Dtypes) -> None:
        """Compile the kernel for aligned tensors, and its launcher, into Triton's caches."""
        with torch.cuda.device(device) if device >= 0 else contextlib.nullcontext():
            arguments = (*self.missing, *dtypes, *self._arguments)
            built = self.kernel.warmup(*arguments, grid=self.grid, num_warps=self.warps)
            # Not `built.run`, which would also load the kernel: another thread may be capturing a CUDA graph.
            triton.runtime.driver.active.launcher_cls(built.src, built.metadata)


def _launcher(built: Any, grid: tuple[int, ...]) -> tuple[Any, ...] | None:
    """Return the private launcher of a compiled kernel and its arguments, or None if this Triton may have another."""
    if dispatch.triton_version() > NEWEST_LAUNCHER:
        _warn_once()
        return None
    stream_of = triton.runtime.driver.active.get_current_stream
    return built.run, grid, stream_of, built.function, built.packed_metadata


@functools.cache
def _warn_once() -> None:
    _log.warning(
        "unknown launcher of Triton %s: falling back to the documented one, which is slower.", triton.__version__
    )
