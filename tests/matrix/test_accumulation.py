"""Gradient accumulation and clipping: one draw per optimizer step, and a penalty counted once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import flexact
from flexact import FlexConfig, Policy
from flexact.routing.gumbel import gumbel_noise
from flexact.routing.sites import sites_of
from matrix.models import STEADY, Column, gradients_of, optimizer_of, scatter_logits


def draws(model: nn.Module, column: Column, micro_batches: int, steps: int) -> list[list[Tensor]]:
    """Returns the noise of each micro-batch of each step."""
    schedule = flexact.Schedule(model, 100)
    seen = []
    for _ in range(steps):
        own = []
        for part in range(micro_batches):
            (column.loss(model, column.batch(part)) / micro_batches).backward()
            own.append(schedule.router.noise.clone())
        seen.append(own)
        schedule.step()
    return seen


def test_micro_batches_share_one_draw_per_step(column: Column) -> None:
    model = column.build(FlexConfig.paper())
    seen = draws(model, column, 3, 2)
    for step, own in enumerate(seen):
        expected = gumbel_noise(*own[0].shape, seed=0, step=step).float()
        assert all(torch.equal(noise, expected) for noise in own)


@pytest.mark.parametrize(
    ("config", "clipped"),
    [(STEADY, True), (FlexConfig(policy=Policy(logit_step_size=0.2)), False)],
    ids=["paper with clipping", "default"],
)
def test_equal_micro_batches_give_the_step_of_one_batch(column: Column, config: FlexConfig, clipped: bool) -> None:
    """The loss and the penalty are divided by the number of micro-batches, so one batch four times equals it once."""
    states = []
    for micro_batches in (1, 4):
        model = scatter_logits(column.build(config))
        optimizer = optimizer_of(model)
        schedule = flexact.Schedule(model, 100, optimizer)
        for _ in range(3):
            for _ in range(micro_batches):
                loss = column.loss(model, column.batch()) + flexact.penalty(model)
                (loss / micro_batches).backward()
            if clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        states.append(dict(model.named_parameters()))
    start = scatter_logits(column.build(config))
    for name, parameter in states[0].items():
        torch.testing.assert_close(states[1][name], parameter, rtol=1e-4, atol=1e-6)
        assert "logits" not in name or not torch.equal(parameter, start.get_parameter(name)), "the logits must move"


def test_statistics_are_those_of_all_micro_batches_and_the_penalty_is_not_multiplied(column: Column) -> None:
    parts = [column.batch(seed, 4) for seed in range(3)]
    whole = tuple(torch.cat(one) for one in zip(*(inputs for inputs, _ in parts), strict=True))
    found = []
    for calls in ([inputs for inputs, _ in parts], [whole]):
        model = scatter_logits(column.build(STEADY)).eval()  # batch norm behaves alike for a batch and for its parts
        for site in sites_of(model):
            site.train()
        schedule = flexact.Schedule(model, 100)
        for inputs in calls:
            column.answer(model, inputs)
        penalty = flexact.penalty(model)
        penalty.backward()
        found.append([schedule.router.sensitivity(), penalty.detach(), *gradients_of(model).values()])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_an_evaluation_between_two_steps_leaves_no_statistics_behind(column: Column) -> None:
    with_evaluation, without = (scatter_logits(column.build(STEADY)) for _ in range(2))
    penalties = []
    for model, evaluates in ((with_evaluation, True), (without, False)):
        schedule = flexact.Schedule(model, 100)
        column.answer(model, column.batch(1)[0])
        schedule.step()
        if evaluates:
            model.eval()
            column.answer(model, column.batch(2)[0])
            model.train()
        column.answer(model, column.batch(3)[0])
        penalties.append(flexact.penalty(model))
    torch.testing.assert_close(*penalties)
