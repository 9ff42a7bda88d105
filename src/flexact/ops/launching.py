"""Launching a Triton kernel with as little work for the host as can be.

A step of a small network is bound by the host, and Triton's own way to a launch takes longer there than the kernel on
the card. So a kernel that was built once is launched directly; what it was specialised on is the key it is found by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton
from triton.runtime.jit import JITFunction

_built: dict[tuple[Any, ...], Any] = {}


class CannotBuild(Exception):
    """A kernel does not build on this machine; the cause says why."""


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: tuple[Any, ...], warps: int
) -> None:
    """Run a kernel with these arguments, tensors before numbers, and these compile-time constants behind them."""
    if not isinstance(kernel, JITFunction):  # Triton's interpreter
        kernel[grid](*arguments, *constants)
        return
    if is_traced(arguments[0]):
        wrap_triton(kernel)[grid](*arguments, *constants, num_warps=warps)
        return
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    numbers = arguments[len(tensors) :]
    types = tuple([tensor.dtype for tensor in tensors])
    aligned = tuple([address % 16 == 0 for address in addresses])
    key = (id(kernel), tensors[0].device.index, warps, aligned, types, numbers, constants)
    built = _built.get(key)
    if built is None:
        _built[key] = _build(kernel, grid, (*arguments, *constants), warps)
    else:  # addresses instead of tensors: Triton would ask the driver about each of them
        built[(*grid, 1, 1)[:3]](*addresses, *numbers, *constants)


def _build(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], warps: int) -> Any:
    """Build a kernel, and launch it for the first time. Triton's compiler fails with errors of many types."""
    try:
        return kernel[grid](*arguments, num_warps=warps)
    except Exception as error:
        if "CUDA" in str(error) or "out of memory" in str(error):  # of an earlier launch, or of the card
            raise
        raise CannotBuild(f"{kernel.__name__}: {type(error).__name__}: {error}") from error


def is_traced(tensor: Tensor) -> bool:
    """Whether torch.compile, or another tracer, is looking at what is done with a tensor."""
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter)
