"""What the tests of the studies that run as a grid share."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """grid/fake_training.py under a name by which worker processes find it too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "grid"))
    return importlib.import_module("fake_training")
