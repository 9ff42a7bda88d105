"""A lock for several threads that train on one GPU.

All threads may replay graphs at the same time, each on its own stream. Everything else (setup, capture, evaluation)
allocates memory and uses torch's global generator, so only one thread at a time may do it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

DEVICE = threading.RLock()


@contextmanager
def released() -> Iterator[None]:
    """Release the lock if this thread holds it, and acquire it again afterwards."""
    try:
        DEVICE.release()
    except RuntimeError:  # another thread holds it, or none
        yield
        return
    try:
        yield
    finally:
        DEVICE.acquire()


def wait(device: torch.device) -> None:
    """Wait for the current stream, while other threads may use the device."""
    if device.type == "cuda":
        with released():
            torch.cuda.current_stream(device).synchronize()
