"""Which implementation of the routed activation runs where, and why.

"triton" is for CUDA tensors (and for any, slowly, under Triton's interpreter). "closed_form" sweeps any tensor in
blocks; "compiled" is the closed form through torch.compile, several times as fast on a CPU after some seconds of
compilation for each set of candidates. By default a CPU takes it for large tensors, where there is a C++ compiler. The
environment variable FLEXACT_KERNELS or `use` forces one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import warnings
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from flexact.errors import FlexActError, suggestion

Kernels = Literal["auto", "triton", "compiled", "closed_form"]

VARIABLE = "FLEXACT_KERNELS"
OLDEST_TRITON = (3, 3)
"""Its built kernels are launched with their constants too."""
OLDEST_CARD = (7, 5)
"""tanh.approx came with it."""
COMPILED_FROM = 2**20
"""Elements of a tensor from which on a CPU compiles by default."""


class Active(NamedTuple):
    """The implementation that runs, and why no faster one does ("" where it is the fastest)."""

    name: Kernels
    reason: str


_forced: Kernels | None = None
_broken: str = ""
"""Why Triton was given up during this run."""
_broken_compiler: str = ""
"""Why torch.compile was given up during this run."""


def use(kernels: Kernels) -> None:
    """Force one implementation from now on, before what FLEXACT_KERNELS says; "auto" takes that back. One that was
    given up is tried again.

    >>> use("closed_form"); active(torch.device("cpu")).name
    'closed_form'
    >>> use("auto")
    """
    global _forced, _broken, _broken_compiler
    choice = _checked(kernels, "flexact.ops.dispatch.use")
    if choice == "triton":
        _broken = ""
    if choice == "compiled":
        _broken_compiler = ""
    _forced = None if choice == "auto" else choice


def wanted() -> Kernels:
    """What was asked for: by `use`, by FLEXACT_KERNELS, or "auto"."""
    return _forced if _forced is not None else _checked(os.environ.get(VARIABLE) or "auto", VARIABLE)


def active(device: torch.device | str) -> Active:
    """What runs on a device's tensors. A custom candidate, or float64, may still take the closed form."""
    device = torch.device(device)
    choice = wanted()
    if choice == "closed_form":
        return Active(choice, "closed_form was asked for")
    if choice == "compiled" or (choice == "auto" and device.type == "cpu"):
        reason = _broken_compiler or ("" if has_compiler() else "there is no C++ compiler")
        return Active("closed_form", reason) if reason else Active("compiled", "")
    if choice == "auto" and device.type != "cuda":
        return Active("closed_form", "")
    reason = why_no_triton(device)
    if not reason:
        return Active("triton", "")
    return Active("closed_form", f"triton was asked for, but {reason}" if choice == "triton" else reason)


def compiles(h: Tensor) -> bool:
    """Whether the closed form of this input is compiled: what decides is its size, so that a run repeats."""
    large_enough = h.numel() >= COMPILED_FROM or wanted() == "compiled"
    return large_enough and active(h.device).name == "compiled"


@functools.cache
def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler on this machine."""
    named = os.environ.get("CXX")
    return any(shutil.which(name) for name in ([named] if named else ["g++", "clang++"]))


def why_no_triton(device: torch.device) -> str:
    """Why Triton's kernels cannot run on a device's tensors; empty where they can."""
    return _broken or _why_not_here(device, device.type != "cuda" and interpreting())


@functools.cache
def _why_not_here(device: torch.device, interpreting: bool) -> str:
    """What does not change during a run: asked at each call of a site, and slow to find out."""
    if device.type != "cuda" and not interpreting:
        return f"Triton's kernels run on CUDA tensors, not on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    version = triton_version()
    if version < OLDEST_TRITON:
        return f"triton {'.'.join(map(str, version))} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "Triton's kernels here are for NVIDIA's cards"
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CARD:
            return f"compute capability {capability[0]}.{capability[1]} is older than {OLDEST_CARD[0]}.{OLDEST_CARD[1]}"
    return ""


def triton_version() -> tuple[int, ...]:
    """Of the installed Triton, its first two numbers."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def interpreting() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def give_up_triton(error: BaseException) -> None:
    """Go on without Triton after a kernel failed to build; said once."""
    global _broken
    if not _broken:
        _broken = f"a Triton kernel failed to build ({type(error).__name__}: {str(error)[:200]})"
        warnings.warn(f"{_broken}; flexact goes on with the closed form, which is slower.", stacklevel=2)


def give_up_compiler(error: BaseException) -> None:
    """Go on without torch.compile after it failed; said once."""
    global _broken_compiler
    if not _broken_compiler:
        _broken_compiler = f"torch.compile failed ({type(error).__name__}: {str(error)[:200]})"
        warnings.warn(f"{_broken_compiler}; flexact goes on without it, which is slower.", stacklevel=2)


@functools.cache
def _checked(name: str, where: str) -> Kernels:
    choices: tuple[Kernels, ...] = get_args(Kernels)
    for choice in choices:
        if name == choice:
            return choice
    raise FlexActError(f"{where} got {name!r}{suggestion(str(name), choices)} Expected one of: {', '.join(choices)}.")
