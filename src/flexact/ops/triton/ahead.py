"""Compiles Triton kernels in the background, before their first use.

Triton takes up to a second to compile a kernel. Only its front end, a small part of that, holds the GIL; the C++
passes and ptxas do not. The kernels of a training step are therefore compiled in parallel, in threads (`start`).

Kernels that are needed much later, if at all, must not slow the training down: processes compile them, at low priority
(`start_later`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import types
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import triton
from triton.compiler import code_generator

from flexact.ops.triton.builder import Builder, Request

_MOST_THREADS = 6
_MOST_PROCESSES = 6
_IDLE_SECONDS = 30.0
"""After which a process that has nothing to compile is ended."""

_started: dict[Hashable, Future[None]] = {}
_later: dict[Hashable, Future[None]] = {}
_lock = threading.Lock()  # the backward passes of several devices run in several threads


def start(key: Hashable, build: Callable[[], None]) -> None:
    """Run a build in the background, unless one with this key was started before.

    Only versions of Triton with AsyncCompileMode are known to compile in threads; with others, nothing is built ahead.
    """
    if hasattr(triton, "AsyncCompileMode"):
        with _lock:
            if key not in _started and _is_free(key):
                _started[key] = _pool().submit(build)


def start_later(key: Hashable, request: Callable[[], Request], build: Callable[[], None]) -> None:
    """Compile a kernel in another process, unless a build with this key was started before, and then run `build`, which
    takes the kernel from Triton's cache, in a thread.

    The newest requests come first, and a request that is repeated becomes the newest: after a drop, the candidates that
    are left go before those that were dropped.
    """
    if hasattr(triton, "AsyncCompileMode"):
        with _lock:
            earlier = _later.get(key)
            waits = earlier is not None and not earlier.cancelled() and earlier.cancel()
            if waits or (earlier is None and key not in _started):
                _later[key] = Future()
                _queue().put((_later[key], request, build))


def wait_for(key: Hashable) -> None:
    """Wait for the build with this key, if it was started. If it failed, or has not begun in another process, the
    caller compiles the kernel and gets the error."""
    build = _started.get(key)
    if build is None and not _is_free(key):
        build = _later[key]
    if build is not None:
        wait([build])


def _is_free(key: Hashable) -> bool:
    """Return whether no process compiles this kernel or has compiled it. A waiting request is withdrawn."""
    return (later := _later.get(key)) is None or later.cancel()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    # Triton's front end enters `catch_warnings`, which is not thread-safe, at every node of the syntax tree: threads
    # that leave it out of order would change the warning filters of the process permanently.
    code_generator.warnings = types.SimpleNamespace(
        **vars(warnings) | {"catch_warnings": contextlib.nullcontext, "simplefilter": lambda *_: None}
    )
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "flexact-build")


_Later = tuple[Future[None], Callable[[], Request], Callable[[], None]]


@functools.cache
def _queue() -> queue.LifoQueue[_Later]:
    """Return the queue of later builds, which threads hand to a process each."""
    waiting: queue.LifoQueue[_Later] = queue.LifoQueue()
    for _ in range(max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2))):
        # Daemons, because a program must not wait at its end for kernels that it does not need.
        threading.Thread(target=_build_later, args=(waiting,), name="flexact-build-later", daemon=True).start()
    return waiting


def _build_later(waiting: queue.LifoQueue[_Later]) -> None:
    builder: Builder | None = None
    while True:
        try:
            future, request, build = waiting.get(timeout=_IDLE_SECONDS if builder else None)
        except queue.Empty:
            if builder is not None:
                builder.close()
            builder = None
            continue
        if not future.set_running_or_notify_cancel():
            continue
        with contextlib.suppress(Exception):  # training then compiles the kernel when it needs it
            wanted = request()
            if builder is None or builder.target != wanted.target:
                builder = Builder(wanted.target)
            try:
                succeeded = builder.build(wanted)
            except OSError:  # the process has ended; the next request starts another one
                builder.close()
                builder = None
                raise
            if succeeded:
                build()
        future.set_result(None)
