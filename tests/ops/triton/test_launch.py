"""Tests that the kernels build with Triton's compiler, which is stricter than its interpreter, without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from flexact.ops.triton import launch, tiles
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.tiles import FLAT, MOMENTS, MOST_PLANS, Tiles, by_channel

BUILD = """
import torch
from flexact.ops.triton import kernels, routed
from flexact.ops.blending import Blending
from flexact.ops.triton.basis_functions import FORMS
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.moments import moments

built = []

def build(launch, *tensors):
    kernel, arguments = launch.kernel, (*launch.missing, *tensors, *launch.numbers)
    names = kernel.arg_names[len(arguments):]
    constants = [name == "FAST" or value for name, value in zip(names, launch.constants, strict=True)]  # as on a GPU
    compiled = kernel.warmup(*arguments, *constants, grid=launch.grid, num_warps=launch.warps)
    built.append((kernel, len(compiled.asm["cubin"])))

Launch.__call__ = build

def norm():
    return routed.Norm(torch.rand(2, 6), torch.rand(6), torch.rand(6))

names = tuple(FORMS)
every, few = tuple(range(len(names))), (0, 3)
temperature, h = torch.tensor(0.5), torch.randn(4, 6, 5, 7, dtype=torch.bfloat16)
for rows, y, alive in ((1, h, every), (6, h.to(memory_format=torch.channels_last), few)):
    p = torch.rand(rows, len(names))
    routed.forward(y, Blending(p, p, temperature, names, alive, 1, True))
    routed.backward(y, y, Blending(p, p, temperature, names, alive, 1, False), True)
    moments(y, (torch.zeros(6), torch.ones(6), torch.tensor(3)), 0.1, 1e-5)
    for other in ((None, None), (y, norm())) if rows == 1 else ((y, None),):
        preactivation = routed.Preactivation(norm(), *other, True)
        routed.forward(y, Blending(p, p, temperature, names, few, 1, True), preactivation)
        routed.backward(y, y, Blending(p, p, temperature, names, few, 1, False), True, preactivation)
assert {kernel for kernel, size in built if size} >= {kernels.forward, kernels.backward, kernels.backward_through_norm}
assert len({kernel for kernel, size in built if size}) == 7
"""


AHEAD = """
import threading, warnings
import torch, triton
from concurrent.futures import wait
from triton.backends.compiler import GPUTarget
from flexact.ops.blending import Blending
from flexact.ops.triton import ahead, launch, routed
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.moments import moments

class FakeGPU:
    launchers = 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, source, metadata):
        self.launchers += 1

gpu = FakeGPU()
triton.runtime.driver.set_active(gpu)
waited_for = []

def listen(src, cache_hit, **rest):
    if threading.current_thread() is threading.main_thread():
        waited_for.append(src.name)

def build(self, tensors):
    return self.kernel.warmup(*self.missing, *tensors, *self._arguments, grid=self.grid, num_warps=self.warps)

triton.knobs.compilation.listener = listen
Launch._launch_documented = build
launch._launcher = lambda *_: None
filters = list(warnings.filters)
names, temperature, p = ("relu", "tanh"), torch.tensor(0.5), torch.rand(5, 2)
h = torch.randn(4, 6, 5, 7, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
norm = routed.Norm(torch.rand(2, 6), torch.rand(6), torch.rand(6))
fusing = {statistics: routed.Preactivation(norm, h, norm, statistics) for statistics in (True, False)}

def blending(row, alive=(0, 1), statistics=True):  # of a site whose row in the table may not be aligned
    return Blending(p[row : row + 1], p[row : row + 1], temperature, names, alive, 1, statistics)

def train(row):
    routed.forward(h, blending(row))
    routed.backward(h, h, blending(row), True)
    moments(h, (torch.zeros(6), torch.ones(6), torch.tensor(3)), 0.1, 1e-5)
    routed.forward(h, blending(row), fusing[True])
    routed.backward(h, h, blending(row), True, fusing[True])

train(0)
train(3)
routed.forward(h, blending(1, statistics=False))
routed.forward(h, blending(1, statistics=False), fusing[False])
for pick in (0, 1):
    routed.forward(h, blending(1, (pick,), False), fusing[True])
    routed.backward(h, h, blending(1, (pick,), False), False, fusing[True])
assert waited_for == ["forward", "_sweep", "forward"], waited_for
assert [build.exception() for build in ahead._started.values()] == [None] * gpu.launchers
assert warnings.filters == filters
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(BUILD, id="each"),
        pytest.param(
            AHEAD, id="ahead", marks=pytest.mark.skipif(not hasattr(triton, "AsyncCompileMode"), reason="old")
        ),
    ],
)
def test_every_kernel_builds_for_a_gpu(program: str, output_with_fake_gpu: Callable[..., str]) -> None:
    output_with_fake_gpu(program)


