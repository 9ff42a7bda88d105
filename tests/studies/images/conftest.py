"""What the tests of the image study share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def write_cifar() -> Callable[..., Path]:
    """`write_cifar` of official_layout.py: a small data set in the official layout."""
    path = Path(__file__).with_name("official_layout.py")
    spec = importlib.util.spec_from_file_location("flexact_test_official_layout", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_cifar
