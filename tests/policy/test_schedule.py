"""Tests of the Schedule: temperature, correction weight, elimination rounds, commitment, and parameter groups."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import flexact
from configs import flat
from flexact import FlexAct, FlexActError, FlexConfig, Policy, Schedule, convert, param_groups, selection
from flexact.config import Correction
from flexact.ops import reference
from flexact.policy import step_hooks

FIVE = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")


def one_by_one(**changes: Any) -> FlexConfig:
    """Returns a blend in which each site drops its weakest candidate at the end of a round, without a rewind."""
    usual = {"candidates": FIVE, "share": "site", "pick_by": "blend", "eliminate": "one", "rewind": False}
    return flat(**{**usual, **changes})


def network(config: FlexConfig | None = None, original: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    config = one_by_one() if config is None else config
    original = nn.ReLU() if original is None else original
    return convert(nn.Sequential(nn.Linear(3, 6), original, nn.Linear(6, 1)), config=config)


def contest(config: FlexConfig | None = None) -> nn.Sequential:
    """A network whose original is no candidate, so that its logits alone decide."""
    return network(config, nn.Mish())


def ranked(model: nn.Sequential, logits: list[float]) -> None:
    with torch.no_grad():
        model[1].logits.copy_(torch.tensor(logits))


# Temperature and the correction's weight


@pytest.mark.parametrize(("warmup", "commit_at"), [(0.0, 0.5), (0.2, 0.7), (0.0, 1.0), (0.1, None)])
def test_temperature_changes_exponentially_from_the_warmup_to_the_commitment(
    warmup: float, commit_at: float | None
) -> None:
    config = one_by_one(
        temperature=2.0,
        final_temperature=0.05,
        warmup=warmup,
        commit_at=commit_at,
        eliminate="none",
    )
    model = network(config)
    schedule = Schedule(model, total_steps=40)
    start, end = 40 * warmup, 40 * (1.0 if commit_at is None else commit_at)
    for step in range(41):
        progress = min(max((step - start) / (end - start), 0.0), 1.0)
        assert float(model[1].temperature) == pytest.approx(2.0 * (0.05 / 2.0) ** progress, rel=1e-5)
        if step < 40:
            schedule.step()


def test_nothing_is_written_at_a_step_that_changes_nothing() -> None:
    model = network()
    schedule, temperature = Schedule(model, total_steps=1000), model[1].temperature
    version = temperature._version
    schedule.step()
    assert temperature._version == version


def test_a_value_overwritten_by_the_user_is_written_again() -> None:
    model = network()
    schedule = Schedule(model, total_steps=1000)
    with torch.no_grad():
        model[1].temperature.fill_(3.0)
    schedule.router.alpha.fill_(3.0)
    schedule.step()
    assert float(model[1].temperature) == schedule.config.policy.temperature
    assert float(schedule.router.alpha) == pytest.approx(schedule.config.policy.alpha)


@pytest.mark.parametrize("kind", ["falling", "constant"])
def test_the_weight_of_the_correction_falls_linearly_to_the_commitment_or_stays(kind: str) -> None:
    config = one_by_one(alpha=0.4, alpha_kind="absolute", alpha_schedule=kind, eliminate="none", commit_at=0.5)
    model = network(config)
    schedule = Schedule(model, total_steps=40)
    x = torch.randn(16, 3)
    model(x)
    first = flexact.penalty(model).item()
    assert first > 0
    for step in range(1, 20):
        schedule.step()
        model(x)
        expected = first * (1 - step / 20) if kind == "falling" else first
        assert flexact.penalty(model).item() == pytest.approx(expected, rel=1e-5)
    schedule.step()
    model(x)
    assert flexact.penalty(model).item() == 0


# A warm-up that starts at the original function

WAITING = one_by_one(init="original", warmup=0.3)


def test_until_the_warm_up_ends_the_network_trains_as_before_the_conversion() -> None:
    plain = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))
    model = convert(copy.deepcopy(plain), config=WAITING)
    start = model[1].logits.detach().clone()
    schedule = Schedule(model, total_steps=20)
    optimizers = [torch.optim.Adam(param_groups(model), lr=0.01), torch.optim.Adam(plain.parameters(), lr=0.01)]
    for step in range(6):
        x = torch.randn(8, 3)
        assert torch.equal(model.eval()(x), plain.eval()(x))
        losses = [network.train()(x).square().mean() for network in (model, plain)]
        assert losses[0].item() == losses[1].item(), step
        (losses[0] + flexact.penalty(model)).backward()
        losses[1].backward()
        assert model[1].logits.grad is None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    assert torch.equal(model[1].logits, start)
    assert not model[1].committed
    x = torch.randn(8, 3)
    error = (model(x) - plain(x)).norm() / plain(x).norm()
    assert 0 < error < 0.01
    model(x).sum().backward()
    assert model[1].logits.grad is not None


def test_a_run_that_is_resumed_during_a_warm_up_waits_for_its_end() -> None:
    model = network(WAITING)
    schedule = Schedule(model, total_steps=20)
    for steps_done, waits in ((2, True), (6, False), (5, True)):
        schedule.load_state_dict({**schedule.state_dict(), "step": steps_done})
        x = torch.randn(4, 3)
        assert torch.equal(model[1](x), x.relu()) == waits
    flexact.commit(model)
    assert torch.equal(model[1](x), x.relu())


@pytest.mark.parametrize(
    "config",
    [
        one_by_one(warmup=0.3),
        one_by_one(init="original", init_probability=0.5, warmup=0.0),
        FlexConfig.paper(init="original", init_probability=0.5, warmup=0.3),
    ],
    ids=["undecided", "no warm-up", "logits that the optimizer moves"],
)
def test_other_runs_blend_from_the_first_step(config: FlexConfig) -> None:
    model = network(config)
    Schedule(model, total_steps=20)
    x = torch.randn(4, 3)
    assert not torch.equal(model[1](x), x.relu())


def test_a_copy_made_during_a_warm_up_does_not_wait_for_its_end() -> None:
    model = network(WAITING)
    schedule = Schedule(model, total_steps=20)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), AveragedModel(model, use_buffers=False).module]
    x = torch.randn(4, 3)
    assert torch.equal(model[1](x), x.relu())
    for _ in range(6):
        schedule.step()
    for one in copies:
        torch.testing.assert_close(one(x), model(x))
        assert not torch.equal(one(x), model[2](model[0](x).relu()))


def test_a_warm_up_does_not_keep_logits_from_training_alone() -> None:
    model = network(WAITING)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("logits" in name)
    Schedule(model, total_steps=20)
    model(torch.randn(4, 3)).sum().backward()
    assert model[1].logits.grad is not None


def test_during_a_warm_up_the_input_is_not_overwritten_and_dropped_candidates_do_not_run() -> None:
    model = convert(nn.Sequential(nn.Linear(3, 6), nn.ReLU(inplace=True)), config=WAITING)
    Schedule(model, total_steps=20)
    x = torch.randn(4, 3)
    before = x.clone()
    assert torch.equal(model[1](x), x.relu())
    assert torch.equal(x, before)
    dropped = torch.tensor([[name == "relu" for name in model[1].candidates]])
    model[1].drop(dropped, 0)
    assert not torch.equal(model[1](x), x.relu())


# Elimination and commitment


@pytest.mark.parametrize(
    ("total", "warmup", "commit_at", "expected"),
    [(100, 0.0, 0.8, [20, 40, 60, 80]), (100, 0.2, 0.6, [30, 40, 50, 60]), (40, 0.0, 1.0, [10, 20, 30, 40])],
)
def test_the_weakest_is_dropped_at_evenly_spaced_rounds_and_the_last_round_commits(
    total: int, warmup: float, commit_at: float, expected: list[int]
) -> None:
    model = contest(one_by_one(warmup=warmup, commit_at=commit_at))
    ranked(model, [0.1, 0.5, 0.3, 0.2, 0.4])  # weakest to strongest: relu, leaky_relu, tanh, identity, sigmoid
    schedule = Schedule(model, total)
    for step in range(1, total + 1):
        schedule.step()
        row = selection(model)[0]
        assert len(row.dropped) == sum(round_ <= step for round_ in expected)
        assert row.committed == schedule.committed == (step >= expected[-1])
    assert selection(model)[0].dropped == dict(zip(("relu", "leaky_relu", "tanh", "identity"), expected, strict=True))
    assert selection(model)[0].pick == "sigmoid"


def test_each_round_drops_the_candidate_that_is_weakest_at_its_end() -> None:
    model = contest(one_by_one(commit_at=0.8))
    schedule = Schedule(model, 10)
    for weakest in (2, 0, 4, 1):
        logits = torch.zeros(5)
        logits[weakest] = -1.0
        ranked(model, logits.tolist())
        schedule.step()
        schedule.step()
        assert FIVE[weakest] in selection(model)[0].dropped
    assert selection(model)[0].pick == "leaky_relu"


@pytest.mark.parametrize(("settle", "still"), [(0.0, []), (0.5, [20, 24, 40, 44, 60, 64]), (0.99, [20, 38, 40, 58])])
def test_after_each_drop_logits_do_not_move_until_the_weights_have_settled(settle: float, still: list[int]) -> None:
    model = network(one_by_one(commit_at=0.8, settle=settle))
    optimizer = torch.optim.SGD(param_groups(model), lr=0.01)
    schedule = Schedule(model, 100, optimizer)
    moving = []
    for _ in range(80):
        before = model[1].logits.detach().clone()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        moving.append(not torch.equal(before, model[1].logits))
        schedule.step()
    assert not any(moving[step] for step in still)
    assert all(moving[:20])
    assert all(moving[step] for step in (39, 59, 79))
    assert sum(moving) == 80 - 3 * min(round(settle * 20), 19)


@pytest.mark.parametrize(
    ("changes", "total", "commits_at"),
    [
        ({}, 10_000, 4 * 400),  # five candidates, four rounds
        ({}, 2_000, 1_400),  # a short run: at 70 %
        ({"round_steps": "fill"}, 10_000, 7_000),
        ({"round_steps": 100}, 10_000, 400),
        ({"candidates": ("relu", "tanh")}, 10_000, 400),
        ({"warmup": 0.2}, 10_000, 2_000 + 4 * 400),
        ({"eliminate": "none"}, 10_000, 7_000),
    ],
)
def test_rounds_have_a_maximum_length_and_the_run_continues_committed(
    changes: dict[str, object], total: int, commits_at: int
) -> None:
    config = one_by_one(**changes)
    assert Schedule(network(config), total).commit_step == commits_at


def test_sites_with_different_numbers_of_candidates_have_rounds_of_their_own() -> None:
    names = (FIVE, ("relu", "tanh", "gelu"), ("relu", "tanh"))
    model = nn.Sequential(*(FlexAct(config=one_by_one(candidates=own)) for own in names))
    schedule = Schedule(model, 100)
    for _ in range(70):
        schedule.step()
    # commit_at is 0.7 by default: 4 rounds, 2 rounds and 1.
    assert [sorted(row.dropped.values()) for row in selection(model)] == [[18, 35, 52, 70], [35, 70], [70]]
    assert schedule.committed


def test_each_channel_drops_its_own_weakest() -> None:
    config = one_by_one(granularity="channel", candidates=("relu", "tanh", "identity"), commit_at=1.0)
    model = convert(nn.Sequential(nn.Linear(3, 2), nn.Mish()), config=config, example_inputs=torch.randn(1, 3))
    ranked(model, [0.0, 1.0, 2.0, 2.0, 1.0, 0.0])
    schedule = Schedule(model, 4)
    schedule.step()
    schedule.step()
    assert [row.dropped for row in selection(model)] == [{"relu": 2}, {"identity": 2}]
    schedule.step()
    schedule.step()
    assert [row.pick for row in selection(model)] == ["identity", "relu"]


def test_without_elimination_the_commitment_drops_all_but_the_likeliest() -> None:
    model = network(FlexConfig.paper(commit_at=0.7))
    ranked(model, [0.0, 0.0, 3.0, 0.0, 0.0])
    schedule = Schedule(model, 10)
    for _ in range(6):
        schedule.step()
        assert not selection(model)[0].dropped
    schedule.step()
    assert selection(model)[0].committed
    assert selection(model)[0].dropped == dict.fromkeys(set(FIVE) - {"tanh"}, 7)


def test_a_policy_without_commitment_never_commits() -> None:
    model = network(one_by_one(eliminate="none", commit_at=None))
    schedule = Schedule(model, 5)
    for _ in range(5):
        schedule.step()
    assert not schedule.committed
    assert schedule.commit_step > 5


def test_after_the_commitment_the_function_runs_alone_and_only_the_weights_train() -> None:
    model = contest()
    ranked(model, [0.0, 0.0, 2.0, 0.0, 0.0])
    optimizer = torch.optim.SGD(param_groups(model, lr=0.1))
    schedule = Schedule(model, 10)
    for _ in range(7):
        schedule.step()
    x = torch.randn(8, 3)
    for _ in range(3):
        expected = model[2](torch.tanh(model[0](x)))
        assert torch.equal(model(x), expected)
        before = model[1].logits.detach().clone()
        weight = model[0].weight.detach().clone()
        (model(x).square().mean() + flexact.penalty(model)).backward()
        assert model[1].logits.grad is None
        optimizer.step()
        schedule.step()
        assert torch.equal(model[1].logits, before)
        assert not torch.equal(model[0].weight, weight)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_runs_with_fewer_steps_than_rounds_still_end_committed(total: int) -> None:
    model = contest()
    ranked(model, [0.0, 0.4, 0.1, 0.2, 0.3])
    schedule = Schedule(model, total)
    for _ in range(total):
        schedule.step()
    assert schedule.committed
    assert selection(model)[0].pick == "sigmoid"
    assert len(selection(model)[0].dropped) == 4


def test_a_commitment_by_hand_is_kept(pick: Callable) -> None:
    model = flexact.commit(pick(network(), "tanh"))
    schedule = Schedule(model, 10)
    for _ in range(10):
        schedule.step()
    assert selection(model)[0].pick == "tanh"


# Bad input


@pytest.mark.parametrize("commit_at", [0.7, None])
def test_a_step_beyond_the_end_warns_once_and_changes_nothing(commit_at: float | None) -> None:
    model = network(FlexConfig(commit_at=commit_at, policy=Policy(noise=1.0)))
    schedule = Schedule(model, 2)
    schedule.step()
    schedule.step()
    before, state, draws = str(schedule.state_dict()), str(model.state_dict()), set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model.train()(torch.randn(4, 3)).sum().backward()
            draws.add(str(model[1].router.noise))
            schedule.step()
    (message,) = {str(one.message) for one in caught}
    assert len(caught) == 1
    assert "created for 2 steps, which are done" in message
    assert (str(schedule.state_dict()), str(model.state_dict())) == (before, state)
    assert len(draws) == (3 if commit_at is None else 1)  # an undecided network continues with one draw per step
    assert not model[1].router.call_statistics._calls


@pytest.mark.parametrize("name", ["total_steps", "network_steps"])
@pytest.mark.parametrize("steps", [0, -3, 1.5, "10", True])
def test_steps_must_be_a_positive_integer(steps: object, name: str) -> None:
    with pytest.raises(FlexActError, match=name):
        Schedule(network(), **{name: steps})


@pytest.mark.parametrize("given", [{}, {"total_steps": 10, "network_steps": 8}])
def test_the_length_of_a_run_is_given_in_one_of_two_ways(given: dict[str, int]) -> None:
    with pytest.raises(FlexActError, match=r"total_steps .*network_steps"):
        Schedule(network(), **given)


def test_a_model_without_sites_is_an_error() -> None:
    with pytest.raises(FlexActError, match=r"no FlexAct sites.*flexact\.convert"):
        Schedule(nn.Linear(2, 2), 10)


def test_an_optimizer_that_does_not_hold_the_logits_is_an_error_that_names_the_sites() -> None:
    plain = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = convert(plain)
    with pytest.raises(FlexActError, match=r"1 of 1 sites \(1\)"):
        Schedule(model, 10, optimizer=optimizer)
    Schedule(model, 10, optimizer=torch.optim.SGD(param_groups(model), lr=0.1))


POLICIES = {
    "default": one_by_one(),
    "paper": FlexConfig.paper(),
    "steps of the optimizer": one_by_one(logit_step="optimizer"),
    **{one: FlexConfig.paper(policy=Policy.paper(correction=one)) for one in get_args(Correction)},
    "elimination": FlexConfig.paper(eliminate="one"),
    "from the original": FlexConfig.paper(init="original"),
}
policies = pytest.mark.parametrize("config", POLICIES.values(), ids=POLICIES)


@policies
def test_a_drop_before_the_first_optimizer_step_with_the_logits_warns_once(config: FlexConfig) -> None:
    plain = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))
    stranger = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = convert(plain, config=config)
    schedule = Schedule(model, 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            model(torch.randn(4, 3)).sum().backward()
            stranger.step()
            schedule.step()
    assert ["the candidates that are dropped now are arbitrary" in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__


def test_logits_trained_without_a_torch_optimizer_do_not_warn() -> None:
    model = network(FlexConfig.paper())
    schedule = Schedule(model, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            (model(torch.randn(4, 3)).sum() + flexact.penalty(model)).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.data -= 0.01 * parameter.grad
            model.zero_grad()
            schedule.step()
    assert schedule.committed


def test_a_site_that_the_forward_never_calls_warns_once_by_name() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.used, self.idle = nn.Linear(3, 3), nn.ReLU(), nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.linear(x))

    model = convert(Idle(), config=one_by_one(round_steps=1))
    optimizer = torch.optim.SGD(param_groups(model), lr=0.01)
    schedule = Schedule(model, 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    (warning,) = caught
    assert "1 of 2 sites have received no gradient so far (idle)" in str(warning.message)
    assert warning.filename == __file__


def test_logits_that_no_optimizer_holds_are_reported_if_optimizers_move_them() -> None:
    config = one_by_one(round_steps=1, logit_step="optimizer")
    model = convert(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.GELU()), "*", config=config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p is not model[1].logits], lr=0.01)
    schedule = Schedule(model, 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            (model(torch.randn(4, 3)).sum() + flexact.penalty(model)).backward()
            optimizer.step()
            model.zero_grad()
            schedule.step()
    assert any("1 of 2 sites have received no gradient so far (1)" in str(one.message) for one in caught)


def test_a_site_without_a_gradient_because_it_is_sure_does_not_warn() -> None:
    model = contest()
    ranked(model, [0.0, 0.0, 200.0, 0.0, 0.0])
    optimizer = torch.optim.SGD(param_groups(model), lr=0.01)
    schedule = Schedule(model, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            schedule.step()
    assert model[1].picks == ("tanh",)


@pytest.mark.parametrize(
    ("config", "passes_optimizer", "committed"),
    [
        *((config, False, False) for config in POLICIES.values()),
        (POLICIES["default"], True, False),
        (POLICIES["paper"], True, False),
        (POLICIES["default"], True, True),
        (POLICIES["paper"], False, True),
    ],
)
def test_a_run_with_an_optimizer_that_holds_the_logits_does_not_warn(
    config: FlexConfig, passes_optimizer: bool, committed: bool
) -> None:
    model = network(config)
    if committed:
        flexact.commit(model)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.01)
    schedule = Schedule(model, 20, optimizer if passes_optimizer else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            (model(torch.randn(4, 3)).sum() + flexact.penalty(model)).backward()
            optimizer.step()
            schedule.step()
    assert schedule.committed


def test_sites_with_different_policies_are_an_error() -> None:
    model = nn.Sequential(FlexAct(), FlexAct(config=FlexConfig.paper()))
    with pytest.raises(FlexActError, match="must have the same config"):
        Schedule(model, 10)


# State


def test_state_round_trips_in_the_middle_of_a_run() -> None:
    config = one_by_one(noise=1.0, final_temperature=0.1, alpha_kind="absolute")
    x = torch.randn(8, 3)
    model = network(config)
    ranked(model, [0.0, 0.4, 0.1, 0.2, 0.3])
    schedule = Schedule(model, 20)
    for _ in range(8):
        schedule.step()
    duplicate = network(config)
    other = Schedule(duplicate, 20)
    other.load_state_dict(schedule.state_dict())
    duplicate.load_state_dict(model.state_dict())
    for _ in range(12):
        assert torch.equal(model(x), duplicate(x))
        assert torch.equal(flexact.penalty(model), flexact.penalty(duplicate))
        assert selection(model).to_dict() == selection(duplicate).to_dict()
        schedule.step()
        other.step()
    assert other.committed


def test_the_order_of_loading_model_and_schedule_does_not_matter() -> None:
    config = one_by_one(noise=1.0, final_temperature=0.1)
    model = network(config)
    schedule = Schedule(model, 20)
    for _ in range(8):
        schedule.step()
    x = torch.randn(8, 3)
    for model_first in (True, False):
        duplicate = network(config)
        other = Schedule(duplicate, 20)
        for load_model in (model_first, not model_first):
            if load_model:
                duplicate.load_state_dict(model.state_dict())
            else:
                other.load_state_dict(schedule.state_dict())
        assert torch.equal(model(x), duplicate(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_steps": 30}, "saved run has total_steps=30, but this one has total_steps=20"),
        ({"version": 99}, "version 99, but this flexact only reads version 3"),
        ({"step": 21}, "step must be a whole number from 0 to 20; got 21"),
        ({"step": -1}, "step must be a whole number"),
        ({"step": "3"}, "step must be a whole number"),
        ({"version": None}, "version None, but"),
        ({"total": None}, r"total=None, .*\(1, 5\)"),
        ({"total": [[0.0]]}, r"total=.*\(1, 5\)"),
        ({"total": torch.zeros(1, 3)}, r"total=\(1, 3\), .*\(1, 5\)"),
        ({"protected": torch.ones(2)}, r"protected=\(2,\), .*\(1,\)"),
    ],
)
def test_an_invalid_state_is_an_error_and_changes_nothing(change: dict[str, object], message: str) -> None:
    schedule = Schedule(network(), 20)
    schedule.step()
    with pytest.raises(FlexActError, match=message):
        schedule.load_state_dict({**schedule.state_dict(), **change})
    assert schedule.state_dict()["step"] == 1


# Draws


def test_sites_placed_by_hand_draw_together_once_a_step() -> None:
    noisy = one_by_one(noise=1.0)
    model = nn.Sequential(nn.Linear(3, 4), FlexAct(config=noisy), nn.Linear(4, 4), FlexAct(config=noisy))
    x = torch.randn(5, 3)
    assert not torch.equal(model(x), model(x))  # without a schedule, sites draw at every forward
    schedule = Schedule(model, 10)
    assert model[1].router is model[3].router
    first = model(x)
    assert torch.equal(model(x), first)
    noise = model[1].router.noise
    assert noise.shape == (2, 5)
    assert not torch.equal(noise[0], noise[1])
    schedule.step()
    assert not torch.equal(model(x), first)


def test_a_scheduled_draw_depends_on_seed_and_step_only() -> None:
    x = torch.randn(5, 3)

    def run(seed: int) -> list[Tensor]:
        model = network(one_by_one(noise=1.0, seed=seed))
        schedule = Schedule(model, 10)
        outputs = []
        for _ in range(4):
            torch.rand(7)  # other random numbers do not matter
            outputs.append(model(x).detach())
            schedule.step()
        return outputs

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# Corrections of the logit gradient


def corrected(model: nn.Sequential, h: Tensor, gradient: Tensor, alpha: float, lam: float) -> Tensor:
    """Returns the relative KL's gradient from its definition, at the first gradient of a round."""
    sensitivity = reference.mean_sensitivity(h, FIVE)[0]
    target = torch.softmax(-sensitivity / lam, -1)
    pull = torch.softmax(model[1].logits.detach(), -1) - target
    return gradient + alpha * gradient.square().mean().sqrt() * pull / h.shape[1]


