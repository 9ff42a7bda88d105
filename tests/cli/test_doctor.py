"""Tests of `flexact doctor`, which describes the machine and the kernels that run on it."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

import flexact
from flexact.cli import doctor
from flexact.ops import dispatch
from kernels import using


def test_it_names_versions_devices_and_kernels() -> None:
    found = dict(line.split(": ", 1) for line in doctor.lines())
    assert found["torch"] == torch.__version__
    assert found["flexact"] == version("flexact")
    assert list(found)[:6] == ["flexact", "python", "torch", "triton", "CUDA", "cuDNN"]
    kernels, reason = dispatch.active("cpu")
    assert found["cpu kernels"] == (f"{kernels} ({reason})" if reason else kernels)
    assert re.match(r"(1 core|\d+ cores), (1 thread|\d+ threads), ", found["cpu"])


def test_it_says_why_faster_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXACT_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with using("auto"):
        output = doctor.lines()
    reason = "triton was requested, but Triton's kernels run on CUDA tensors, not on cpu"
    assert f"cpu kernels: closed_form ({reason})" in output


def test_an_invalid_choice_of_kernels_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXACT_KERNELS", "trition")
    with using("auto"), pytest.raises(flexact.FlexActError, match="did you mean 'triton'"):
        doctor.lines()


def _without_packages(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Returns the output on a machine that lacks some packages."""

    def installed(name: str) -> str:
        if name in names:
            raise PackageNotFoundError(name)
        return "13.0"

    monkeypatch.setattr(doctor, "version", installed)
    return doctor.lines()


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    output = _without_packages(monkeypatch, "pandas")
    assert "pandas: not installed; pip install 'flexact[frame]'" in output
    assert "rich: 13.0" in output


def test_the_packages_match_the_extras() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        extra: {re.split(r"[\[<>=; ]", requirement)[0] for requirement in requirements} - {"flexact"}
        for extra, requirements in project["optional-dependencies"].items()
        if extra != "dev"
    }
    extras[""] = {"torchvision", "timm", "onnx"}  # as a user would install them
    assert {package for own in doctor.PACKAGES.values() for package in own} == set().union(*extras.values())
    for extra, packages in doctor.PACKAGES.items():
        assert set(packages) <= extras[extra]


@pytest.mark.parametrize("package", ["timm", "torchvision", "onnx"])
def test_packages_outside_the_extras_are_listed_with_their_version(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"{package}: {version(package)}" in doctor.lines()
    assert f"{package}: not installed; pip install {package}" in _without_packages(monkeypatch, package)


def test_a_gpu_is_shown_with_its_memory_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor = "NVIDIA H200", 140 * 2**30, 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(
        dispatch, "active", lambda device: dispatch.Active("closed_form", "triton 2.1 is older than 3.2")
    )
    output = doctor.lines()
    assert "cuda:0: NVIDIA H200, 140.0 GiB, compute capability 9.0" in output
    assert "cuda:0 kernels: closed_form (triton 2.1 is older than 3.2)" in output


def test_the_command_prints_plain_lines() -> None:
    done = subprocess.run([sys.executable, "-m", "flexact", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"torch: {torch.__version__}" in done.stdout.splitlines()


def _run_doctor(**environment: str) -> dict[str, str]:
    """Returns what the command prints in a process with other environment variables."""
    own = {name: value for name, value in os.environ.items() if name not in ("CC", dispatch.VARIABLE)} | environment
    done = subprocess.run([sys.executable, "-m", "flexact", "doctor"], env=own, stdout=subprocess.PIPE, text=True)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_without_a_c_compiler_it_says_so() -> None:
    found = _run_doctor(PATH="")
    assert found["cpu kernels"] == "measured (there is no C compiler)"
    assert found["C compiler"] == "none (there is no C compiler; install gcc or clang, or set the variable CC)"


def test_a_variable_cc_that_names_no_command_is_shown() -> None:
    found = _run_doctor(CC="/nonexistent")
    assert found["cpu kernels"] == "measured (the variable CC is '/nonexistent', and there is no such command)"
    assert "the variable CC is '/nonexistent'" in found["C compiler"]


TRAIN = "import torch, flexact; flexact.FlexAct(('relu', 'tanh'))(torch.ones(9, requires_grad=True)).sum().backward()"


def test_it_says_what_was_measured(tmp_path: Path) -> None:
    own = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    about = "closed_form or plain, measured at the first training call of a site; so far"
    assert _run_doctor(**own)["cpu forms"] == f"{about} none (kept in {tmp_path / 'flexact'})"
    subprocess.run([sys.executable, "-c", TRAIN], env=os.environ | own, check=True)
    assert re.match(rf"{about} (closed_form|plain) 1 time \(kept in ", _run_doctor(**own)["cpu forms"])
    (tmp_path / "flexact").chmod(0o777)
    assert _run_doctor(**own)["cpu forms"].startswith("closed_form, since there is no cache folder")


@pytest.mark.skipif(not dispatch.c_compiler(), reason="there is no C compiler")
@pytest.mark.parametrize("kernels", ["native", "triton"])
def test_it_lists_the_inputs_that_fall_back(kernels: dispatch.Kernels) -> None:
    with using(kernels):
        (line,) = (line for line in doctor.lines() if line.startswith("cpu falls back to closed_form: "))
    assert "float64" in line
    assert ("per channel" in line) == (kernels == "native")
    assert ("custom candidates" in line) == (kernels == "triton")


def test_it_tries_the_c_compiler_and_shows_its_error(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    compiler.chmod(0o755)
    found = _run_doctor(CC=str(compiler), XDG_CACHE_HOME=str(tmp_path))
    assert found["cpu kernels"].startswith("measured (flexact's CPU kernels cannot be built")
    assert "no space left" in found["cpu kernels"]


@pytest.mark.skipif(not dispatch.c_compiler(), reason="there is no C compiler")
def test_it_names_the_c_compiler_and_the_cache_folder(tmp_path: Path) -> None:
    found = _run_doctor(XDG_CACHE_HOME=str(tmp_path))
    assert found["cpu kernels"] == "native"
    assert found["C compiler"].endswith(f"its libraries are kept in {tmp_path / 'flexact'}")
    (tmp_path / "flexact").chmod(0o777)
    assert "are not kept" in _run_doctor(XDG_CACHE_HOME=str(tmp_path))["C compiler"]
