"""Fuzzes the public API: invalid calls raise FlexActError, and a refused call changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fuzz_machine import PublicApi
from hypothesis import HealthCheck, settings

# Derandomized by the profile of tests/conftest.py. More: python benchmarks/fuzz.py --examples 10000
PublicApi.TestCase.settings = settings(
    max_examples=200, stateful_step_count=12, suppress_health_check=list(HealthCheck), database=None
)
TestPublicApi = PublicApi.TestCase


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Uses one thread: several threads slow down networks this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
