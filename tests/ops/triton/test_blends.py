"""Tests of the launches of the higher derivatives: their kernels build for a GPU, and ahead of their first use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import triton

BUILD = """
import threading
import torch, triton
from flexact.ops.blending import Blending
from flexact.ops.triton import ahead, driver
from flexact.ops.triton.basis_functions import FORMS
from flexact.ops.triton.blends import TritonBlends

waited_for = []

def listen(src, cache_hit, **rest):
    if threading.current_thread() is threading.main_thread():
        waited_for.append(src.name)

class Prepared:
    def __init__(self, device, built):
        for one in built:
            assert one.asm["cubin"]

    def launch(self, addresses):
        return True

triton.knobs.compilation.listener = listen
driver.kernel, driver.Prepared = lambda built, *_: built, Prepared
"""

ALL = """
names = tuple(name for name in FORMS if name != "identity")
for rows, dtype, alive in ((1, torch.float32, range(len(names))), (6, torch.bfloat16, (0, 3))):
    p, h = torch.rand(rows, len(names)), torch.randn(4, 6, 5, 7, dtype=dtype)
    for y in (h, h.to(memory_format=torch.channels_last)):
        own = TritonBlends(y, Blending(p, p, torch.tensor(0.5), names, tuple(alive), 1, False))
        for n in (1, 2):
            own.blend(n)
        for orders in ((0, 1), (1,), (2,), (0, 1, 2)):
            for need_logits in (True, False):
                own.gradients({n: y if n == 0 else y.float() for n in orders}, need_logits)
assert set(waited_for) == {"blend", "gradients"}, waited_for  # those that were not built ahead
"""

AHEAD = """
p, h = torch.rand(1, 4), torch.randn(64, 64)
own = TritonBlends(h, Blending(p, p, torch.tensor(0.5), ("tanh", "sine", "silu", "gelu"), (0, 1, 2, 3), 1, False))
own.blend(1)
own.blend(2)
own.gradients({0: h, 1: h, 2: h}, True)
assert waited_for == ["blend"], waited_for
assert [build.exception() for build in ahead._started.values()] == [None] * len(ahead._started)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(ALL, id="each"),
        pytest.param(
            AHEAD, id="ahead", marks=pytest.mark.skipif(not hasattr(triton, "AsyncCompileMode"), reason="old")
        ),
    ],
)
def test_the_kernels_build_for_a_gpu(program: str, output_with_fake_gpu: Callable[..., str]) -> None:
    output_with_fake_gpu(BUILD + program)
