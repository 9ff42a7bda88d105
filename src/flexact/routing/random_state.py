"""Running a model without changing the random states."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def same_random_state(model: nn.Module) -> Iterator[None]:
    """Restore the random states of torch, Python and numpy on exit."""
    numpy: Any = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng({parameter.device for parameter in model.parameters() if parameter.is_cuda}):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
