"""One writer at a time: a file lock, which the kernel releases when its process ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


class Taken(Exception):
    """Another process holds the lock; the message says which."""


@contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a lock file; raise `Taken` where another process still holds it after so many seconds."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=patience, poll_interval=0.1)
    except Timeout:
        raise Taken(path.read_text(encoding="utf-8") or "another process") from None
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock now."""
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False
