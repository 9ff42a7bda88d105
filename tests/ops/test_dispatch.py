"""Tests of the dispatch: which kernels run where, how to override the choice, and the warnings on fallback."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flexact
from flexact import FlexActError
from flexact.ops import closed_form, dispatch, inductor_form, routed_activation
from flexact.ops.blending import Blending
from kernels import using

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Resets the dispatch: nothing forced, nothing disabled, nothing cached, and a GPU that is new enough."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(dispatch, "_forced", None)
    monkeypatch.setattr(dispatch, "_broken", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    forget()
    yield monkeypatch
    forget()


def forget() -> None:
    """Resets the cached facts about the machine."""
    for name in dir(dispatch):
        getattr(getattr(dispatch, name), "cache_clear", lambda: None)()


def without_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "which", lambda *_: None)
    forget()


def no_interpreter(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TRITON_INTERPRET", "0")


# The choice


@pytest.mark.parametrize("interpreter", ["0", "1"])
def test_cpu_tensors_use_the_c_code_even_under_tritons_interpreter(interpreter: str, fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("TRITON_INTERPRET", interpreter)
    fresh.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert dispatch.active("cpu") == dispatch.active(CPU) == ("native", "")


def test_without_a_c_compiler_cpu_tensors_use_torch_operations(fresh: pytest.MonkeyPatch) -> None:
    fresh.delenv("CC", raising=False)
    without_compiler(fresh)
    assert dispatch.active(CPU) == ("measured", "there is no C compiler")


def test_a_variable_cc_that_names_no_command_is_the_reason(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("CC", "/nonexistent -O2")
    forget()
    name, reason = dispatch.active(CPU)
    assert name == "measured"
    assert reason == "the variable CC is '/nonexistent -O2', and there is no such command"


def test_on_windows_another_compiler_would_not_help(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("CC", "cl")
    fresh.setattr(sys, "platform", "win32")
    forget()
    assert dispatch.active(CPU) == ("measured", "the C code does not support Windows")


def test_torch_compile_runs_only_on_request(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert not dispatch.compiles()
    dispatch.use("compiled")
    assert dispatch.compiles()
    assert dispatch.active(CPU) == ("compiled", "")
    dispatch.use("closed_form")
    assert not dispatch.compiles()
    dispatch.use("compiled")
    without_compiler(fresh)
    assert not dispatch.compiles()
    assert dispatch.active(CPU) == ("closed_form", "there is no C++ compiler")


def test_a_large_tensor_with_a_custom_candidate_does_not_wait_for_a_compiler() -> None:
    flexact.register_candidate("test_dispatch_bump", lambda h: torch.exp(-h * h))
    site = flexact.FlexAct(candidates=("relu", "tanh", "test_dispatch_bump"))
    start = time.process_time()
    site(torch.randn(2**20 + 1, requires_grad=True)).sum().backward()
    assert time.process_time() - start < 1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_cuda_tensors_use_triton() -> None:
    assert dispatch.active(CUDA) == ("triton", "")


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("closed_form", CPU, ("closed_form", "closed_form was requested")),
        ("closed_form", CUDA, ("closed_form", "closed_form was requested")),
        ("plain", CPU, ("plain", "plain was requested")),
        ("measured", CUDA, ("measured", "measured was requested")),
        ("compiled", CPU, ("compiled", "")),
        ("compiled", CUDA, ("compiled", "")),
        ("native", CPU, ("native", "")),
        ("native", CUDA, ("closed_form", "there are no kernels for cuda")),
    ],
)
def test_the_environment_variable_forces_a_choice(
    name: str, device: torch.device, expected: tuple[str, str], fresh: pytest.MonkeyPatch
) -> None:
    fresh.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    fresh.setenv("FLEXACT_KERNELS", name)
    assert dispatch.wanted() == name
    assert dispatch.active(device) == expected


def test_use_overrides_the_variable_and_auto_resets_it(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("FLEXACT_KERNELS", "compiled")
    dispatch.use("closed_form")
    assert dispatch.wanted() == "closed_form"
    dispatch.use("auto")
    assert dispatch.wanted() == "compiled"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_triton_can_be_forced_on_the_cpu_only_under_the_interpreter(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("TRITON_INTERPRET", "1")
    dispatch.use("triton")
    assert dispatch.active(CPU) == ("triton", "")
    no_interpreter(fresh)
    forget()
    assert dispatch.active(CPU).name == "closed_form"
    assert dispatch.active(CPU).reason == "triton was requested, but Triton's kernels run on CUDA tensors, not on cpu"


@pytest.mark.parametrize(
    ("wrong", "meant"), [("trition", "triton"), ("closed-form", "closed_form"), ("Compiled", "compiled")]
)
def test_a_misspelt_name_is_refused_with_the_nearest(wrong: Any, meant: str, fresh: pytest.MonkeyPatch) -> None:
    with pytest.raises(FlexActError, match=rf"'{wrong}'.*'{meant}'"):
        dispatch.use(wrong)
    assert dispatch.wanted() == "auto", "a refused name must change nothing"
    fresh.setenv("FLEXACT_KERNELS", wrong)
    with pytest.raises(FlexActError, match=rf"FLEXACT_KERNELS '{wrong}'.*'{meant}'"):
        dispatch.active(CPU)


@pytest.mark.parametrize("wrong", ["", "fast", None, 3])
def test_a_name_that_resembles_none_is_refused_with_the_choices(wrong: Any) -> None:
    with pytest.raises(FlexActError, match="auto, triton, native, compiled, closed_form, plain, measured"):
        dispatch.use(wrong)


def test_an_invalid_variable_stops_the_first_call_of_a_site(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("FLEXACT_KERNELS", "trition")
    with pytest.raises(FlexActError, match="FLEXACT_KERNELS 'trition'"):
        flexact.FlexAct()(torch.randn(3))


# The reasons for a fallback


def test_without_triton(fresh: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    fresh.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest))
    assert dispatch.active(CUDA) == ("measured", "the package triton is not installed")
    dispatch.use("triton")
    assert dispatch.active(CUDA) == ("closed_form", "triton was requested, but the package triton is not installed")


@pytest.mark.parametrize(("version", "runs"), [("3.3.1", False), ("2.10.0", False), ("3.4.0", True), ("3.10.1", True)])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_an_old_triton(version: str, runs: bool, fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(importlib.import_module("triton"), "__version__", version)
    reason = "" if runs else f"triton {version.rpartition('.')[0]} is older than 3.4"
    assert dispatch.active(CUDA) == ("triton" if runs else "measured", reason)


@pytest.mark.parametrize(("capability", "runs"), [((7, 0), False), ((7, 5), True), ((10, 0), True)])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_an_old_gpu(capability: tuple[int, int], runs: bool, fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    reason = "" if runs else "compute capability 7.0 is older than 7.5"
    assert dispatch.active(CUDA) == ("triton" if runs else "measured", reason)


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_triton_cannot_be_forced_on_other_devices(device: str, fresh: pytest.MonkeyPatch) -> None:
    no_interpreter(fresh)
    dispatch.use("triton")
    assert dispatch.active(device).name == "closed_form"
    assert dispatch.active(device).reason.endswith(f"run on CUDA tensors, not on {device}")


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_other_devices_use_torch_operations(device: str, fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert dispatch.active(device) == ("measured", f"there are no kernels for {device}")


def test_a_fallback_warns_once_and_is_permanent() -> None:
    with pytest.warns(UserWarning, match=r"OSError: no compiler.*falls back"):
        dispatch.give_up("triton", "a Triton kernel failed to build", OSError("no compiler"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.give_up("triton", "a Triton kernel failed to build", OSError("again"))
    assert dispatch.active(CUDA) == ("measured", "a Triton kernel failed to build (OSError: no compiler)")


class InvalidCxxCompiler(RuntimeError):
    __module__ = "torch._inductor.exc"


@pytest.mark.parametrize(
    "error",
    [InvalidCxxCompiler("no working compiler"), FileNotFoundError("no working folder")],
    ids=["error", "folder"],
)
def test_after_a_compiler_error_the_fallback_warns_once_and_the_run_continues(
    error: Exception, fresh: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    fresh.setattr(dispatch, "_forced", "compiled")
    fresh.setattr(dispatch, "has_compiler", lambda: True)
    fresh.setattr(inductor_form, "forward", fail)
    h, p = torch.randn(6), torch.tensor([[0.5, 0.5]])
    arguments = (h, torch.zeros(2), p, p, torch.ones(()), ("relu", "tanh"), (0, 1))
    with pytest.warns(UserWarning, match="no working") as said:
        results = [routed_activation(*arguments)[0] for _ in range(2)]
    assert len(said) == 1
    for x in results:
        torch.testing.assert_close(x, (h.relu() + h.tanh()) / 2)
    assert dispatch.active(torch.device("cpu")).name == "closed_form"


def test_a_disabled_choice_is_tried_again_on_request(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(dispatch, "_broken", {"triton": "a reason", "compiled": "another one"})
    fresh.setattr(dispatch, "has_compiler", lambda: True)
    assert dispatch.active(CUDA).reason == "a reason"
    dispatch.use("triton")
    assert dispatch.active(CUDA) == ("triton", "")
    assert dispatch.active(CPU).reason != "a reason"
    dispatch.use("compiled")
    assert dispatch.active(CPU) == ("compiled", "")


def test_only_the_compiler_that_the_user_configures_is_tried(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(shutil, "which", lambda name: name if name == "g++" else None)
    assert dispatch.has_compiler()
    forget()
    fresh.setenv("CXX", "not-there")
    assert not dispatch.has_compiler()


def test_an_empty_variable_is_ignored(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv(dispatch.VARIABLE, "")
    assert dispatch.wanted() == "auto"


def test_triton_of_another_distribution(fresh: pytest.MonkeyPatch) -> None:
    """ROCm's is called pytorch-triton-rocm, and that for Windows triton-windows. The package is triton in each."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    fresh.setattr(importlib.metadata, "version", version)
    assert dispatch.active(CUDA) == ("triton", "")


# The results


@pytest.mark.parametrize("name", ["closed_form", "plain", "native", "auto"])
def test_every_choice_computes_the_same_on_the_cpu(name: Any) -> None:
    torch.manual_seed(0)
    h, p, names = torch.randn(4, 6), torch.softmax(torch.randn(1, 3), -1), ("relu", "tanh", "gelu")
    expected, statistics = closed_form.forward(h, Blending(p, p, torch.ones(()), names, (0, 1, 2), 1, True))
    with using(name):
        x, gathered = routed_activation(h, torch.zeros(3), p, p, torch.ones(()), names, range(3), statistics=True)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(gathered, statistics)


def test_training_on_the_cpu_does_not_import_what_needs_triton() -> None:
    program = """
import sys, torch, flexact
model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
model(torch.randn(3, 2)).sum().backward()
assert not any(name.startswith("flexact.ops.tri") for name in sys.modules)  # torch imports triton itself
"""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", dispatch.VARIABLE)
    }
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
