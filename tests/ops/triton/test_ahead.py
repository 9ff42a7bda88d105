"""Tests of background builds: each kernel is built once, and an error of a build does not reach the training."""

from __future__ import annotations

import threading

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
