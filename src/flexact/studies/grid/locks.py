"""File locks, which the kernel releases when their process ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


class Taken(Exception):
    """Another process holds the lock; the message names it."""


@contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a lock file; raise `Taken` if another process still holds it after `patience` seconds."""
    try:
        with FileLock(path).acquire(timeout=patience, poll_interval=0.1):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
            yield
    except Timeout:
        raise Taken(path.read_text(encoding="utf-8") or "another process") from None


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock now."""
    if not path.exists():
        return False
    try:
        FileLock(path).acquire(timeout=0).lock.release()
    except Timeout:
        return True
    return False
