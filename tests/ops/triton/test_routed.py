"""Tests of what only the Triton kernels do: how they walk through memory, and when the closed form runs instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexact.candidates.registry import register_candidate
from flexact.ops import runs_fused
from flexact.ops.blending import Blending
from flexact.ops.triton import routed as triton
from flexact.ops.triton import tiles
from kernels import using
from routed_cases import DENSE, FIVE, GAPPED, Case, Result, case, error, laid_out, spread

pytestmark = pytest.mark.usefixtures("triton_kernels")


class Copies(TorchDispatchMode):
    """Counts the operations that copy a tensor of a size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        copying = ("clone", "copy_", "_to_copy", "contiguous")
        if func.overloadpacket.__name__ in copying and result.numel() == self.size:
            self.count += 1
        return result


@pytest.mark.parametrize("layout", [*DENSE, *GAPPED])
def test_dense_tensors_are_not_copied_and_others_are_copied_once(layout: str, device: torch.device) -> None:
    h, p, temperature = laid_out(layout, device), torch.full((1, 2), 0.5, device=device), torch.ones((), device=device)
    delta = torch.ones_like(h)  # the upstream gradient is as dense as the output
    blending = Blending(p, p, temperature, ("relu", "tanh"), (0, 1), 1, False)
    with Copies(h.numel()) as forward:
        triton.forward(h, blending)
    with Copies(h.numel()) as backward:
        triton.backward(delta, h, blending, True)
    assert forward.count == (layout in GAPPED)
    assert backward.count == (layout in GAPPED) or layout == "transposed slice"


@pytest.mark.parametrize(
    ("shape", "channel_dim"),
    [((2, 2, 1030), 1), ((3, 2, 1024), 1), ((20, 33), 1), ((33, 2), 0)],
)
def test_numbers_of_channels_around_the_tile_size(
    shape: tuple[int, ...], channel_dim: int, device: torch.device, tile_sizes: Callable
) -> None:
    tile_sizes(512, 1000)
    h = spread(*shape).to(device)
    h = h.t().contiguous().t() if channel_dim == 0 else h  # the channels are the contiguous dimension
    case(h, ("relu", "tanh"), h.shape[channel_dim], channel_dim=channel_dim).check()


@pytest.mark.parametrize(
    ("shape", "rows", "tile", "programs"),
    [((9, 1024), 1, 1024, 1), ((64, 3, 8), 3, 64, 6), ((64, 3), 3, 64, 3)],
    ids=["layer", "inner", "last"],
)
def test_a_program_processes_several_tiles(
    shape: tuple[int, ...], rows: int, tile: int, programs: int, device: torch.device, tile_sizes: Callable
) -> None:
    tile_sizes(tile, programs)
    one, cut = case(spread(*shape).to(device), ("relu", "tanh"), rows), tiles.Cut(tile, programs)
    walked = tiles.flat(one.h, cut) if rows == 1 else tiles.by_channel(one.h, 1, cut)
    assert walked.splits * walked.block_a < walked.outer
    one.check()


@pytest.mark.parametrize("rows", [1, 3], ids=["layer", "channel"])
def test_the_gradient_of_the_logits_is_skipped_if_it_is_not_needed(rows: int, device: torch.device) -> None:
    one = case(spread(7, 3).to(device), ("relu", "tanh"), rows)
    p = one.probabilities().float()
    blending = Blending(p, p, torch.tensor(one.temperature, device=device), one.names, (0, 1), 1, False)
    to_h, _, others = triton.backward(one.delta, one.h, blending, need_logits=False)
    assert torch.equal(to_h, one.run().to_h)
    assert others.numel() == 0


# Fallback to the closed form


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("Triton must not be asked")


def closed(one: Case) -> Result:
    with using("closed_form"):
        return one.run()


def test_float64_uses_the_closed_form(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "forward", refuse)
    one = case(spread(20).double().to(device), FIVE)
    result, exact = one.run(), one.exact()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(result, closed(one), strict=True))
    assert error(result.x, exact.x) < 1e-7  # the weights are in float32
    assert result.x.dtype == torch.float64


def wave(h: torch.Tensor) -> torch.Tensor:
    """A function whose code cannot be generated."""
    return torch.sin(h.double()).to(h.dtype)


def test_a_candidate_without_a_triton_form_uses_the_closed_form_and_warns_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "forward", refuse)
    register_candidate("wave", wave)
    with caplog.at_level(logging.WARNING, logger="flexact"):
        for name in ("relu", "relu", "tanh"):
            case(spread(20).to(device), (name, "wave")).check()
    (record,) = [record for record in caplog.records if "wave" in record.message]
    assert record.name == "flexact.ops.triton.basis"
    assert "closed form" in record.message


def test_only_alive_candidates_count_and_there_is_room_for_sixteen_columns(device: torch.device) -> None:
    for k in range(15):
        register_candidate(f"wave_{k}", wave)
    waves, h = [f"wave_{k}" for k in range(15)], spread(20).to(device)
    assert not runs_fused(h, ("relu", "tanh", waves[0]), (0, 2))
    assert runs_fused(h, ("relu", "tanh", waves[0]), (0, 1))
    assert runs_fused(h, ("relu", "tanh", *waves[:14]), (0, 1))
    assert not runs_fused(h, ("relu", "tanh", *waves), (0, 1))