@pytest.mark.parametrize("passes_optimizer", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_logit_gradient_is_corrected_once_before_the_optimizers_step(
    passes_optimizer: bool, micro_batches: int
) -> None:
    config = one_by_one(alpha=20.0, lam=0.3, alpha_schedule="falling", logit_step="optimizer")
    model = network(config)
    ranked(model, [0.3, -0.2, 0.1, 0.0, 0.2])
    optimizer = torch.optim.SGD(param_groups(model, lr=0.1, logit_lr=1.0))
    schedule = Schedule(model, 100, optimizer=optimizer if passes_optimizer else None)
    for step in range(3):
        schedule._elimination.statistics.reset()
        inputs = [torch.randn(16, 3) for _ in range(micro_batches)]
        h = model[0](torch.cat(inputs)).detach()
        for x in inputs:
            (model(x).square().mean() / micro_batches + flexact.penalty(model)).backward()
        before, gradient = model[1].logits.detach().clone(), model[1].logits.grad.clone()
        expected = corrected(model, h, gradient, 20.0 * (1 - step / 70), 0.3)
        assert (expected - gradient).norm() > 0.1 * gradient.norm()
        optimizer.step()
        torch.testing.assert_close(before - model[1].logits, expected)
        optimizer.zero_grad()
        schedule.step()


def test_the_steps_of_other_optimizers_correct_nothing() -> None:
    model, other = network(), nn.Linear(3, 1)
    own = torch.optim.SGD(param_groups(model), lr=0.1)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    weights_only = torch.optim.SGD(model[0].parameters(), lr=0.1)
    for optimizer in (None, own):
        schedule = Schedule(model, 10, optimizer=optimizer)
        x = torch.randn(8, 3)
        model(x).square().mean().backward()
        other(x).sum().backward()
        gradient = model[1].logits.grad.clone()
        foreign.step()
        weights_only.step()
        assert torch.equal(model[1].logits.grad, gradient)
        own.step()
        assert model[1].logits.grad is None  # moved and taken away
        own.zero_grad()
        del schedule


def test_a_policy_without_correction_does_not_change_gradients() -> None:
    model = network(one_by_one(correction="none", logit_step="optimizer"))
    optimizer = torch.optim.SGD(param_groups(model), lr=0.1)
    schedule = Schedule(model, 10)
    model(torch.randn(8, 3)).square().mean().backward()
    gradient = model[1].logits.grad.clone()
    optimizer.step()
    assert torch.equal(model[1].logits.grad, gradient)
    assert not schedule.committed


def hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(step_hooks._listening) + len(optimizer._optimizer_step_pre_hooks)


def test_each_of_two_schedules_of_a_policy_that_does_not_act_sees_the_optimizer() -> None:
    model = network(FlexConfig.paper())
    optimizer = torch.optim.SGD(param_groups(model), lr=0.0)
    first, second = Schedule(model, 10), Schedule(model, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        for schedule in (first, second):
            for _ in range(4):
                schedule.step()
        first.step()
    assert first.committed


@pytest.mark.parametrize("policy", [one_by_one(), FlexConfig.paper()], ids=["default", "paper"])
@pytest.mark.parametrize("passes_optimizer", [True, False])
def test_hooks_are_removed_with_the_schedule(passes_optimizer: bool, policy: FlexConfig) -> None:
    model = network(policy)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.1)
    gc.collect()  # schedules of earlier tests
    before = hooks(optimizer)
    schedule = Schedule(model, 10, optimizer=optimizer if passes_optimizer else None)
    del schedule
    gc.collect()
    assert hooks(optimizer) == before


def test_parallel_runs_end_at_their_own_steps() -> None:
    models = [network(one_by_one(commit_at=at)) for at in (0.3, 0.6, 0.9)]
    optimizers = [torch.optim.SGD(param_groups(model), lr=0.1) for model in models]
    schedules = [Schedule(model, 10) for model in models]
    for _ in range(10):
        for model, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert all(schedule.committed for schedule in schedules)


# Optimizer groups


def test_logits_never_have_weight_decay() -> None:
    model = network()
    ranked(model, [1.0, 2.0, 3.0, 4.0, 5.0])
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.5), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(model[1].logits, before["1.logits"])
    assert torch.allclose(model[0].weight, before["0.weight"] * (1 - 0.1 * 0.5))


