"""Runs the extension without a GPU: it calls back into Python for every launch, which runs Triton's interpreter."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import pytest
import torch

from flexact.ops.triton import extension, nodes
from flexact.ops.triton.launch import Dtypes, Launches

ELEMENTS = 2**9
"""Length of the views of the tensors; the kernels do not access more. The interpreter copies all of a view, so a long
one would reach beyond the memory of the process."""


class Kernels:
    """Stands in for compiled kernels: the extension gets its address, and calls `launch` with it."""

    by_address: ClassVar[dict[int, Kernels]] = {}
    launched = 0

    def __init__(self, launches: Launches, dtypes: Dtypes) -> None:
        self.launches, self.dtypes, self.count = launches, dtypes, len(launches.steps)
        self._own = ctypes.c_char()
        self.address = ctypes.addressof(self._own)
        Kernels.by_address[self.address] = self

    def launch(self, addresses: list[int]) -> None:
        Kernels.launched += 1
        tensors = []
        for address, dtype in zip(addresses, self.dtypes, strict=True):
            if not address:  # of a tensor without elements
                tensors.append(torch.empty(0, dtype=dtype))
                continue
            memory = (ctypes.c_char * (ELEMENTS * dtype.itemsize)).from_address(address)
            tensors.append(torch.frombuffer(memory, dtype=dtype))
        for launch, places in self.launches.steps:
            launch.run([tensors[i] for i in places])


def _launch(kernels: int, _count: int, addresses: Any, _device: int, _stream: int) -> int:
    own = Kernels.by_address[kernels]
    own.launch(addresses[: len(own.dtypes)])
    return 0


_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int, ctypes.c_void_p
)(_launch)
_CHECK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(lambda *_: 0)


def connected() -> Any:
    """Returns the extension, connected to the interpreter. Skips the test without a compiler."""
    if not extension.compiler():
        pytest.skip("there is no C++ compiler")
    module = extension.compiled()
    module.connect(*[ctypes.cast(function, ctypes.c_void_p).value for function in (_LAUNCH, _CHECK)], 0, 0)
    return module


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all sites run in the extension."""
    monkeypatch.setattr(extension, "_module", connected())
    monkeypatch.setattr(nodes, "_needs_python", set())
    monkeypatch.setattr(nodes, "_chains", {})
    prepared = {}

    def of(launches: Launches, device: int, dtypes: Dtypes) -> Kernels:
        return prepared.setdefault((launches, dtypes), Kernels(launches, dtypes))

    monkeypatch.setattr(Launches, "prepared", of)
    Kernels.launched = 0
