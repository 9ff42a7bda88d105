"""Tests of the closed form fused by torch.compile, against the one that is computed in blocks."""

from __future__ import annotations

import shutil

import pytest
import torch

from flexact.candidates.registry import BUILT_IN
from flexact.ops import closed_form, inductor_form
from flexact.ops.blending import Blending

NAMES = tuple(candidate.name for candidate in BUILT_IN)

needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="torch.compile needs a C++ compiler on a CPU"
)


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize(
    ("names", "dtype"),  # the compiler takes far longer for all of them in one kernel
    [(NAMES[::3], torch.float32), (NAMES[1::3], torch.float32), (NAMES[2::3], torch.bfloat16)],
)
def test_all_candidates_compile_to_the_same_results(names: tuple[str, ...], dtype: torch.dtype) -> None:
    generator, k = torch.Generator().manual_seed(0), len(names)
    h, delta = (3 * torch.randn(40, 50, generator=generator).to(dtype) for _ in range(2))
    p = torch.softmax(torch.randn(1, k, generator=generator), -1)
    blending = Blending(p, p, torch.tensor(0.7), names, tuple(range(k)), 1, True)
    rounding = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    x, statistics = inductor_form.forward(h, blending)
    expected_x, expected_statistics = closed_form.forward(h, blending)
    torch.testing.assert_close(x, expected_x, **rounding)
    torch.testing.assert_close(statistics, expected_statistics, rtol=1e-5, atol=1e-5)
    to_h, to_logits = inductor_form.backward(delta, h, blending, True)
    expected_to_h, expected_to_logits = closed_form.backward(delta, h, blending, True)
    torch.testing.assert_close(to_h, expected_to_h, **rounding)
    torch.testing.assert_close(to_logits, expected_to_logits, rtol=1e-4, atol=1e-3)


@needs_a_compiler
def test_a_candidate_with_weight_0_does_not_contribute_even_where_it_overflows() -> None:
    h, keys = torch.tensor([[torch.inf, 1.0]]), ("identity", "relu_squared", "silu", "sigmoid", "tanh")
    p = torch.tensor([[0.0, 0.0, 0.0, 0.5, 0.5], [0.1, 0.2, 0.1, 0.3, 0.3]])
    blending = Blending(p, p, torch.ones(()), keys, tuple(range(5)), 1, False)
    x, _ = inductor_form.forward(h, blending)
    to_h, to_logits = inductor_form.backward(torch.ones(1, 2), h, blending, True)
    assert (x[0, 0].item(), to_h[0, 0].item()) == (1.0, 0.0)
    assert to_logits.isfinite().all()
