"""Activation checkpointing (reentrant and not) and the compiler's memory budget: gradients equal those without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import flexact
from flexact import FlexConfig
from matrix.models import Column, gradients_of, scatter_logits

CONFIG = FlexConfig.paper()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def scheduled(column: Column) -> tuple[nn.Module, flexact.Schedule]:
    model = scatter_logits(column.build(CONFIG))
    return model, flexact.Schedule(model, 100)


def trained(model: nn.Module, schedule: flexact.Schedule, column: Column, run: Any) -> list[Tensor]:
    """Returns losses, penalties, statistics and gradients of three steps."""
    kept: list[Tensor] = []
    for step in range(3):
        inputs, wanted = column.batch(step)
        if inputs[0].is_floating_point():
            inputs = (inputs[0].requires_grad_(), *inputs[1:])
        loss = column.loss(run, (inputs, wanted))
        penalty = flexact.penalty(model)
        model.zero_grad()
        (loss + penalty).backward()
        kept += [loss.detach(), penalty.detach(), schedule.router.sensitivity().clone()]
        kept += [*gradients_of(model).values(), *(one.grad for one in inputs if one.grad is not None)]
        schedule.step()
    return kept


def blockwise(column: Column, model: nn.Module, reentrant: bool) -> nn.Module:
    """Recomputes parts of the model, as training code does. A part may contain only one of a site's two calls."""

    def recomputed(part: nn.Module) -> None:
        forward = part.forward
        part.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=reentrant)

    if column.name == "bert":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model
    parts = {
        "alone": [model],
        "mlp": list(model.children())[:4],
        "resnet": [getattr(model, name, None) for name in ("layer1", "layer2")],
    }
    for part in parts[column.name]:
        recomputed(part)
    return model


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("what", ["blocks", "whole"])
def test_activation_checkpointing_gives_the_same_gradients(column: Column, how: str, what: str) -> None:
    expected = trained(*(pair := scheduled(column)), column, pair[0])
    model, schedule = scheduled(column)
    reentrant = how == "reentrant"
    run: Any = model
    if what == "blocks":
        blockwise(column, model, reentrant)
    else:

        def run(*inputs: Tensor) -> Any:
            if not inputs[0].is_floating_point():  # reentrant checkpointing needs an input with a gradient
                embedded = model.get_input_embeddings()(inputs[0])
                return checkpoint(
                    lambda e, mask: column.answer(lambda: model(inputs_embeds=e, attention_mask=mask), ()),
                    embedded,
                    inputs[1],
                    use_reentrant=reentrant,
                )
            return checkpoint(model, *inputs, use_reentrant=reentrant)

    ours = trained(model, schedule, column, run)
    for left, right in zip(ours, expected, strict=True):  # the order in which a shared site's gradients are summed
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def test_the_compilers_memory_budget_gives_the_same_gradients(column: Column) -> None:
    results, saved = [], []
    for budget in (1.0, 0.0):
        model, schedule = scheduled(column)
        torch._dynamo.reset()
        sizes: list[int] = []
        with functorch_config.patch(activation_memory_budget=budget):
            compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
            with torch.autograd.graph.saved_tensors_hooks(lambda t, own=sizes: own.append(t.numel()) or t, lambda t: t):
                results.append(trained(model, schedule, column, compiled))
        saved.append(sum(sizes))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert column.is_site or saved[1] < saved[0], "the budget had an effect"
