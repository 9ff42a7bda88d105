"""Fixtures of the studies that run as a grid: a trainer that takes no time, and small image data sets."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports grid/fake_training.py under a name by which worker processes find it too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "grid"))
    return importlib.import_module("fake_training")


@pytest.fixture(scope="session")
def write_cifar() -> Callable[..., Path]:
    """Returns `write_cifar` of cifar_data/official_layout.py: it writes a small data set in the official layout."""
    path = Path(__file__).parent / "cifar_data" / "official_layout.py"
    spec = importlib.util.spec_from_file_location("flexact_test_official_layout", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_cifar
