"""Tests of the lock of a grid's folder, which has one writer at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexact import FlexActError
from flexact.studies.grid.cell_task import is_locked, locked


def test_only_one_process_holds_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, ""):
        assert is_locked(path)
        with pytest.raises(FlexActError, match=f"^process {os.getpid()} on .* has it"), locked(path, "HOLDER has it"):
            pass
    assert not is_locked(path)
