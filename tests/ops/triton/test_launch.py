"""Tests that the kernels build with Triton's compiler, which is stricter than its interpreter, without a GPU."""

from __future__ import annotations

import functools
import logging
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from flexact.ops import dispatch
from flexact.ops.triton import driver, extension, launch, tiles
from flexact.ops.triton.launch import Dtypes, Launch, Launches
from flexact.ops.triton.tiles import FLAT, MOMENTS, MOST_PLANS, Tiles, by_channel

BUILD = """
import torch
from flexact.ops.triton import kernels, routed
from flexact.ops.blending import Blending
from flexact.ops.triton.basis_functions import FORMS
from flexact.ops.triton import driver
from flexact.ops.triton.launch import Launches
from flexact.ops.triton.moments import moments

built = []

def build(launches, *tensors):
    for launch, places in launches.steps:
        kernel, arguments = launch.kernel, (*launch.missing, *(tensors[i] for i in places), *launch.numbers)
        names = kernel.arg_names[len(arguments):]
        # As on a GPU.
        constants = [name == "FAST" or value for name, value in zip(names, launch.constants, strict=True)]
        compiled = kernel.warmup(*arguments, *constants, grid=launch.grid, num_warps=launch.warps)
        assert driver.parameters(compiled, (*launch.missing, *places, *launch.arguments)) is not None
        built.append((kernel, len(compiled.asm["cubin"])))

Launches.__call__ = build

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
        routed.forward(y, Blending(p, p, temperature, names, alive, 1, True), preactivation)
        routed.backward(y, y, Blending(p, p, temperature, names, alive, 1, False), True, preactivation)
assert {kernel for kernel, size in built if size} >= {kernels.forward, kernels.backward, kernels.backward_through_norm}
assert len({kernel for kernel, size in built if size}) == 7
"""


AHEAD = """
import threading, warnings
import torch, triton
from concurrent.futures import wait
from triton.backends.compiler import GPUTarget
from flexact.ops.blending import Blending
from flexact.ops.triton import ahead, driver, routed
from flexact.ops.triton.moments import moments

class FakeGPU:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

triton.runtime.driver.set_active(FakeGPU())
waited_for, twice = [], []

def listen(src, cache_hit, **rest):
    if threading.current_thread() is threading.main_thread():
        waited_for.append(src.name)
    elif "later" in threading.current_thread().name and not cache_hit:
        twice.append(src.name)

class Prepared:
    def __init__(self, *_):
        pass

    def launch(self, addresses):
        return True

triton.knobs.compilation.listener = listen
driver.kernel, driver.Prepared = lambda built, *_: built, Prepared
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
assert not wait(ahead._later.values(), timeout=120).not_done  # as in a round of hundreds of steps
assert len(ahead._later) == 5 and not twice, twice  # two kernels of each pick, and one of both
started = len(ahead._started)
for pick in (0, 1):
    routed.forward(h, blending(1, (pick,), False), fusing[True])
    routed.backward(h, h, blending(1, (pick,), False), False, fusing[True])
assert waited_for == ["forward", "_sweep", "forward"], waited_for
assert len(ahead._started) == started
assert [build.exception() for build in ahead._started.values()] == [None] * len(ahead._started)
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


STUB = """
#include <stdint.h>

/* A CUDA driver without a GPU. A launch writes to the address of its first parameter: the kernel, the grid, the number
   of threads, the shared memory, the stream, and then its other parameters, of which the last one is NULL. */
static int context, capture_mode;
int cuCtxGetCurrent(void **found) { *found = &context; return 0; }
int cuCtxSetCurrent(void *given) { return 0; }
int cuDevicePrimaryCtxRetain(void **found, int device) { return 1; }
int cuThreadExchangeStreamCaptureMode(int *mode) {
    const int given = *mode;
    *mode = capture_mode;
    capture_mode = given;
    return 0;
}
int cuModuleLoadData(void **module, const void *image) {
    *module = (void *)image;
    return capture_mode == 2 ? 0 : 900; /* while another thread captures, only the relaxed mode allows it */
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)(intptr_t)(((const char *)module)[0] + 256 * name[0]);
    return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return attribute == 8 && value == 60000 ? 0 : 7; }