def test_groups_hold_every_parameter_once_with_its_learning_rate() -> None:
    model = network(one_by_one(logit_step="optimizer"))
    weights, logits = param_groups(model, weight_decay=0.1, lr=0.2, logit_lr=0.3)
    assert [id(p) for p in logits["params"]] == [id(model[1].logits)]
    assert sorted(map(id, weights["params"] + logits["params"])) == sorted(map(id, model.parameters()))
    assert (weights["lr"], weights["weight_decay"], logits["lr"], logits["weight_decay"]) == (0.2, 0.1, 0.3, 0.0)
    weights, logits = param_groups(model, lr=0.2)
    assert logits["lr"] == 0.2
    assert all("lr" not in group for group in param_groups(model))
    assert "weight_decay" not in param_groups(model)[0]


def test_a_learning_rate_for_logits_that_the_schedule_moves_is_refused() -> None:
    with pytest.raises(FlexActError, match="no effect"):
        param_groups(network(), logit_lr=0.1)


def test_only_the_newest_schedule_of_a_model_moves_its_logits() -> None:
    model = network()
    optimizer = torch.optim.SGD(param_groups(model), lr=0.1)
    first, second = Schedule(model, 100), Schedule(model, 100)
    x = torch.randn(8, 3)
    model(x).square().mean().backward()
    optimizer.step()
    moved = model[1].logits.detach().clone()
    assert first._elimination.statistics.mean.abs().sum() == 0
    assert second._elimination.statistics.mean.abs().sum() > 0
    assert 0 < moved.abs().max() <= 4 * second.config.policy.logit_step_size / 17.5


