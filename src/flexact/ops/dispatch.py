"""Selects the implementation of the routed activation for a device, and gives the reason.

- "triton": for CUDA tensors, or for any tensor, slowly, under Triton's interpreter.
- "native": for CPU tensors, in C. The machine's C compiler builds it at first use, in under a second.
- "closed_form": torch operations, for any tensor.
- "plain": torch operations whose gradients autograd computes; the closed form for inputs that it does not support, in a
  trace and without gradients.
- "measured": the faster of these two in training, for any tensor; see `measured_form`.
- "compiled": the closed form through torch.compile, only on request. Compilation blocks training, for about 20 s with
  five candidates. It does not run in the background, because rounding would change at a step that depends on the
  machine's load, and runs would not be reproducible.

The environment variable FLEXACT_KERNELS overrides the default, and `use` overrides both.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
import sys
import warnings
from typing import Literal, NamedTuple, cast, get_args

import torch

from flexact.io.value_checks import check_known

Kernels = Literal["auto", "triton", "native", "compiled", "closed_form", "plain", "measured"]

VARIABLE = "FLEXACT_KERNELS"
OLDEST_TRITON = (3, 4)
"""Minimum version of Triton. Older ones cannot compile the kernels, which index tuples of constants."""
OLDEST_CARD = (7, 5)
"""Minimum compute capability: the first with the instruction tanh.approx."""
MOST_CANDIDATES = 16
"""Maximum number of candidates per site in the Triton kernels and in C."""


class CannotBuild(Exception):
    """Raised if a kernel cannot be compiled on this machine; the cause gives the reason."""


class Active(NamedTuple):
    """The implementation that runs, and the reason if a user may expect another one, otherwise ""."""

    name: Kernels
    reason: str


changes = 0
"""How often the implementation of a device may have changed."""

_forced: Kernels | None = None
_broken: dict[Kernels, str] = {}
"""The implementations that were disabled in this process, and why."""


def use(kernels: Kernels) -> None:
    """Force an implementation for this process, overriding FLEXACT_KERNELS; "auto" removes the override.

    An implementation that was disabled after a failure is tried again.

    >>> use("closed_form"); active(torch.device("cpu")).name
    'closed_form'
    >>> use("auto")
    """
    global _forced
    chosen = _checked("kernels", kernels)
    _broken.pop(chosen, None)
    _forced = None if chosen == "auto" else chosen
    _choose_again()


def wanted() -> Kernels:
    """Return the requested implementation: from `use`, else from FLEXACT_KERNELS, else "auto"."""
    return _forced if _forced is not None else _checked(VARIABLE, os.environ.get(VARIABLE) or "auto")


@functools.cache  # every call of a site needs it
def active(device: torch.device | str) -> Active:
    """Return the implementation for a device; the environment is read once. `falls_back` names the inputs for which the
    closed form runs instead."""
    device, kernels = torch.device(device), wanted()
    slower: Kernels = "measured" if kernels == "auto" else "closed_form"
    if kernels in ("closed_form", "plain", "measured"):
        return Active(kernels, f"{kernels} was requested")
    if kernels == "compiled":
        reason = why_not_compiled()
        return Active("closed_form", reason) if reason else Active("compiled", "")
    if kernels == "native" or (kernels == "auto" and device.type != "cuda"):
        reason = why_not_native(device.type)
        return Active(slower, reason) if reason else Active("native", "")
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs kernels on CPU tensors
    reason = _broken.get("triton") or _why_unsupported(device, device.type != "cuda" and interpreting)
    if not reason:
        return Active("triton", "")
    return Active(slower, f"triton was requested, but {reason}" if kernels == "triton" else reason)


def falls_back(kernels: Kernels) -> str:
    """Return the inputs for which the closed form runs instead of an implementation; empty if there are none."""
    return {
        "triton": "float64, custom candidates without a Triton form (with torch.compile: all custom candidates), and "
        f"sites of more than {MOST_CANDIDATES} candidates",
        "native": f"float64, picks per channel, a hard forward, and sites of more than {MOST_CANDIDATES} candidates",
    }.get(kernels, "")


def why_not_native(device_type: str) -> str:
    """Return why the C code cannot run on a device; empty if it can."""
    if device_type != "cpu":
        return f"there are no kernels for {device_type}"
    return _broken.get("native") or ("" if c_compiler() else why_no_c_compiler())


@functools.cache
def c_compiler() -> tuple[str, ...]:
    """Return the command of the C compiler: the variable CC, or the first of cc, gcc and clang; () without one."""
    if sys.platform == "win32":
        return ()
    commands = [tuple(shlex.split(given))] if (given := os.environ.get("CC")) else [("cc",), ("gcc",), ("clang",)]
    return next((command for command in commands if command and shutil.which(command[0])), ())


def why_no_c_compiler() -> str:
    """Return why `c_compiler` is ()."""
    if sys.platform == "win32":
        return "the C code does not support Windows"
    given = os.environ.get("CC")
    return f"the variable CC is {given!r}, and there is no such command" if given else "there is no C compiler"


def compiles() -> bool:
    """Return whether the closed form runs through torch.compile."""
    return wanted() == "compiled" and not why_not_compiled()


def why_not_compiled() -> str:
    """Return why "compiled" cannot run on this machine; empty if it can."""
    return _broken.get("compiled") or ("" if has_compiler() else "there is no C++ compiler")


@functools.cache
def has_compiler() -> bool:
    """Return whether torch.compile finds a C++ compiler on this machine."""
    compiler = os.environ.get("CXX")
    return any(shutil.which(name) for name in ([compiler] if compiler else ["g++", "clang++"]))


def _why_unsupported(device: torch.device, interpreting: bool) -> str:
    """Return why this machine cannot run the Triton kernels on a device; empty if it can."""
    if device.type != "cuda" and not interpreting:
        return f"Triton's kernels run on CUDA tensors, not on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    version = triton_version()
    if version < OLDEST_TRITON:
        return f"triton {'.'.join(map(str, version))} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "the Triton kernels support NVIDIA GPUs only"
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CARD:
            return f"compute capability {capability[0]}.{capability[1]} is older than {OLDEST_CARD[0]}.{OLDEST_CARD[1]}"
    return ""


def triton_version() -> tuple[int, ...]:
    """Return the major and minor version of the installed Triton."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def give_up(kernels: Kernels, failure: str, error: BaseException) -> None:
    """Disable an implementation after it failed, and warn once."""
    if kernels not in _broken:
        _broken[kernels] = f"{failure} ({type(error).__name__}: {str(error)[:200]})"
        _choose_again()
        warnings.warn(f"{_broken[kernels]}. flexact falls back to torch operations, which are slower.", stacklevel=2)


def _choose_again() -> None:
    global changes
    changes += 1
    active.cache_clear()


@functools.cache
def _checked(where: str, name: str) -> Kernels:
    check_known(where, name, get_args(Kernels))
    return cast(Kernels, name)
