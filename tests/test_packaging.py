"""Tests that the wheel and the source archive build, and that the wheel works where only torch is installed."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("build", "hatchling", "twine")

USE = """
import torch
import flexact

model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
flexact.Schedule(model, 2).step()
model(torch.randn(3, 2)).sum().backward()
plain = flexact.extract(model, commit=True)
assert not any(isinstance(module, flexact.FlexAct) for module in plain.modules())
print(flexact.__file__)

import flexact.cli.app

flexact.cli.app.main([])
"""


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a fresh Python process, which a test may expect to fail."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and with the wheel that was built from it."""
    for package in NEEDED:
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("dist")
    made = run("-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture(scope="module")
def only_torch(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages: the wheel, unpacked as an installer would, and links to torch and its requirements."""
    folder = tmp_path_factory.mktemp("packages")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    waiting, seen = ["torch"], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))
        wanted = map(Requirement, distribution.requires or ())
        waiting += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return folder


def test_both_archives_pass_twine_check(built: Path) -> None:
    checked = run("-m", "twine", "check", "--strict", *built.iterdir())
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist()}
    assert {name.parts[0].partition("-")[0] for name in names} == {"flexact"}
    source = ROOT / "src"
    written = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {name for name in names if name.parts[0] == "flexact"} == written
    assert Path("flexact/py.typed") in names


def test_the_source_archive_contains_what_make_test_needs(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {Path(*Path(name).parts[1:]).as_posix() for name in opened.getnames()}
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        assert name in names
    assert "tests/test_packaging.py" in names


def test_the_wheel_works_where_only_torch_is_installed_and_its_command_names_the_missing_extra(
    only_torch: Path,
) -> None:
    # -S leaves out the packages of this environment, -P the working directory.
    used = run("-S", "-P", "-W", "ignore", "-c", USE, PYTHONPATH=str(only_torch))
    assert Path(used.stdout.strip()).is_relative_to(only_torch), used.stderr
    assert used.returncode == 2
    assert "flexact[cli]" in used.stderr
    assert "Traceback" not in used.stderr
