"""Tests of the choice between the closed form and plain torch by measurement."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from flexact.ops import closed_form, dispatch, measured_form, plain_form, routed_activation
from flexact.ops.blending import Blending
from flexact.ops.closed_form_blends import ClosedFormBlends
from flexact.ops.operators import Implementation
from kernels import using

NAMES = ("relu", "tanh", "gelu")
SIZE = 1000
FORMS: dict[measured_form.Form, Implementation] = {
    "closed_form": Implementation(closed_form.forward, closed_form.backward, ClosedFormBlends),
    "plain": Implementation(plain_form.forward, plain_form.backward, ClosedFormBlends),
}


class Clock:
    """Stands in for the clock: one form takes a second, the other two. Counts the measurements."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fastest: measured_form.Form = "plain"
        self.measurements = 0
        patch.setattr(measured_form, "_measured", self._measured)

    def _measured(self, h: Tensor, blending: object, forms: dict[measured_form.Form, object]) -> dict[str, float]:
        self.measurements += 1
        return {name: 1.0 if name == self.fastest else 2.0 for name in forms}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, in a process that has not measured anything."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget(monkeypatch)
    with using("measured"):
        yield tmp_path / "flexact"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def forget(patch: pytest.MonkeyPatch) -> None:
    """Makes the process forget its choices, as a new one."""
    patch.setattr(measured_form, "_chosen", {})


def call(size: int = SIZE, names: tuple[str, ...] = NAMES, dtype: torch.dtype = torch.float32) -> str:
    """Returns the form that runs in training on a tensor of this size: plain torch saves the graph of its result."""
    h, k = torch.linspace(-3, 3, size).to(dtype).requires_grad_(), len(names)
    p, logits = torch.full((1, k), 1 / k), torch.zeros(k, requires_grad=True)
    x, _ = routed_activation(h, logits, p, p, torch.ones(()), names, range(k), statistics=True)
    node = x.grad_fn
    graphs = [one for one in node.saved_tensors if one.grad_fn not in (None, node)]  # type: ignore[union-attr]
    return "plain" if graphs else "closed_form"


@pytest.mark.parametrize("fastest", ["plain", "closed_form"])
def test_the_faster_form_runs_from_the_first_call_on(fastest: measured_form.Form, clock: Clock) -> None:
    clock.fastest = fastest
    assert [call() for _ in range(3)] == [fastest] * 3
    assert clock.measurements == 1


