"""One writer at a time: a lock that the kernel lets go of when its process ends, however that ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Taken(Exception):
    """Another process has the lock; the message says which."""


@contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a lock file; raise `Taken` where another process still has it after so many seconds.

    The file stays; only the one that holds it may remove it.
    """
    handle = _taken(path, patience)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Whether a process has the lock at this moment."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def holder(path: Path) -> str:
    """The process that took the lock last, in words."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return f"process {told['pid']} on {told['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _taken(path: Path, patience: float) -> int:
    """A handle of the file, locked. One that its holder removed meanwhile is no lock: another may have been made."""
    until = time.monotonic() + patience
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
            os.close(handle)
        except BlockingIOError:
            os.close(handle)
            if time.monotonic() >= until:
                raise Taken(holder(path)) from None
            time.sleep(0.1)
