"""Triton kernel launches with low CPU overhead.

A training step of a small network is bound by the CPU, where Triton's own launch takes longer than the kernel on the
GPU. `Launches` therefore prepares everything that is constant across calls, and launches all kernels of a pass in one
call of the CUDA driver (`flexact.ops.triton.driver`). Compiled kernels are cached by the properties of the tensors that
Triton specialises on.

Before a kernel is compiled, compilation of the kernels that a training step launches next is started in the background
(`prepares`). What the driver cannot launch directly goes through Triton's documented interface.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from flexact.ops.dispatch import CannotBuild
from flexact.ops.operators import is_recorded
from flexact.ops.triton import ahead, cache_keys, driver
from flexact.ops.triton.builder import Request

_GPU_ERRORS = ("CUDA error", "Triton Error [CUDA]")
"""Substrings of errors about the GPU or an earlier launch on it, as opposed to the compilation of a kernel."""

_log = logging.getLogger(__name__)

Dtypes = tuple[torch.dtype, ...]
"""The dtypes of the tensors of a launch, in their order."""


class Launch:
    """A kernel with its grid and all arguments but the tensors.

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
        self.arguments = (*numbers, *constants)
        self._prepared: list[tuple[Launch, Callable[..., Iterable[torch.dtype]], bool]] = []

    def build_ahead(self, device: int, dtypes: Dtypes) -> None:
        """Build this kernel for aligned tensors, and those registered with `prepares`, in the background."""
        ahead.start(self._build_key(device, dtypes), functools.partial(self._compile, device, dtypes))
        self._build_prepared_ahead(device, dtypes)

    def build_later(self, device: int, dtypes: Dtypes) -> None:
        """Build this kernel for aligned tensors in another process, for a use that is far ahead."""
        key, compiled = self._build_key(device, dtypes), functools.partial(self._compile, device, dtypes)
        ahead.start_later(key, functools.partial(self._request, device, dtypes), compiled)

    def prepares(self, other: Launch, dtypes: Callable[..., Iterable[torch.dtype]], later: bool = False) -> None:
        """Build another kernel in the background when this one is built.

        dtypes: returns the dtypes of the other launch, given those of this one.
        later: whether the other kernel's use is far ahead; see `build_later`.
        """
        self._prepared.append((other, dtypes, later))

    def run(self, tensors: Sequence[Tensor]) -> None:
        """Launch the kernel through Triton's documented interface."""
        self.kernel[self.grid](*self.missing, *tensors, *self.arguments, num_warps=self.warps)

    def record(self, tensors: Sequence[Tensor]) -> None:
        """Launch the kernel so that a compiler records it."""
        arguments = (*[tensors[0]] * len(self.missing), *tensors, *self.arguments)  # the compiler expects tensors
        wrap_triton(self.kernel)[self.grid](*arguments, num_warps=self.warps)

    def build(self, device: int, dtypes: Dtypes, tensors: Sequence[Tensor] | None = None) -> Any:
        """Return the compiled kernel.

        tensors: if given, the kernel is compiled for their alignments; otherwise for aligned tensors.
        """
        self._build_prepared_ahead(device, dtypes)
        ahead.wait_for(self._build_key(device, dtypes))
        try:
            return self._compiled(tensors or dtypes)
        except Exception as error:  # Triton's compiler raises errors of many types
            if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _GPU_ERRORS):
                raise
            raise CannotBuild(f"{self.kernel.__name__}: {type(error).__name__}: {error}") from error

    def _build_key(self, device: int, dtypes: Dtypes) -> tuple[Any, ...]:
        """Return the key of a compilation. The runtime numbers are left out, although Triton specialises on multiples
        of 16."""
        cache_keys.settle()
        return device, self.kernel, self.constants, self.warps, dtypes

    def _build_prepared_ahead(self, device: int, dtypes: Dtypes) -> None:
        for other, dtypes_of, later in self._prepared:
            (other.build_later if later else other.build_ahead)(device, tuple(dtypes_of(*dtypes)))

    def _compile(self, device: int, dtypes: Dtypes) -> None:
        """Compile the kernel for aligned tensors, and load it into a device."""
        with _current(device):
            built = self._compiled(dtypes)
            if device >= 0:
                driver.load_ahead(built, device)

    def _compiled(self, tensors: Sequence[Tensor] | Dtypes) -> Any:
        return self.kernel.warmup(*self.missing, *tensors, *self.arguments, grid=self.grid, num_warps=self.warps)

    def _request(self, device: int, dtypes: Dtypes) -> Request:
        """Return what another process needs to compile the kernel for aligned tensors."""
        with _current(device):
            target = triton.runtime.driver.active.get_current_target()
        arguments = (*self.missing, *dtypes, *self.arguments)
        return Request(target, self.kernel.__module__, self.kernel.__name__, arguments, self.grid, self.warps)


