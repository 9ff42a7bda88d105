"""A lock for several threads that train on one GPU.

All threads may replay graphs at the same time, each on its own stream. Everything else (setup, capture, evaluation)
allocates memory and uses torch's global generator, so only one thread at a time may do it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceLock:
    """A lock that its holder can release temporarily."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held = threading.local()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock."""
        with self._lock:
            self._held.by_me = True
            try:
                yield
            finally:
                self._held.by_me = False

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock if this thread holds it, and acquire it again afterwards."""
        if not getattr(self._held, "by_me", False):
            yield
            return
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


DEVICE = DeviceLock()


def wait(device: torch.device) -> None:
    """Wait for the current stream, while other threads may use the device."""
    if device.type == "cuda":
        with DEVICE.released():
            torch.cuda.current_stream(device).synchronize()
