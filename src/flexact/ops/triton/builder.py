"""Compiles Triton kernels in a process of its own, which needs no GPU.

A kernel that is compiled in a thread slows the training down, because Triton's front end holds the GIL. This process
writes compiled kernels into Triton's cache on disk, from which the training loads each in about a millisecond.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget

from flexact.ops.triton import cache_keys

_NICE = 10
"""Added to the niceness of the process, so that training and data loading come first."""


class Request(NamedTuple):
    """A kernel to compile, by name, with the arguments of Triton's `warmup`."""

    target: GPUTarget
    module: str
    kernel: str
    arguments: tuple[Any, ...]
    grid: tuple[int, ...]
    warps: int


class Builder:
    """The process. It exits when the process that created it does.

    target: the GPU that it compiles for.
    """

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Without PYTHONSAFEPATH, a file of the working directory could hide a module that this program imports.
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C and a notebook's interrupt are for the program alone
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        pickle.dump(target, self._requests)

    def build(self, request: Request) -> bool:
        """Compile a kernel, and return whether it succeeded. Raise OSError if the process has ended."""
        pickle.dump(request, self._requests)
        self._requests.flush()
        answer = self._answers.read(1)
        if not answer:
            raise BrokenPipeError("the process that compiles kernels has ended")
        return answer == b"1"

    def close(self) -> None:
        """End the process."""
        self._process.terminate()  # forked processes, as those of a DataLoader, may keep the pipe of its requests open
        self._process.communicate()


class _WithoutGPU:
    """A driver of Triton that knows for which GPU to compile, and cannot run anything."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    """Compile the kernels whose requests arrive at the standard input, and answer each with 1, or 0 if it failed."""
    if hasattr(os, "nice"):
        os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a program that prints must not answer
    with contextlib.suppress(EOFError):
        triton.runtime.driver.set_active(_WithoutGPU(pickle.load(sys.stdin.buffer)))
        while True:
            answers.write(b"1" if _is_built(pickle.load(sys.stdin.buffer)) else b"0")


def _is_built(request: Request) -> bool:
    try:
        cache_keys.settle()
        kernel = getattr(importlib.import_module(request.module), request.kernel)
        kernel.warmup(*request.arguments, grid=request.grid, num_warps=request.warps)
    except Exception:  # Triton's compiler raises errors of many types; training meets the same error and reports it
        return False
    return True


if __name__ == "__main__":
    main()