int cuGetErrorString(int error, const char **text) { *text = error == 9 ? "invalid grid" : "other"; return 0; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    if (x == 999) return 9;
    if (capture_mode != 0) return 7;
    int64_t *out = *(int64_t **)parameters[0];
    const int64_t first[] = {(intptr_t)function, x, y, z, tx * ty * tz, shared, (intptr_t)stream};
    for (int i = 0; i < 7; i++) *out++ = first[i];
    *out++ = *(int64_t *)parameters[1];
    *out++ = *(int32_t *)parameters[2];
    *(float *)out = *(float *)parameters[3];
    out[1] = *(int64_t *)parameters[4];
    return 0;
}
"""

DIRECT = """
import ctypes, struct, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # dlopen finds a loaded library by its soname
from types import SimpleNamespace
import torch
from flexact.ops.triton import driver

torch._C._cuda_getCurrentRawStream = lambda device: 77
PTX = ".visible .entry name(.param .u64 .ptr name_0, .param .u64 name_1, .param .u32 a, .param .f32 b, .param .u64 c)"

def compiled(aligned, **changed):
    metadata = dict(name="name", shared=60000, num_warps=4, num_ctas=1, global_scratch_size=0, profile_scratch_size=0)
    kinds = {"out": "*fp32", "number": "i64", "gone": "constexpr", "count": "i32", "x": "fp32"}
    attributes = {(0,): [["tt.divisibility", 16]] if aligned else [], (3,): [["tt.divisibility", 16]]}
    source, metadata = SimpleNamespace(signature=kinds, attrs=attributes), SimpleNamespace(**metadata | changed)
    return SimpleNamespace(src=source, metadata=metadata, asm={"ptx": PTX, "cubin": b"Qubin"})

def launched(memory, kernels):
    prepared = driver.Prepared(0, kernels)
    return prepared.launch(struct.pack("2Q", 0, memory.data_ptr()))