def test_another_process_reads_the_choice_whatever_it_would_measure(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    call()
    forget(monkeypatch)
    clock.fastest = "closed_form"
    assert call() == "plain"
    assert clock.measurements == 1
    assert measured_form.kept(torch.device("cpu")) == {"plain": 1}


def test_sizes_within_a_factor_of_two_share_a_choice_and_other_inputs_have_their_own(clock: Clock) -> None:
    for size in (513, 1000, 1024):
        call(size)
    assert clock.measurements == 1
    call(512)
    call(1025)
    call(dtype=torch.bfloat16)
    call(names=("relu", "tanh"))
    assert clock.measurements == 5


def test_aliases_and_the_order_of_candidates_share_what_is_kept(clock: Clock, folder: Path) -> None:
    call(names=("relu", "silu"))
    call(names=("swish", "relu"))
    assert clock.measurements == 1
    assert len([*folder.iterdir()]) == 1


def test_a_real_measurement_leaves_no_trace_but_its_file(folder: Path) -> None:
    h, logits = torch.randn(SIZE, requires_grad=True), torch.zeros(3, requires_grad=True)
    p, before = torch.full((1, 3), 1 / 3), torch.random.get_rng_state()
    x, _ = routed_activation(h, logits, p, p, torch.ones(()), NAMES, range(3))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert h.grad is None
    assert logits.grad is None
    (path,) = folder.iterdir()
    record = json.loads(path.read_text())
    assert record["form"] == min(record["seconds"], key=record["seconds"].get)
    assert all(0 < seconds < 1 for seconds in record["seconds"].values())
    torch.testing.assert_close(x, (h.relu() + h.tanh() + torch.nn.functional.gelu(h)) / 3)


@pytest.mark.parametrize("slow", FORMS)
def test_the_form_that_takes_longer_is_measured_to_do_so(slow: measured_form.Form) -> None:
    def wait(*arguments: Any) -> Any:
        time.sleep(0.02)
        return FORMS[slow].forward(*arguments)

    forms = FORMS | {slow: FORMS[slow]._replace(forward=wait)}
    p = torch.full((1, 3), 1 / 3)
    seconds = measured_form._measured(
        torch.randn(SIZE), Blending(p, p, torch.ones(()), NAMES, (0, 1, 2), 1, True), forms
    )
    assert max(seconds, key=seconds.__getitem__) == slow
    assert seconds[slow] > 0.02


# Where the choice is kept


def test_the_first_of_several_processes_decides(clock: Clock, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call()
    (path,) = folder.iterdir()
    path.unlink()
    forget(monkeypatch)
    with mock.patch.object(json, "dumps", side_effect=lambda record: path.write_text('{"form": "closed_form"}') and ""):
        assert call() == "closed_form"  # another process wrote its choice after this one had measured
    assert call() == "closed_form"
    assert clock.measurements == 2


def test_a_file_that_cannot_be_read_is_replaced(clock: Clock, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("", "{", "[]", '{"form": "fast"}'):
        call()
        (path,) = folder.iterdir()
        path.write_text(content)
        forget(monkeypatch)
        assert call() == "plain"
        assert json.loads(path.read_text())["form"] == "plain"


@pytest.mark.parametrize("mode", [0o777, 0o500], ids=["of others", "read-only"])
def test_what_cannot_be_kept_is_not_chosen(mode: int, clock: Clock, folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    if os.access(folder, os.W_OK) and mode == 0o500:
        pytest.skip("this user can write to any folder")
    assert call() == "closed_form"
    assert [*folder.iterdir()] == []


# Where nothing is measured


@pytest.mark.parametrize("kernels", ["closed_form", "plain"])
def test_a_request_is_not_overridden(kernels: dispatch.Kernels, clock: Clock) -> None:
    with using(kernels):
        assert call() == kernels
    assert clock.measurements == 0


def test_inputs_that_plain_torch_does_not_support(clock: Clock) -> None:
    assert call(names=("relu", "relu_squared")) == "closed_form"
    assert clock.measurements == 0


def test_without_gradients_and_in_traces(clock: Clock) -> None:
    h, p = torch.randn(SIZE), torch.full((1, 3), 1 / 3)

    def routed(h: Tensor) -> Tensor:
        return routed_activation(h, torch.zeros(3), p, p, torch.ones(()), NAMES, range(3))[0]

    routed(h)
    torch.func.grad(lambda h: routed(h).sum())(h)
    torch.func.vmap(routed)(h)
    make_fx(routed)(h)
    torch.jit.trace(routed, h.requires_grad_())
    torch.compile(routed, backend="eager")(h)
    with torch.device("meta"):
        routed_activation(torch.empty(9, requires_grad=True), torch.zeros(3), p, p, torch.ones(()), NAMES, range(3))
    assert clock.measurements == 0


def test_large_tensors_of_a_cpu_which_would_take_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_form, "LARGEST_ON_CPU", SIZE - 1)
    with mock.patch.object(measured_form, "_measured") as measured:
        assert call() == "closed_form"
    assert not measured.called


def test_if_the_memory_does_not_suffice(folder: Path) -> None:
    with mock.patch.object(measured_form, "_timed", side_effect=torch.OutOfMemoryError):
        assert call() == "closed_form"
    assert [*folder.iterdir()] == []


# What surrounds the first call


def test_hooks_and_modes_of_the_caller_do_not_see_the_measurement(folder: Path) -> None:
    counts, packed = [], list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    for _ in range(2):
        packed.clear()
        with (
            saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16),
            torch.device("meta"),
        ):
            h = torch.linspace(-3, 3, SIZE, device="cpu", requires_grad=True)
            p, one = torch.full((1, 3), 1 / 3, device="cpu"), torch.ones((), device="cpu")
            routed_activation(h, torch.zeros(3, device="cpu"), p, p, one, NAMES, range(3))
        counts.append(len(packed))
    assert counts[0] == counts[1] > 0
    assert len([*folder.iterdir()]) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_first_call_inside_activation_checkpointing(use_reentrant: bool) -> None:
    h, p = torch.randn(SIZE, requires_grad=True), torch.full((1, 3), 1 / 3)

    def routed(h: Tensor) -> Tensor:
        return routed_activation(h, torch.zeros(3), p, p, torch.ones(()), NAMES, range(3))[0]

    checkpoint(routed, h, use_reentrant=use_reentrant).sum().backward()
    with using("closed_form"):
        torch.testing.assert_close((h.grad,), torch.autograd.grad(routed(h).sum(), h))
