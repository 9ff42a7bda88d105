"""Stopping the user's training, which knows nothing of the grid, when the grid is asked to stop."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flexact.errors import FlexActError


class Interrupted(BaseException):
    """Raised inside the training. Not an Exception, so that a training that catches its own errors ends too."""


@contextmanager
def interruptible(stop: Callable[[], bool]) -> Iterator[None]:
    """Raise `Interrupted` in the body within about a second after `stop()` returns True; it leaves as FlexActError."""
    thread, over = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            if stop():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interrupted))
                return

    watcher = threading.Thread(target=watch, name="flexact-stop", daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            over.set()
            watcher.join()
            for _ in range(10):
                time.sleep(0)  # a pending exception is raised here and not later
    except Interrupted:
        raise FlexActError("the training was stopped; it starts again when the comparison is resumed.") from None