def test_the_schedule_of_a_part_of_a_converted_model_is_refused() -> None:
    model = convert(nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3), nn.Tanh()), "*")
    with pytest.raises(FlexActError, match="the whole model"):
        Schedule(model[0], 10)


def test_a_model_seen_in_inference_mode_can_be_trained() -> None:
    model = network()
    with torch.inference_mode():
        model.eval()(torch.randn(4, 3))
    optimizer = torch.optim.SGD(param_groups(model.train()), lr=0.1)
    schedule = Schedule(model, 10)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    schedule.step()
    assert model[1].logits.detach().any()


def test_shared_weights_and_sites_are_in_the_groups_once() -> None:
    relu, layer = nn.ReLU(), nn.Linear(3, 3)
    model = convert(nn.Sequential(layer, relu, layer, relu))
    groups = param_groups(model)
    assert [len(group["params"]) for group in groups] == [2, 1]
    torch.optim.SGD(groups, lr=0.1)


def test_a_plain_model_has_one_group() -> None:
    assert len(param_groups(nn.Linear(2, 2), weight_decay=0.1)) == 1
    assert len(param_groups(FlexAct())) == 1


def test_the_four_lines_of_the_readme_train_a_network_to_its_activation() -> None:
    """y = tanh(5 x₁) with one unit: the pick is tanh, and the extracted network fits better than any straight line."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(400, 1) * 2 - 1, torch.randn(400, 3)], 1)
    y = torch.tanh(5 * x[:, :1])
    model = convert(nn.Sequential(nn.Linear(4, 1), nn.ReLU()))
    optimizer = torch.optim.Adam(param_groups(model), lr=0.05)
    epochs = 120
    schedule = Schedule(model, total_steps=epochs * 8)
    for _ in range(epochs):
        for batch in torch.randperm(400).split(50):
            loss = F.mse_loss(model(x[batch]), y[batch]) + flexact.penalty(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(loss)
    assert selection(model).picks == {"1": "tanh"}
    assert F.mse_loss(flexact.extract(model)(x), y) < 0.005
    line = x @ torch.linalg.lstsq(x, y).solution
    assert F.mse_loss(line, y) > 0.05


@pytest.mark.parametrize("choices", [{}, {"logit_step": "optimizer"}], ids=["schedule", "optimizer"])
@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_step_with_a_closure_equals_a_step_after_a_backward(choices: dict[str, str], how: str) -> None:
    """Lightning passes `optimizer.step` a closure with the forward and the backward pass in it."""

    def trained(with_closure: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        model = convert(layers, config=one_by_one(noise=1.0, **choices))
        optimizer = torch.optim.Adam(param_groups(model), lr=0.05)
        schedule = Schedule(model, 20)
        for _ in range(20):
            x = torch.randn(16, 3)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(x).squeeze(1) - x[:, 0].relu()).square().mean()
                loss.backward()
                return loss

            if not with_closure:
                closure()
                optimizer.step()
            elif how == "positional":
                optimizer.step(closure)
            else:
                optimizer.step(closure=closure)
            schedule.step()
        return model.state_dict()

    ours, theirs = dict(trained(with_closure=True)), dict(trained(with_closure=False))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*steps are few")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_default_dtype_of_torch_changes_nothing(dtype: torch.dtype) -> None:
    """Solvers of differential equations usually set it to float64."""
    x, states, before = torch.linspace(-2, 2, 30, dtype=dtype).view(10, 3), [], torch.get_default_dtype()
    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(3, 6, dtype=dtype), nn.ReLU(), nn.Linear(6, 1, dtype=dtype))
            model = convert(plain, config=one_by_one(noise=1.0))
            optimizer = torch.optim.SGD(param_groups(model, lr=0.1))
            schedule = Schedule(model, 20, optimizer)
            for _ in range(20):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                schedule.step()
        finally:
            torch.set_default_dtype(before)
        assert schedule.committed
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=0, equal_nan=True)
