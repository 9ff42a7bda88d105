"""Launches compiled Triton kernels through the CUDA driver, several in one call, with little work on the host.

Triton's own launch takes several microseconds of Python per kernel, which bounds the training step of a small network.
`driver.c`, compiled at first use, launches the same kernels from a table that is prepared once. It depends on nothing
private of Triton: the cubin, its name, its shared memory and the types of its parameters.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_void_p
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from flexact.ops.dispatch import CannotBuild
from flexact.ops.native import library

SOURCE = Path(__file__).with_name("driver.c")
_MOST_PARAMETERS = 64
_MISALIGNED = -1
_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B", "u16": "H", "u32": "I"}
_FORMATS |= {"u64": "Q", "fp32": "f", "fp64": "d"}
"""The format of `struct` for each type of a number in a signature."""
_WARP = 32


class _Kernel(ctypes.Structure):
    """The struct Kernel of driver.c."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("count", ctypes.c_int32),
        ("values", ctypes.c_uint64 * _MOST_PARAMETERS),
        ("sources", ctypes.c_int8 * _MOST_PARAMETERS),
        ("aligned", ctypes.c_int8 * _MOST_PARAMETERS),
    )


class Prepared:
    """Kernels that are launched one after the other on a device.

    kernels: the results of `kernel` for each of them.
    """

    def __init__(self, device: int, kernels: Sequence[_Kernel]) -> None:
        self._device, self._kernels, self._driver = device, kernels, cast(ctypes.CDLL, load())
        self._table = (ctypes.POINTER(_Kernel) * len(kernels))(*map(ctypes.pointer, kernels))
        self.address, self.count = ctypes.addressof(self._table), len(kernels)

    def launch(self, addresses: bytes) -> bool:
        """Launch the kernels on the current stream. Return False, and launch nothing, if an address is not a multiple
        of 16 although its kernel was compiled for one that is.

        addresses: those of all tensors, as unsigned 64-bit numbers.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        error = self._driver.launch_kernels(self._table, self.count, addresses, self._device, stream)
        if error and error != _MISALIGNED:
            _fail(self._driver, error)
        return not error


def parameters(built: Any, arguments: Sequence[Any]) -> list[tuple[str, Any]] | None:
    """Return the type and the value of each parameter of a compiled kernel; None if its launch needs more than that.

    arguments: those of the Python function. An address is given as the number of its tensor.
    """
    metadata = built.metadata
    needs_more = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if any(getattr(metadata, name, None) for name in needs_more) or metadata.num_ctas != 1:
        return None
    types = built.src.signature.values()
    found = [(kind, value) for kind, value in zip(types, arguments, strict=True) if kind != "constexpr"]
    declared = _declared(built.asm["ptx"], metadata.name)
    # Pointers to scratch memory follow, which this kernel does not use.
    found += [("u64", 0)] * (len(declared) - len(found))
    known = all(isinstance(kind, str) and (kind[0] == "*" or kind in _FORMATS) for kind, _ in found)
    sizes = [8 if kind[0] == "*" else struct.calcsize(_FORMATS[kind]) for kind, _ in found] if known else []
    return found if sizes == declared and len(sizes) <= _MOST_PARAMETERS else None


@functools.lru_cache(maxsize=1024)
def _declared(ptx: str, name: str) -> list[int]:
    """Return the size of each parameter that the machine code declares, in bytes."""
    head = re.search(rf"\.entry {re.escape(name)}\((.*?)\)", ptx, re.DOTALL)
    return [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", head[1])] if head else []


def kernel(built: Any, grid: tuple[int, ...], arguments: Sequence[Any], device: int) -> _Kernel | None:
    """Load a compiled kernel into a device, and prepare its launch. Return None if `parameters` does not support it, or
    if driver.c cannot be compiled."""
    found = parameters(built, arguments)
    if found is None or load() is None:
        return None
    metadata = built.metadata
    function = _loaded(built, device)
    prepared = _Kernel(function, (*grid, 1, 1)[:3], metadata.num_warps * _WARP, metadata.shared, len(found))
    aligned = {path[0] for path, given in built.src.attrs.items() if ["tt.divisibility", 16] in given}
    pointers = [i for i, kind in enumerate(built.src.signature.values()) if kind[0] == "*"]
    for i, (kind, value) in enumerate(found):
        if kind[0] == "*":
            prepared.sources[i], prepared.aligned[i] = value, pointers.pop(0) in aligned
        else:
            prepared.sources[i] = -1
            prepared.values[i] = int.from_bytes(struct.pack("<" + _FORMATS[kind], value), "little")
    return prepared


def load_ahead(built: Any, device: int) -> None:
    """Load a compiled kernel into a device, so that `kernel` finds it there. Another thread may be capturing a CUDA
    graph."""
    if load() is not None:
        _loaded(built, device)


def _loaded(built: Any, device: int) -> int:
    return _function(built.asm["cubin"], built.metadata.name.encode(), built.metadata.shared, device)


@functools.lru_cache(maxsize=1024)
def _function(cubin: bytes, name: bytes, shared: int, device: int) -> int:
    """Load a kernel into a device. Cached, since all sites that share a kernel prepare it again after a drop."""
    driver, function = cast(ctypes.CDLL, load()), c_void_p()
    if error := driver.load_kernel(cubin, name, shared, device, ctypes.byref(function)):
        _fail(driver, error)
    return cast(int, function.value)


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library of driver.c; None if it cannot be compiled."""
    try:
        driver = library.compiled((SOURCE,))
    except CannotBuild:
        return None
    driver.load_kernel.argtypes = [c_char_p, c_char_p, c_int, c_int, c_void_p]
    driver.launch_kernels.argtypes = [c_void_p, c_int, c_char_p, c_int, c_void_p]
    driver.error_text.argtypes, driver.error_text.restype = [c_int], c_char_p
    return driver


def _fail(driver: ctypes.CDLL, error: int) -> NoReturn:
    text = "libcuda.so.1 cannot be opened" if error < 0 else driver.error_text(error).decode()
    raise RuntimeError(f"CUDA error: {text}")
