"""Makes the keys of the kernels in Triton's cache on disk the same in every process.

In Triton 3.6, the key of a function depends on which of the functions that it calls had keys before. A process would
therefore compile kernels again that another one has compiled, after the same functions in another order.
"""

from __future__ import annotations

import functools
import importlib

import triton

_MODULES = ("elementary", "basis_functions", "basis", "tiles", "kernels", "moments", "policy")
"""Those with kernels, or with functions that kernels call."""


@functools.cache
def settle() -> None:
    """Compute the keys of all functions in a fixed order, once."""
    for name in _MODULES:
        module = importlib.import_module(f"flexact.ops.triton.{name}")
        for function in vars(module).values():
            if isinstance(function, triton.JITFunction):
                _ = function.cache_key
