"""Runs Triton kernels with a fallback: if one cannot be compiled on this machine, plain torch runs instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexact.ops import dispatch
from flexact.ops.dispatch import CannotBuild

Result = TypeVar("Result")


def run(kernel: Callable[..., Result], fallback: Callable[..., Result], tensor: Tensor, *rest: Any) -> Result:
    """Call a function that launches kernels, on the device of its first argument.

    If one cannot be compiled, warn, call the fallback, and disable Triton for the rest of the process.
    """
    try:
        if tensor.is_cuda and tensor.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(tensor.device):
                return kernel(tensor, *rest)
        return kernel(tensor, *rest)
    except CannotBuild as error:
        dispatch.give_up("triton", "a Triton kernel failed to build", error)
        return fallback(tensor, *rest)
