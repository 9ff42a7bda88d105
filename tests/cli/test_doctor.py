"""What `flexact doctor` says about a machine."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import flexact
from flexact.cli import doctor
from flexact.ops import dispatch


def test_it_names_versions_devices_and_kernels() -> None:
    found = doctor.examine()
    assert found.versions["torch"] == torch.__version__
    assert found.versions["flexact"] == version("flexact")
    assert list(found.versions) == ["flexact", "python", "torch", "triton", "CUDA", "cuDNN"]
    processor = found.devices[0]
    assert (processor.name, processor.kernels, processor.reason) == ("cpu", *dispatch.active("cpu"))
    assert re.match(r"\d+ cores, \d+ threads, ", processor.about)


def test_it_says_why_no_faster_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXACT_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    text = doctor.lines(doctor.examine())
    assert (
        "cpu kernels: closed_form (triton was asked for, but Triton's kernels run on CUDA tensors, not on cpu)" in text
    )


def test_a_wrong_choice_of_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXACT_KERNELS", "trition")
    with pytest.raises(flexact.FlexActError, match="did you mean 'triton'"):
        doctor.examine()


def test_a_missing_package_names_its_extra() -> None:
    missing = doctor.Findings({}, [], [doctor.Package("pandas", "frame", None), doctor.Package("rich", "cli", "13.0")])
    assert doctor.lines(missing) == ["pandas: not installed; pip install 'flexact[frame]'", "rich: 13.0"]


def test_the_packages_are_those_of_the_extras() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        extra: {re.split(r"[\[<>=; ]", requirement)[0] for requirement in requirements} - {"flexact"}
        for extra, requirements in project["optional-dependencies"].items()
        if extra != "dev"
    }
    assert set(doctor.PACKAGES) == set().union(*extras.values())
    for package, extra in doctor.PACKAGES.items():
        assert package in extras[extra]


def test_a_card_is_shown_with_its_memory_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        name, total_memory, major, minor = "NVIDIA H200", 140 * 2**30, 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Card)
    monkeypatch.setattr(
        dispatch, "active", lambda device: dispatch.Active("closed_form", "triton 2.1 is older than 3.2")
    )
    assert doctor.examine().devices[1] == doctor.Device(
        "cuda:0", "NVIDIA H200, 140.0 GiB, compute capability 9.0", "closed_form", "triton 2.1 is older than 3.2"
    )


def test_the_command_prints_plain_lines() -> None:
    done = subprocess.run([sys.executable, "-m", "flexact", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"torch: {torch.__version__}" in done.stdout.splitlines()
