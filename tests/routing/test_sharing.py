"""Tests of sites that pick together: a group moves by the mean of the moves of its sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexact
from flexact import FlexActError, FlexConfig, Schedule, convert, param_groups, selection
from flexact.routing.sites import sites_of

BLEND = FlexConfig(pick_by="blend")
pytestmark = pytest.mark.filterwarnings("ignore:.*steps are few for a pick")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(6, 6), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(6, 1))


def by_depth(name: str) -> str:
    return "early" if int(name) < 4 else "late"


def logits(model: nn.Module) -> list[Tensor]:
    return [site.logits.detach().clone() for site in sites_of(model)]


def trained(
    model: nn.Module, steps: int, each: Callable[[int], None] = lambda step: None, total: int = 40, parts: int = 1
) -> Schedule:
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05)
    schedule = Schedule(model, total, optimizer)
    for step in range(steps):
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        for part in x.chunk(parts):
            ((model(part).squeeze(1) - part[:, 0].sin()).square().mean() / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        each(step)
    return schedule


def test_by_default_the_logits_of_all_sites_are_bit_identical_after_every_step() -> None:
    model = convert(network(), config=BLEND)
    seen = []

    def each(step: int) -> None:
        first, *others = logits(model)
        assert all(torch.equal(first, other) for other in others), step
        seen.append(first)

    schedule = trained(model, 40, each)
    assert torch.stack(seen).std(0).max() > 0.1, "they must move"
    assert schedule.committed
    assert len(set(selection(model).picks.values())) == 1


def test_the_move_of_a_group_is_the_mean_of_the_moves_of_its_sites() -> None:
    """At the first step, before their blends differ."""
    config = FlexConfig(pick_by="blend", eliminate="one")
    alone, together, grouped = (convert(network(), config=config, share=one) for one in ("site", "model", by_depth))
    for model in (alone, together, grouped):
        trained(model, 1)
    moves = torch.stack(logits(alone))
    assert (moves - moves[0]).abs().max() > 0.1
    torch.testing.assert_close(torch.stack(logits(together)), moves.mean(0).expand(4, -1))
    torch.testing.assert_close(torch.stack(logits(grouped))[:2], moves[:2].mean(0).expand(2, -1))
    torch.testing.assert_close(torch.stack(logits(grouped))[2:], moves[2:].mean(0).expand(2, -1))


def test_a_function_of_names_makes_groups_and_none_is_a_site_on_its_own() -> None:
    model = convert(network(), config=BLEND, share=lambda name: None if name == "7" else by_depth(name))

    def each(step: int) -> None:
        first, second, third, fourth = logits(model)
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
        assert not torch.equal(third, fourth)

    trained(model, 12, each)


def test_a_site_that_a_step_does_not_call_moves_with_its_group() -> None:
    """Stochastic depth, for example, skips sites."""

    class Skipping(nn.Module):
        skips = False

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.one, self.second, self.two = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(self.first(x))
            return self.second(h if self.skips else h + self.two(h))

    model = convert(Skipping(), config=BLEND)

    def each(step: int) -> None:
        assert torch.equal(*logits(model)), step
        model.skips = step % 2 == 0

    trained(model, 12, each)
    assert model.one.logits.detach().any()


def test_sites_with_different_candidates_pick_in_separate_groups() -> None:
    layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Mish(), nn.Linear(6, 6), nn.GELU())
    model = convert(layers.append(nn.Linear(6, 1)), config=BLEND)
    relu, mish, gelu = sites_of(model)
    assert relu.keys == gelu.keys != mish.keys
    trained(model, 10)
    assert torch.equal(relu.logits, gelu.logits)
    assert mish.logits.shape == (6,)


@pytest.mark.parametrize(
    ("share", "config"), [("site", BLEND), (None, FlexConfig(pick_by="blend", share="site"))], ids=["convert", "config"]
)
def test_sites_pick_independently_if_asked_to(share: str | None, config: FlexConfig) -> None:
    model = convert(network(), config=config, share=share)
    trained(model, 10)
    first, *others = logits(model)
    assert not any(torch.equal(first, other) for other in others)
    assert sites_of(model)[0].config.share == "site"


def test_accumulated_micro_batches_move_a_group_as_the_whole_batch_does() -> None:
    """Gradients are averaged (by accumulation or DistributedDataParallel) before the mean over sites."""
    whole, parts = (convert(network(), config=BLEND) for _ in range(2))
    trained(whole, 3)
    trained(parts, 3, parts=3)
    torch.testing.assert_close(logits(parts), logits(whole), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share": lambda name: None}, "share put none of the 4 sites into a group: it returned None for 1, 3, 5, 7"),
        ({"share": "modell"}, "share='modell' is not a choice; did you mean 'model'"),
        ({"share": 3}, "share=3 is not a choice.*a function from a site's name to its group"),
        (
            {"share": by_depth, "config": FlexConfig(granularity="channel"), "example_inputs": torch.zeros(2, 6)},
            "granularity='channel' every channel picks alone",
        ),
    ],
    ids=["no site", "misspelt", "no function", "channels"],
)
def test_invalid_groups_are_refused_and_the_model_is_unchanged(changes: dict[str, Any], message: str) -> None:
    model = network()
    with pytest.raises(FlexActError, match=message):
        convert(model, **changes)
    assert sites_of(model) == []
    assert isinstance(model[1], nn.ReLU)


def test_a_group_of_sites_with_other_candidates_is_refused_and_names_them() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Mish())
    with pytest.raises(FlexActError, match=r"1 and 3 .*'all'"):
        convert(model, share=lambda name: "all")
    assert isinstance(model[1], nn.ReLU)


def test_channels_pick_independently_whatever_the_config_shares() -> None:
    config = FlexConfig(granularity="channel")
    model = convert(network(), config=config, example_inputs=torch.zeros(2, 6))
    assert all(site.group is None for site in sites_of(model))
    trained(model, 5)
    rows = sites_of(model)[0].logits.detach().view(6, -1)
    assert not torch.equal(rows[0], rows[1])


def test_sites_built_by_hand_pick_together_under_a_schedule() -> None:
    torch.manual_seed(0)
    sites = [flexact.FlexAct(config=BLEND) for _ in range(2)]
    model = nn.Sequential(nn.Linear(6, 6), sites[0], nn.Linear(6, 6), sites[1], nn.Linear(6, 1))
    trained(model, 5)
    assert torch.equal(sites[0].logits, sites[1].logits)
    assert sites[0].logits.detach().any()


def test_a_group_that_cannot_be_compared_is_refused() -> None:
    model = network()
    with pytest.raises(FlexActError, match=r"share returned \['1'\] for 1.*Return a string"):
        convert(model, share=lambda name: [name])  # type: ignore[arg-type, return-value]
    assert isinstance(model[1], nn.ReLU)


def test_a_run_with_other_groups_cannot_be_resumed() -> None:
    def schedule_of(share: Callable[[str], Any]) -> Schedule:
        return Schedule(convert(network(), config=BLEND, share=share), 40)

    state = schedule_of(by_depth).state_dict()
    assert state["groups"] == [0, 0, 2, 2]
    schedule_of(lambda name: int(name) < 4).load_state_dict(state)
    for other in (lambda name: name, lambda name: "a", lambda name: None if name == "1" else "a"):
        with pytest.raises(FlexActError, match=r"\[0, 0, 2, 2\].*same FlexConfig and share"):
            schedule_of(other).load_state_dict(state)
