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


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: tuple[Any, ...], warps: int
) -> None:
    """Run a kernel with these arguments, tensors and numbers, and these compile-time constants behind them."""
    if not isinstance(kernel, JITFunction):  # Triton's interpreter
        kernel[grid](*arguments, *constants)
        return
    if is_traced(arguments[0]):
        wrap_triton(kernel)[grid](*arguments, *constants, num_warps=warps)
        return
    device = arguments[0].device.index
    key = (id(kernel), device, warps, constants, *[_specialised_on(argument) for argument in arguments])
    built = _built.get(key)
    if built is None:
        _built[key] = kernel[grid](*arguments, *constants, num_warps=warps)
    else:  # addresses instead of tensors: Triton would ask the driver about each of them
        plain = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        built[(*grid, 1, 1)[:3]](*plain, *constants)


def is_traced(tensor: Tensor) -> bool:
    """Whether torch.compile, or another tracer, is looking at what is done with a tensor."""
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter)


def _specialised_on(argument: Tensor | int | float) -> Any:
    """What Triton builds another kernel for: the type, and whether an address or a number is a multiple of 16."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 2**31
    return float
