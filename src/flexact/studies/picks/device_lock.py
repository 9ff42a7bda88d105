"""A lock that lets several threads train on one GPU.

Graphs may be replayed by all threads at once, each on a stream of its own. Everything else (setting up, capturing,
evaluating) allocates memory and draws from torch's global generator, so one thread at a time does it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceLock:
    """A reentrant lock whose holder can let others in for a while."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held = threading.local()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it."""
        with self._lock:
            self._held.by_me = True
            try:
                yield
            finally:
                self._held.by_me = False

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let others hold it, where this thread does."""
        if not getattr(self._held, "by_me", False):
            yield
            return
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


DEVICE = DeviceLock()