arguments = (1, -5, "gone", 48, 0.5)
kernel = driver.kernel(compiled(True), (3, 2), arguments, 0)
memory = torch.zeros(16, dtype=torch.int64)
memory = memory[(memory.data_ptr() % 16) // 8 :]
assert launched(memory, [kernel])
function = ord("Q") + 256 * ord("n")
assert memory[:9].tolist() == [function, 3, 2, 1, 128, 60000, 77, -5, 48], memory
assert memory[8:9].tolist() == [48] and memory[9:10].view(torch.float32)[0] == 0.5
before = memory.clone()
other = memory[1:]
assert not launched(other, [kernel]) and torch.equal(memory, before)  # nothing is launched at another alignment
assert launched(other, [driver.kernel(compiled(False), (3, 2), arguments, 0)])
assert other[0] == function
two = torch.zeros(32, dtype=torch.int64)
two = two[(two.data_ptr() % 16) // 8 :]
first, second = (driver.kernel(compiled(True), (5 + place,), (place, -5, "", 48, 0.5), 0) for place in (0, 1))
assert driver.Prepared(0, [first, second]).launch(struct.pack("2Q", two.data_ptr(), two[12:].data_ptr()))
assert two[1] == 5 and two[13] == 6
for changed in ({"num_ctas": 2}, {"global_scratch_size": 8}, {"launch_pdl": True}):
    assert driver.kernel(compiled(True, **changed), (3, 2), arguments, 0) is None
short = compiled(True)
short.asm["ptx"] = ".entry name(.param .u64 name_0, .param .u64 b)"
assert driver.parameters(short, arguments) is None  # the machine code takes other parameters than the signature says
try:
    launched(memory, [driver.kernel(compiled(True), (999,), arguments, 0)])
except RuntimeError as error:
    assert str(error) == "CUDA error: invalid grid"
else:
    raise AssertionError("an error of the driver was ignored")
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="compiles a stub of the CUDA driver")
def test_the_driver_gets_the_parameters_of_every_kernel(
    output_with_fake_gpu: Callable[..., str], tmp_path: Path
) -> None:
    source, library = tmp_path / "stub.c", tmp_path / "libcuda.so.1"
    source.write_text(STUB)
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    output_with_fake_gpu(DIRECT, str(library))


class Kernels(Launches):
    """Launches of a stand-in kernel that records what is built and launched."""

    def __init__(self, direct: bool = True) -> None:
        self.documented: list[tuple[Any, ...]] = []
        super().__init__(2, (Launch(self, (3, 2), (7, 0.5), (True,), 4), (1, 0)))
        self._interpreted, self._direct = False, direct
        self.builds: list[bool] = []
        self.launches: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, num_warps: self.documented.append((*arguments, num_warps))

    def _build(self, device: int, dtypes: Dtypes, tensors: Sequence[torch.Tensor] | None = None) -> Any:
        self.builds.append(tensors is None)
        return SimpleNamespace(launch=functools.partial(self._launch, tensors is None)) if self._direct else None

    def _launch(self, aligned: bool, addresses: bytes) -> bool:
        found = struct.unpack("2Q", addresses)
        if aligned and found[0] % 16:
            return False
        self.launches.append(found)
        return True


def test_kernels_are_built_once_for_each_combination_of_dtypes_and_launched_with_addresses() -> None:
    kernels, one, other = Kernels(), torch.zeros(8), torch.zeros(8, dtype=torch.int64)
    for first in (one, torch.zeros(8), one):
        kernels(first, other)
    assert kernels.builds == [True]
    assert kernels.launches[0] == kernels.launches[2] == (one.data_ptr(), other.data_ptr())
    kernels(other, other)
    assert kernels.builds == [True, True]


def test_kernels_are_rebuilt_for_addresses_that_are_not_aligned() -> None:
    kernels, memory = Kernels(), torch.zeros(16)
    aligned = memory[(-memory.data_ptr() % 16) // 4 :]
    for _ in range(3):
        kernels(aligned[1:], aligned)
        kernels(aligned, aligned[1:])
    assert kernels.builds == [True, False]
    assert len(kernels.launches) == 6


def test_kernels_that_the_driver_cannot_launch_go_through_triton() -> None:
    kernels, one, other = Kernels(direct=False), torch.zeros(8), torch.ones(8)
    kernels(one, other)
    kernels(one, other)
    assert kernels.builds == [True]
    assert kernels.documented == [(other, one, 7, 0.5, True, 4)] * 2


def test_a_machine_without_a_compiler_launches_through_triton_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "c_compiler", lambda: ("false",))
    monkeypatch.setattr(driver, "load", driver.load.__wrapped__)
    monkeypatch.setattr(driver, "parameters", lambda *_: [])
    monkeypatch.setattr(Launch, "build", lambda *_: "compiled")
    launch._warn_once.cache_clear()
    kernels = Kernels()
    with caplog.at_level(logging.WARNING, logger="flexact"):
        for _ in range(2):
            assert Launches._build(kernels, 0, (torch.float32,) * 2) is None
    assert len([record for record in caplog.records if "cannot be launched directly" in record.message]) == 1


def test_a_failed_compilation_of_the_extension_is_logged_and_ends_its_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extension, "compiler", lambda: ("false",))
    monkeypatch.setattr(extension, "_module", None)
    with caplog.at_level(logging.WARNING, logger="flexact"):
        extension._load()
    assert "kernels are launched from Python: false: exit status 1" in caplog.text
    assert extension._module is None


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
