"""CUDA graphs: a captured step replays with new noise, and repeats with the same seed. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flexact
from flexact import FlexConfig
from flexact.errors import FlexActError
from matrix.models import Column, logits_of, scatter_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

STEPS = 5


def replayed(column: Column, seed: int, whole_steps: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """Returns losses and logits of a run whose whole step, including the optimizer, is one captured graph."""
    model = scatter_logits(column.build(FlexConfig.paper(seed=seed, commit_at=None))).to("cuda")
    optimizer = torch.optim.SGD(flexact.param_groups(model, lr=0.0), lr=0.0)  # the runs differ in their noise alone
    schedule = flexact.Schedule(model, 100, optimizer)
    inputs, wanted = column.batch()
    batch = tuple(one.to("cuda") for one in inputs), wanted.to("cuda")

    def step() -> Tensor:
        loss = column.loss(model, batch) + flexact.penalty(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
            if whole_steps:
                schedule.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    losses, logits = [], []
    for _ in range(STEPS):
        graph.replay()
        losses.append(captured.detach().clone())
        logits.append(logits_of(model).clone())
        schedule.step()  # writes the next draw to the memory that the graph reads
    return losses, logits


def test_replays_have_new_noise_and_repeat_with_the_seed(column: Column) -> None:
    losses, logits = replayed(column, seed=1)
    again, same_logits = replayed(column, seed=1)
    other, _ = replayed(column, seed=2)
    assert len({loss.item() for loss in losses}) == STEPS, "every replay sees another draw"
    torch.testing.assert_close(torch.stack(losses), torch.stack(again), rtol=1e-5, atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(logits, same_logits, strict=True))
    assert not torch.allclose(torch.stack(losses), torch.stack(other), rtol=1e-5)


def test_a_capture_after_half_steps_is_refused(column: Column) -> None:
    with pytest.raises(FlexActError, match=r"schedule\.step\(\)"):
        replayed(column, seed=1, whole_steps=False)
