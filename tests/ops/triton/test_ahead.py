"""Tests of background builds: each kernel is built once, and an error of a build does not reach the training; what is
needed later does not hold it up."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
import torch
import triton

from flexact.ops.triton import ahead
from flexact.ops.triton.basis import blend
from flexact.ops.triton.launch import Launch


@pytest.fixture(autouse=True)
def nothing_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_started", {})
    monkeypatch.setattr(ahead, "_later", {})
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


class Builder:
    """Stands in for the process that compiles: it waits until it may, and records what it was asked for."""

    def __init__(self, target: str, may: threading.Event, asked: list[str]) -> None:
        self.target, self._may, self._asked, self._ended = target, may, asked, False

    def build(self, request: SimpleNamespace) -> bool:
        self._may.wait()
        if self._ended:
            raise BrokenPipeError
        self._asked.append(request.kernel)
        if request.kernel == "ends the process":
            self._ended = True
            raise BrokenPipeError
        return request.kernel != "fails"

    def close(self) -> None:
        pass


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Starts later builds; `may` lets them begin, and `asked` and `built` tell what was compiled and then loaded."""
    may, asked, built = threading.Event(), list[str](), list[str]()
    monkeypatch.setattr(ahead, "Builder", lambda target: Builder(target, may, asked))
    monkeypatch.setattr(ahead, "_queue", functools.cache(ahead._queue.__wrapped__))
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 1)  # one process

    def start(kernel: str) -> None:
        ahead.start_later(kernel, lambda: SimpleNamespace(target="gpu", kernel=kernel), lambda: built.append(kernel))

    return SimpleNamespace(start=start, may=may, asked=asked, built=built)


def test_a_later_build_is_compiled_once_in_another_process_and_then_loaded(later: SimpleNamespace) -> None:
    for kernel in ("one", "fails", "other", "one", "ends the process", "last"):
        later.start(kernel)
    later.may.set()
    assert not wait(ahead._later.values(), timeout=10).not_done
    later.start("one")
    assert sorted(later.asked) == ["ends the process", "fails", "last", "one", "other"]
    assert sorted(later.built) == ["last", "one", "other"]


def test_what_was_requested_last_is_compiled_first(later: SimpleNamespace) -> None:
    later.start("first")
    while not ahead._later["first"].running():
        time.sleep(0.001)
    for kernel in ("left", "dropped", "withdrawn", "left"):  # after a drop, the candidates left are requested again
        later.start(kernel)
    ahead.wait_for("withdrawn")
    later.start("withdrawn")
    later.may.set()
    assert not wait(ahead._later.values(), timeout=10).not_done
    assert later.asked == ["first", "left", "dropped"]


def test_training_does_not_wait_for_a_later_build_that_has_not_begun(later: SimpleNamespace) -> None:
    later.start("first")
    while not ahead._later["first"].running():
        time.sleep(0.001)
    for kernel in ("needed", "followed"):
        later.start(kernel)
    ahead.wait_for("needed")  # training compiles it itself
    ahead.start("followed", lambda: later.built.append("in a thread"))
    ahead.wait_for("followed")
    assert later.built == ["in a thread"]
    later.may.set()
    later.start("needed")
    later.start("last")
    assert not wait(ahead._later.values(), timeout=10).not_done
    assert later.asked == ["first", "last"]


def test_training_takes_a_kernel_that_another_process_has_compiled(later: SimpleNamespace) -> None:
    later.may.set()
    later.start("a kernel")
    assert not wait(ahead._later.values(), timeout=10).not_done
    ahead.start("a kernel", lambda: later.built.append("again"))
    ahead.wait_for("a kernel")
    assert later.built == ["a kernel"]
    assert not ahead._started


def test_an_older_triton_builds_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton, "AsyncCompileMode")
    ahead.start("a kernel", lambda: None)
    ahead.start_later("a kernel", lambda: pytest.fail("started"), lambda: None)
    assert not ahead._started
    assert not ahead._later


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