class Kernel(Launch):
    """A stand-in for a kernel that only records its launches."""

    def __init__(self) -> None:
        super().__init__(None, (3, 2), (7, 0.5), (True,), 4)
        self._interpreted = False
        self.builds = 0
        self.runs: list[tuple[Any, ...]] = []

    def _build(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        self.builds += 1

        def run(*arguments: Any) -> None:
            self.runs.append(arguments)

        return run, (3, 2, 1), lambda device: "the stream", "the function", "the metadata"


def test_a_kernel_is_built_once_and_then_launched_with_addresses() -> None:
    kernel, one, other = Kernel(), torch.zeros(8), torch.zeros(8, dtype=torch.int64)
    kernel(one, other)
    assert (kernel.builds, kernel.runs) == (1, [])
    kernel(one, other)
    kernel(torch.zeros(8), other)
    assert kernel.builds == 1
    first = (3, 2, 1, "the stream", "the function", "the metadata", None, None, None)
    assert kernel.runs[0] == (*first, one.data_ptr(), other.data_ptr(), 7, 0.5, True)


def test_a_kernel_is_rebuilt_for_what_triton_specialises_it_on() -> None:
    kernel, memory = Kernel(), torch.zeros(16)
    aligned = memory[(-memory.data_ptr() % 16) // 4 :]
    kinds = [(aligned, aligned), (aligned[1:], aligned), (aligned, aligned[1:]), (aligned, aligned.double())]
    for kind in kinds * 2:
        kernel(*kind)
    assert kernel.builds == len(kernel.runs) == len(kinds)


class Compiled:
    """A kernel with a given launcher that counts its launches."""

    __name__ = "compiled"

    def __init__(self, **launcher: Any) -> None:
        self.launches = 0
        self.built = SimpleNamespace(**launcher)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, num_warps: int) -> Any:
            self.launches += 1
            return self.built

        return launch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=int)))
    launch._warn_once.cache_clear()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("version", ["3.7.0+git1", "4.0.0"])
def test_the_launcher_of_a_newer_triton_is_not_used(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    kernel = Compiled(run=None, function="f", packed_metadata=())
    launch = Launch(kernel, (3, 2), (7, 0.5), (True,), 4)
    launch._interpreted = False
    with caplog.at_level(logging.WARNING, logger="flexact"):
        for count in range(1, 5):
            launch(torch.zeros(8))
            assert kernel.launches == count
    assert len([record for record in caplog.records if "launcher" in record.message]) == 1


@pytest.mark.usefixtures("driver")
def test_the_launcher_of_a_known_triton_is_used_after_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    direct: list[tuple[Any, ...]] = []
    kernel = Compiled(run=lambda *arguments: direct.append(arguments), function="f", packed_metadata=())
    launch = Launch(kernel, (3, 2), (), (), 4)
    launch._interpreted = False
    for _ in range(3):
        launch(torch.zeros(8))
    assert (kernel.launches, len(direct)) == (1, 2)


def test_a_plan_is_cached_by_tiles_and_choices() -> None:
    made: list[tuple[Any, ...]] = []

    def make(walk: Tiles, *choices: Any) -> int:
        made.append(choices)
        return len(made)

    one, same, other = (tiles.flat(torch.zeros(size), FLAT) for size in (5, 5, 6))
    assert [walk.plan(make, choice) for walk in (one, same, other) for choice in (1, 2, 1)] == [1, 2, 1] * 2 + [3, 4, 3]


def test_a_plan_for_sizes_without_a_hash_is_not_cached() -> None:
    walk = tiles.flat(torch.zeros(5), FLAT)
    symbol: list[int] = []  # not hashable either
    assert walk.plan(lambda _, size: [size], symbol) is not walk.plan(lambda _, size: [size], symbol)


def test_unused_plans_are_evicted() -> None:
    tiles = by_channel(torch.randn(2, 3, 4, 4), 1, MOMENTS)
    for number in range(3 * MOST_PLANS):
        assert tiles.plan(lambda _, number: number, number) == number
    assert tiles._plan.cache_info().currsize <= MOST_PLANS
