"""Tests of who may write to the cache of compiled libraries, and of a cache that cannot be used."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flexact.ops import dispatch
from flexact.ops.dispatch import CannotBuild
from flexact.ops.native import library

pytestmark = pytest.mark.skipif(not dispatch.c_compiler(), reason="there is no C compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small C file, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "two.c"
    path.write_text("int two(void) { return 2; }")
    return path


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    with mock.patch.object(library, "_compile", wraps=library._compile) as found:
        yield found


def two(source: Path) -> int:
    return library.compiled((source,)).two()


def kept() -> list[Path]:
    folder = library.cache_folder()
    return [] if folder is None else sorted(folder.iterdir())


def test_a_library_is_compiled_once_and_only_its_owner_can_write_to_it(source: Path, compiling: mock.Mock) -> None:
    umask = os.umask(0)
    try:
        assert two(source) == two(source) == 2
    finally:
        os.umask(umask)
    (path,) = kept()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert compiling.call_count == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777], ids=oct)
def test_a_folder_that_others_can_write_to_is_not_used(mode: int, source: Path, compiling: mock.Mock) -> None:
    assert two(source) == 2
    (path,) = kept()
    path.write_bytes(b"planted")
    path.parent.chmod(mode)
    assert library.cache_folder() is None
    assert two(source) == 2
    assert compiling.call_count == 2
    assert path.read_bytes() == b"planted"


def test_a_library_that_others_can_write_to_is_replaced(source: Path, compiling: mock.Mock) -> None:
    assert two(source) == 2
    (path,) = kept()
    path.write_bytes(b"planted")
    path.chmod(0o666)
    assert two(source) == two(source) == 2
    assert compiling.call_count == 2
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_of_another_user_is_not_used(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert two(source) == 2
    folder = library.cache_folder()
    assert folder is not None
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    assert library.cache_folder() is None
    assert two(source) == 2


def test_a_link_to_a_folder_of_ones_own_is_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "flexact").symlink_to(tmp_path / "elsewhere")
    assert two(source) == 2
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_a_damaged_library_and_a_folder_without_machine_code_cost_a_compilation(
    source: Path, compiling: mock.Mock
) -> None:
    assert two(source) == 2
    (path,) = kept()
    path.write_bytes(path.read_bytes()[:100])
    assert two(source) == two(source) == 2
    assert compiling.call_count == 2


def test_a_full_folder_costs_a_compilation(source: Path, compiling: mock.Mock) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "no space left")

    with mock.patch.object(tempfile, "mkstemp", full):
        assert two(source) == two(source) == 2
    assert compiling.call_count == 2
    assert kept() == []


def test_an_unfinished_copy_leaves_no_file(source: Path) -> None:
    with mock.patch.object(os, "replace", side_effect=OSError):
        assert two(source) == 2
    assert kept() == []


def test_a_user_without_a_home_has_no_cache(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    with mock.patch.object(Path, "home", side_effect=RuntimeError("Could not determine home directory.")):
        assert library.cache_folder() is None
        assert two(source) == 2


def test_clang_never_loads_its_own_openmp_runtime(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like_clang = (*dispatch.c_compiler(), "-D__clang__")
    monkeypatch.setattr(dispatch, "c_compiler", lambda: like_clang)
    assert library.compiled(library.SOURCES).sweep
    (path,) = kept()
    assert b"GOMP_parallel" not in path.read_bytes()
    assert b"__kmpc_fork_call" not in path.read_bytes()


@pytest.mark.parametrize("code", ["int two(void) { return seventeen; }", "#error seventeen"])
def test_the_error_of_the_compiler_is_shown(code: str, source: Path) -> None:
    source.write_text(code)
    with pytest.raises(CannotBuild, match="seventeen"):
        library.compiled((source,))


def test_a_compiler_that_hangs_is_stopped(source: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    build = library.Build((source,), (str(compiler),), ((),), (), (), timeout=1)
    with pytest.raises(CannotBuild, match="compiler did not finish within 1 s"):
        library.loaded(build, str)
