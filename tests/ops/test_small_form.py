"""The small form agrees with the closed form that processes larger tensors, and declines what it cannot compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexact.ops import closed_form, small_form
from flexact.ops.blending import Blending

KEYS = ("relu", "tanh", "identity", "silu", "elu")


def blending_of(weights: Tensor, alive: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Blending:
    return Blending(weights, weights, torch.tensor(0.7), KEYS, alive, 1, True)


def both(h: Tensor, delta: Tensor, blending: Blending) -> list[Tensor]:
    """The results of a forward and of a backward that uses what the forward kept."""
    kept: list[Tensor] = []
    return [*closed_form.forward(h, blending, kept), *closed_form.backward(delta, h, blending, True, kept)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alive", [(0, 1, 2, 3, 4), (1, 2), (3,)], ids=str)
def test_it_agrees_with_the_closed_form(
    dtype: torch.dtype, alive: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    h, delta = torch.randn(4, 6, 5).to(dtype).transpose(0, 2), torch.randn(5, 6, 4).to(dtype)
    weights = torch.zeros(1, 5)
    weights[0, list(alive)] = torch.rand(len(alive)).softmax(-1)
    blending = blending_of(weights, alive)
    assert small_form.takes(h, blending)
    found = both(h, delta, blending)
    monkeypatch.setattr(small_form, "takes", lambda *_: False)
    for one, expected in zip(found, both(h, delta, blending), strict=True):
        assert one.dtype == expected.dtype
        assert one.stride() == expected.stride()
        torch.testing.assert_close(one, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_a_backward_without_kept_tensors_is_bit_identical() -> None:
    h, delta, blending = torch.randn(50), torch.randn(50), blending_of(torch.full((1, 5), 0.2))
    *_, to_h, to_logits = both(h, delta, blending)
    again = closed_form.backward(delta, h, blending, True)
    assert torch.equal(to_h, again[0])
    assert torch.equal(to_logits, again[1])


def test_it_declines_large_tensors_channels_and_weights_of_zero() -> None:
    even = torch.full((1, 5), 0.2)
    assert not small_form.takes(torch.zeros(small_form.MOST + 1), blending_of(even))
    assert not small_form.takes(torch.zeros(0), blending_of(even))
    assert not small_form.takes(torch.zeros(2, 3), blending_of(even.expand(3, 5)))
    assert not small_form.takes(torch.zeros(2, 3), blending_of(torch.eye(5)[:1]))
