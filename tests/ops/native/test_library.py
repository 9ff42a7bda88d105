"""Tests of the compilation of the C code: when it runs, what it leaves behind, and what happens where it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flexact.ops import dispatch
from flexact.ops.native import library

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

TRAIN = """
import sys, warnings
import torch, flexact
from flexact.ops import dispatch

torch.manual_seed(0)
model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)))
optimizer = torch.optim.SGD(flexact.param_groups(model, lr=0.1))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(5, 3)).square().mean().backward()
        optimizer.step()
print(dispatch.active("cpu").name, len(said), *(str(one.message).replace("\\n", " ") for one in said))
"""


def script(folder: Path, *lines: str) -> str:
    """Writes a compiler as a shell script, which first adds a line to the file `runs`. Returns its path."""
    path = folder / "compiler"
    path.write_text("\n".join(["#!/bin/sh", f"echo ran >> {folder / 'runs'}", *lines]) + "\n")
    path.chmod(0o755)
    return str(path)


def runs(folder: Path) -> int:
    """Returns how often the compiler of `script` has run."""
    path = folder / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


def start(program: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Starts a fresh process with an empty cache folder inside `folder`."""
    own = {name: value for name, value in os.environ.items() if name not in ("CC", dispatch.VARIABLE)}
    own |= {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, "-c", program], env=own, stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out.strip()


def libraries(folder: Path) -> list[str]:
    """Returns the suffixes of the files in the cache folder, without the results of measurements."""
    cache = folder / "cache" / "flexact"
    found = cache.iterdir() if cache.exists() else ()
    return sorted(path.suffix for path in found if path.suffix != ".json")


@pytest.mark.parametrize("environment", [{"PATH": ""}, {"CC": "nonexistent"}], ids=str)
def test_without_a_compiler_torch_operations_run_silently(environment: dict[str, str], tmp_path: Path) -> None:
    assert output(start(TRAIN, tmp_path, **environment)) == "measured 0"
    assert libraries(tmp_path) == []


def test_a_broken_compiler_is_tried_once_and_mentioned_in_one_warning(tmp_path: Path) -> None:
    broken = script(tmp_path, "echo 'math.h: No such file' >&2", "exit 1")
    name, count, message = output(start(TRAIN, tmp_path, CC=broken)).split(" ", 2)
    assert (name, count) == ("measured", "1")
    assert "math.h: No such file" in message
    assert "falls back to torch operations" in message
    assert runs(tmp_path) == len(library.FLAGS)
    assert libraries(tmp_path) == []


@needs_compiler
def test_a_compiler_without_openmp_or_the_newest_options_is_enough(tmp_path: Path) -> None:
    old = script(tmp_path, 'case "$*" in *-fopenmp*) exit 1;; esac', f'exec {COMPILER} "$@"')
    assert output(start(TRAIN, tmp_path, CC=old)) == "native 0"


@needs_compiler
def test_an_import_compiles_nothing_and_the_first_call_compiles_once_for_all_processes(tmp_path: Path) -> None:
    compiler = script(tmp_path, f'exec {COMPILER} "$@"')
    imported = "import torch, flexact; flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))"
    output(start(imported, tmp_path, CC=compiler))
    assert runs(tmp_path) == 0
    assert libraries(tmp_path) == []
    for _ in range(2):
        assert output(start(TRAIN, tmp_path, CC=compiler)) == "native 0"
    assert runs(tmp_path) == 1
    assert libraries(tmp_path) == [".so"]


@needs_compiler
def test_processes_may_compile_at_the_same_time(tmp_path: Path) -> None:
    other = f"until [ $(wc -l < {tmp_path / 'runs'}) -ge 2 ]; do sleep 0.1; done"  # waits until both compile
    compiler = script(tmp_path, other, f'exec {COMPILER} "$@"')
    both = [start(TRAIN, tmp_path, CC=compiler) for _ in range(2)]
    assert [output(process) for process in both] == ["native 0"] * 2
    assert runs(tmp_path) == 2
    assert libraries(tmp_path) == [".so"]


@needs_compiler
@pytest.mark.parametrize("home", ["missing", "a file", "forbidden"])
def test_without_a_cache_folder_the_library_goes_into_a_temporary_one(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    cache = tmp_path / "cache"
    if home == "missing":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", no_home)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        cache.touch() if home == "a file" else cache.mkdir(mode=0o500)
    found = library.compiled(library.SOURCES)
    assert found.sweep
    assert not Path(found._name).exists() or (home == "forbidden" and os.geteuid() == 0)  # root may write anywhere


@needs_compiler
def test_an_edited_source_and_another_compiler_are_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = tmp_path / "number.c", tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    for number in (2, 3):
        source.write_text(f"int number(void) {{ return {number}; }}")
        for compiler in (str(COMPILER), script(tmp_path, f'exec {COMPILER} "$@"')):
            monkeypatch.setattr(dispatch, "c_compiler", lambda compiler=compiler: (compiler,))
            for _ in range(2):
                assert library.compiled((source,)).number() == number
    assert runs(tmp_path) == 2
    assert len(list(cache.glob("flexact/number-*.so"))) == 4


WORKERS = """
import sys
import torch, flexact
from torch.utils.data import DataLoader, Dataset
from flexact.ops import dispatch

H = torch.linspace(-3, 3, 200_000)  # several chunks, for several threads

class Site(Dataset):
    def __init__(self):
        self.site = flexact.FlexAct(candidates=("relu", "tanh", "gelu"))

    def __len__(self):
        return 2

    def __getitem__(self, index):
        with torch.no_grad():
            x = self.site(H)
        assert dispatch.active("cpu").name == "native"
        return x

if __name__ == "__main__":
    torch.set_num_threads(2)
    own = Site()
    expected = own[0].clone()
    for method in ("fork", "spawn"):
        for x in DataLoader(own, batch_size=None, num_workers=1, multiprocessing_context=method, timeout=60):
            assert torch.equal(x, expected)
"""


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_workers_of_a_data_loader_run_it_too(tmp_path: Path) -> None:
    program = tmp_path / "workers.py"  # a file, because spawned processes import it
    program.write_text(WORKERS)
    subprocess.run([sys.executable, str(program)], check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "2"})
