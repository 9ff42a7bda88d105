"""Compiles Triton kernels in background threads, before their first use.

Triton takes up to a second to compile a kernel. Only its front end, a small part of that, holds the GIL; the C++
passes, ptxas and the C compiler do not. The kernels of a training step are therefore compiled in parallel.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import types
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import triton
from triton.compiler import code_generator
from triton.runtime import build as launcher_build

_MOST_THREADS = 6

_started: dict[Hashable, Future[None]] = {}
_lock = threading.Lock()  # the backward passes of several devices run in several threads
_loading = threading.Lock()


def start(key: Hashable, build: Callable[[], None]) -> None:
    """Run a build in the background, unless one with this key was started before.

    Only versions of Triton with AsyncCompileMode are known to compile in threads; with others, or if their launchers
    cannot be loaded by several threads (see `load_launchers_safely`), nothing is built ahead.
    """
    if hasattr(triton, "AsyncCompileMode") and hasattr(launcher_build, "_load_module_from_path"):
        with _lock:
            if key not in _started:
                _started[key] = _pool().submit(build)


def wait_for(key: Hashable) -> None:
    """Wait for the build with this key, if it was started. If it failed, the caller compiles the kernel again and
    gets the error."""
    if (build := _started.get(key)) is not None:
        wait([build])


@functools.cache
def _pool() -> ThreadPoolExecutor:
    # Triton's front end enters `catch_warnings`, which is not thread-safe, at every node of the syntax tree: threads
    # that leave it out of order would change the warning filters of the process permanently.
    code_generator.warnings = types.SimpleNamespace(
        **vars(warnings) | {"catch_warnings": contextlib.nullcontext, "simplefilter": lambda *_: None}
    )
    load_launchers_safely()
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "flexact-build")


@functools.cache
def load_launchers_safely() -> None:
    """Make Triton's loading of launchers thread-safe, in this whole process.

    Up to Triton 3.6, the launcher of each signature is an extension module, and all have the name `__triton_launcher`.
    When one is loaded again, as the launching thread does after a build in the background, Python returns the module
    that has this name in `sys.modules`, whichever it is, and overwrites its functions. A thread that loads another
    launcher at that moment would get one with the wrong arguments. Therefore one thread loads at a time, and gets a
    copy of the module that later loads do not change.
    """
    load = launcher_build._load_module_from_path

    def load_alone(name: str, path: str) -> types.ModuleType:
        with _loading:
            copy = types.ModuleType(name)
            vars(copy).update(vars(load(name, path)))
            return copy

    launcher_build._load_module_from_path = load_alone
