"""torch.compile(fullgraph=True): results equal those of eager mode, with few recompilations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

import flexact
from flexact import FlexConfig, Policy
from flexact.config import PAPER_CANDIDATES
from matrix.models import COLUMNS, Column, gradients_of, optimizer_of, scatter_logits

STEPS = 24


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend of torch.compile that counts the graphs that it receives."""

    def __init__(self, backend: str) -> None:
        self.backend = lookup_backend(backend)
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return self.backend(graph, inputs)


def scheduled(column: Column, config: FlexConfig, steps: int = STEPS) -> nn.Module:
    """In a full graph, the Schedule makes the draw."""
    model = scatter_logits(column.build(config))
    model.kept = [flexact.Schedule(model, steps)]
    return model


def results(model: nn.Module, run: Callable[..., Any], column: Column, count: int) -> list[Tensor]:
    """Returns the loss, the penalty and all gradients of one batch."""
    loss = column.loss(run, column.batch(1, count))
    penalty = flexact.penalty(model)
    model.zero_grad()
    (loss + penalty).backward()
    return [loss.detach(), penalty.detach(), *gradients_of(model).values()]


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("mlp", None), *((name, True) for name in COLUMNS)],  # the whole runs below use default shapes with every model
)
def test_outputs_and_gradients_equal_those_of_eager_mode(name: str, dynamic: bool | None) -> None:
    column = COLUMNS[name]
    model = scheduled(column, FlexConfig.paper())
    duplicate = scheduled(column, FlexConfig.paper())
    backend = Counting("aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    sizes = [12, 7, 9] if dynamic else [12, 12]  # torch itself recompiles a convolution from 16 on
    graphs = []
    for count in sizes:
        ours, theirs = results(model, compiled, column, count), results(duplicate, duplicate, column, count)
        for left, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
        for one in (model, duplicate):
            one.kept[0].step()
        graphs.append(backend.graphs)
    assert not counters["graph_break"]
    assert graphs == graphs[:1] * len(sizes), "compiled again for another draw, temperature or size"
    model.eval(), duplicate.eval()
    inputs, _ = column.batch(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(
            column.answer(compiled, inputs), column.answer(duplicate, inputs), rtol=1e-4, atol=1e-6
        )


def compiled_run(column: Column, config: FlexConfig) -> tuple[list[int], int]:
    """Returns the steps of a run at which something was compiled, and the number of its elimination rounds."""
    model = column.build(config)
    optimizer = optimizer_of(model, 0.01)
    schedule = flexact.Schedule(model, STEPS, optimizer)
    backend = Counting("eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    rounds, steps = 0, []
    for step in range(STEPS):
        before = backend.graphs
        dropped = [site.dropped_at.clone() for site in schedule.router.sites]
        loss = column.loss(compiled, column.batch(step)) + flexact.penalty(model)
        optimizer.zero_grad()
        if loss.requires_grad:  # a committed FlexAct by itself has nothing to train
            loss.backward()
        optimizer.step()
        schedule.step()
        steps += [step] * (backend.graphs - before)
        now = [site.dropped_at for site in schedule.router.sites]
        rounds += any(not torch.equal(old, new) for old, new in zip(dropped, now, strict=True))
    assert schedule.committed
    assert not counters["graph_break"]
    return steps, rounds


def recompiles_at_most_once_a_round(column: Column, config: FlexConfig) -> bool:
    steps, rounds = compiled_run(column, config)
    again = [step for step in steps if step > 0]  # the first step compiles the draw and the network
    expected = {"half": 3, "one": 4}[config.elimination]  # of five candidates
    return rounds == expected and len(again) == len(set(again)) <= rounds


def test_an_annealed_eliminated_committed_run_recompiles_once_a_round(column: Column) -> None:
    config = FlexConfig(candidates=PAPER_CANDIDATES, policy=Policy(noise=0.5, final_temperature=0.2))
    assert recompiles_at_most_once_a_round(column, config)


@pytest.mark.parametrize("name", ["mlp"])  # one model is enough: only what the policy reads differs
def test_a_run_with_the_penalty_in_the_loss_recompiles_once_a_round(name: str) -> None:
    assert recompiles_at_most_once_a_round(COLUMNS[name], FlexConfig.paper(eliminate="one"))


@pytest.mark.parametrize("name", ["mlp"])  # inductor is slow; tests/test_on_gpu.py has a ResNet
def test_inductor_trains_like_eager_mode(name: str) -> None:
    column = COLUMNS[name]
    model = scheduled(column, FlexConfig.paper())
    duplicate = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)
    for left, right in zip(
        results(model, compiled, column, 12), results(duplicate, duplicate, column, 12), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
