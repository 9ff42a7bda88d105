"""One writer at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexact.studies.grid.locks import Taken, is_locked, locked


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        assert is_locked(path)
        with pytest.raises(Taken, match=f"process {os.getpid()}"), locked(path):
            pass
    assert not is_locked(path)


def test_a_file_that_its_holder_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening of the file and its lock, the process that held it removed it."""
    path, opened = tmp_path / "lock", os.open

    def removed_once(*arguments: object) -> int:
        handle = opened(*arguments)  # type: ignore[arg-type]
        monkeypatch.undo()
        path.unlink()
        return handle

    monkeypatch.setattr("flexact.studies.grid.locks.os.open", removed_once)
    with locked(path):
        assert is_locked(path)
