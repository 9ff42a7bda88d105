"""Fixtures: the small training, under a name by which worker processes and the command find it too."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import flexact
from flexact.studies.compare.comparison import Compared


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("small_training")


@pytest.fixture
def comparing(small: ModuleType, tmp_path: Path) -> Iterator[Callable[..., Compared]]:
    """Runs `flexact.compare` on the small training, in this process unless options say otherwise."""

    def compared(train: Any = small.train, build: Any = small.build, **options: Any) -> Compared:
        usual = {"candidates": small.CANDIDATES, "seeds": 3, "out": tmp_path / "out", "engine": "inline"}
        return flexact.compare(build, train, **(usual | {"device": "cpu", "quiet": True} | options))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\d+ steps are few for a pick")
        yield compared
