"""Running code without changing the random states."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the random states of torch, Python and numpy on exit."""
    numpy: Any = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