class Launches:
    """Kernels that are launched one after the other; call it with their tensors to launch them.

    count: the number of tensors of a call.
    steps: each launch, and the positions of its tensors among them.
    """

    def __init__(self, count: int, *steps: tuple[Launch, Sequence[int]]) -> None:
        self.steps = steps
        self._interpreted = not all(isinstance(launch.kernel, triton.JITFunction) for launch, _ in steps)
        self._built: dict[tuple[Any, ...], driver.Prepared | None] = {}
        self._pack: Callable[..., bytes] = struct.Struct(f"{count}Q").pack

    def __call__(self, *tensors: Tensor) -> None:
        first = tensors[0]
        if self._interpreted or is_recorded(first):
            for launch, places in self.steps:
                (launch.run if self._interpreted else launch.record)([tensors[i] for i in places])
            return
        addresses = self._pack(*[tensor.data_ptr() for tensor in tensors])
        device, dtypes = first.get_device(), tuple([tensor.dtype for tensor in tensors])
        key = (device, dtypes)
        if key not in self._built:
            self._built[key] = self._build(device, dtypes)
        prepared = self._built[key]
        if prepared is None:
            for launch, places in self.steps:
                launch.run([tensors[i] for i in places])
        elif not prepared.launch(addresses):
            self._launch_misaligned(device, dtypes, tensors, addresses)

    def prepared(self, device: int, dtypes: Dtypes) -> driver.Prepared | None:
        """Return the kernels for aligned tensors of these dtypes; None if they were not launched before, or only Triton
        can launch them."""
        return self._built.get((device, dtypes))

    def _launch_misaligned(self, device: int, dtypes: Dtypes, tensors: Sequence[Tensor], addresses: bytes) -> None:
        key = (device, dtypes, *[tensor.data_ptr() % 16 == 0 for tensor in tensors])
        if key not in self._built:
            self._built[key] = self._build(device, dtypes, tensors)
        prepared = self._built[key]
        assert prepared is not None  # as are the kernels for aligned tensors
        prepared.launch(addresses)

    def _build(self, device: int, dtypes: Dtypes, tensors: Sequence[Tensor] | None = None) -> driver.Prepared | None:
        """Compile and load the kernels; None if only Triton can launch them."""
        kernels = []
        for launch, places in self.steps:
            own = None if tensors is None else [tensors[i] for i in places]
            built = launch.build(device, tuple([dtypes[i] for i in places]), own)
            arguments = (*launch.missing, *places, *launch.arguments)
            kernels.append(driver.kernel(built, launch.grid, arguments, device))
        known = [kernel for kernel in kernels if kernel is not None]
        if len(known) == len(kernels):
            return driver.Prepared(device, known)
        _warn_once()
        return None


def _current(device: int) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a device is the current one."""
    return torch.cuda.device(device) if device >= 0 else contextlib.nullcontext()


def one(launch: Launch, count: int) -> Launches:
    """Return a single launch with `count` tensors."""
    return Launches(count, (launch, range(count)))


@functools.cache
def _warn_once() -> None:
    _log.warning(
        "the kernels of Triton %s cannot be launched directly: falling back to its own launches, which are slower.",
        triton.__version__,
    )
