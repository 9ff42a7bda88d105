"""Compiles Triton kernels in background threads, before their first use.

Triton takes up to a second to compile a kernel. Only its front end, a small part of that, holds the GIL; the C++
passes and ptxas do not. The kernels of a training step are therefore compiled in parallel.
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

_MOST_THREADS = 6

_started: dict[Hashable, Future[None]] = {}
_lock = threading.Lock()  # the backward passes of several devices run in several threads


def start(key: Hashable, build: Callable[[], None]) -> None:
    """Run a build in the background, unless one with this key was started before.

    Only versions of Triton with AsyncCompileMode are known to compile in threads; with others, nothing is built ahead.
    """
    if hasattr(triton, "AsyncCompileMode"):
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
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "flexact-build")
