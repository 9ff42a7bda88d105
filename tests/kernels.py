"""Selects the implementation of the routed activation for a part of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from flexact.ops import dispatch


@contextmanager
def using(kernels: dispatch.Kernels) -> Iterator[None]:
    """Runs with an implementation, as in a process in which none has failed yet."""
    with mock.patch.object(dispatch, "_forced", None), mock.patch.object(dispatch, "_broken", {}):
        dispatch.use(kernels)
        try:
            yield
        finally:
            dispatch.active.cache_clear()
