"""Tests of background builds: each kernel is built once, and an error of a build does not reach the training."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import triton

from flexact.ops.triton import ahead
from flexact.ops.triton.basis import blend
from flexact.ops.triton.launch import Launch


@pytest.fixture(autouse=True)
def nothing_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_started", {})
    monkeypatch.setattr(triton, "AsyncCompileMode", object, raising=False)


def test_a_build_runs_once_in_another_thread_and_can_be_awaited() -> None:
    threads: list[threading.Thread] = []
    for _ in range(3):
        ahead.start("a kernel", lambda: threads.append(threading.current_thread()))
    ahead.wait_for("a kernel")
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_a_failed_build_in_the_background_does_not_raise() -> None:
    def fail() -> None:
        raise OSError("no compiler")

    ahead.start("a kernel", fail)
    ahead.wait_for("a kernel")
    ahead.wait_for("another kernel")


def test_an_older_triton_builds_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton, "AsyncCompileMode")
    ahead.start("a kernel", lambda: None)
    assert not ahead._started


def test_a_triton_that_loads_launchers_differently_builds_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ahead.launcher_build, "_load_module_from_path", raising=False)
    ahead.start("a kernel", lambda: None)
    assert not ahead._started


LAUNCHERS = """
import sys, threading
from triton.runtime import build
from flexact.ops.triton import ahead

# As Triton's nvidia/driver.py generates it.
SOURCE = '''
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
'''

def launcher(number):
    return build.compile_module_from_src(src=SOURCE % number, name="__triton_launcher")

def load(number):
    for _ in range(100):
        if launcher(number).launch() != number:
            wrong.append(number)

if "safely" in sys.argv:
    ahead.load_launchers_safely()
first = [launcher(number) for number in range(3)]
again = launcher(0)  # changes the module of launcher 2, which was loaded last
wrong = [number for number, module in enumerate(first) if module.launch() != number]
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(wrong))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ahead.launcher_build, "_load_module_from_path"), reason="this Triton loads differently")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="builds a C extension")
def test_threads_that_load_launchers_get_their_own(tmp_path: Path) -> None:
    def wrong_launchers(*arguments: str) -> int:
        environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", LAUNCHERS, *arguments]
        return int(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)

    assert wrong_launchers() > 0, "Triton's own loading is safe now, so load_launchers_safely can go"
    assert wrong_launchers("safely") == 0


def test_a_kernel_starts_the_builds_of_all_variants_that_it_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def record(launch: Launch, device: int, dtypes: tuple[torch.dtype, ...]) -> None:
        built.append((launch.kernel, dtypes))

    monkeypatch.setattr(Launch, "_compile", record)
    first, second, third = (Launch(kernel, (1,), (), ()) for kernel in ("first", "second", "third"))
    first.prepares(second, lambda h, partials: (h, h, partials))
    second.prepares(third, lambda h, delta, partials: (partials,))
    for _ in range(2):
        first.build_ahead(-1, (torch.bfloat16, torch.float32))
    for build in ahead._started.values():
        build.result()
    dtypes = (torch.bfloat16, torch.float32)
    assert sorted(built) == [("first", dtypes), ("second", (torch.bfloat16, *dtypes)), ("third", dtypes[1:])]


def test_the_picks_of_a_blend_have_the_constants_of_committed_sites() -> None:
    keys, alive = ("relu", "leaky_relu", "identity", "selu", "sine"), (1, 2, 3)
    committed = [blend(keys, (k,)) for k in alive]
    picks = blend(keys, alive).picks()
    assert [(pick.constants(True), pick.alive) for pick in picks] == [(c.constants(True), c.alive) for c in committed]
