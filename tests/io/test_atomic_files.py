"""Tests of atomic writes: a file is written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexact.io.atomic_files import made_folder, write_rows, write_whole


def test_text_and_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    write_whole(tmp_path / "text", "π\n")
    write_whole(tmp_path / "bytes", b"\x89PNG\r\n")
    assert (tmp_path / "text").read_bytes() == "π\n".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\x89PNG\r\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "text"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, "old")

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_new_folders_are_removed_if_they_are_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"), made_folder(tmp_path / "a" / "b"):
        raise ValueError("empty")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    with pytest.raises(ValueError, match="once more"), made_folder(tmp_path / "a" / "b"):
        raise ValueError("once more")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]
    with made_folder(tmp_path / "c"):
        pass
    assert (tmp_path / "c").is_dir()


def test_rows_are_written_as_csv_into_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.csv"
    write_rows(path, [{"name": "a, b", "value": 1}, {"name": "c", "value": 2.5}])
    assert path.read_bytes() == b'name,value\n"a, b",1\nc,2.5\n'
