"""Tests of optimizers: two in one network, a replaced one, one that maximizes, one that skips steps."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import flexact
from configs import flat
from flexact import FlexAct, FlexConfig, Schedule, param_groups
from flexact.routing.sites import sites_of

pytestmark = pytest.mark.filterwarnings("ignore:.*steps are few for a pick")

STEPS = 24
APART = {"share": "site", "pick_by": "blend", "candidates": ("relu", "tanh", "silu", "original")}


def part(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, outputs))


def logits_of(model: nn.Module) -> Tensor:
    return torch.cat([site.logits.detach().clone() for site in sites_of(model)])


def batches(count: int = STEPS, width: int = 3) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return iter([torch.randn(16, width, generator=generator) for _ in range(count)])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule, count: int = STEPS) -> None:
    for x in batches(count):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


# Several optimizers


class Gan(nn.Module):
    """Two networks in one. Neither is called through its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = part(2, 3), part(3, 1)


def adversarial(
    generator: nn.Module, discriminator: nn.Module, schedules: list[Schedule], reuse: bool
) -> list[tuple[Tensor, Tensor]]:
    """Returns the logits of both after each step. reuse: whether the generator's loss uses the discriminator's fakes
    again.
    """
    makes, judges = (torch.optim.Adam(param_groups(one), lr=0.01) for one in (generator, discriminator))
    found = []
    for real, noise in zip(batches(), batches(width=2), strict=True):
        judges.zero_grad()
        fake = generator(noise)
        (discriminator(fake.detach()).exp().mean() - discriminator(real).mean()).backward()
        judges.step()
        makes.zero_grad()
        (-discriminator(fake if reuse else generator(noise)).mean()).backward()
        makes.step()
        for schedule in schedules:
            schedule.step()
        found.append((logits_of(generator), logits_of(discriminator)))
    return found


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("changes", [{}, {"logit_step": "optimizer"}, {"correction": "clip_logit_gradient"}], ids=str)
def test_two_optimizers_in_one_network_move_their_own_logits_as_in_separate_networks(
    changes: dict[str, Any], reuse: bool
) -> None:
    config = flat(**(APART | changes))
    together, apart = Gan(), Gan()
    flexact.convert(together, config=config)
    schedules = [Schedule(together, STEPS)]
    ours = adversarial(together.generator, together.discriminator, schedules, reuse)
    one, other = (flexact.convert(network, config=config) for network in (apart.generator, apart.discriminator))
    theirs = adversarial(one, other, [Schedule(one, STEPS), Schedule(other, STEPS)], reuse)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not torch.equal(ours[0][1], ours[-1][1])
    assert flexact.selection(together.discriminator).picks == flexact.selection(other).picks


def test_two_optimizers_of_sites_that_pick_together_move_all_of_them_alike() -> None:
    gan = Gan()
    flexact.convert(gan, config=FlexConfig(**(APART | {"share": "model", "candidates": ("relu", "tanh", "silu")})))
    found = adversarial(gan.generator, gan.discriminator, [Schedule(gan, 100 * STEPS)], reuse=False)
    of_site = torch.cat(found[-1]).view(4, 3)
    assert bool((of_site == of_site[0]).all())
    assert of_site[0].std() > 0


def test_a_first_layer_that_no_optimizer_holds_does_not_affect_the_policy_of_the_others() -> None:
    model = flexact.convert(part(3, 1), config=FlexConfig(**APART))
    first, second = sites_of(model)
    optimizer = torch.optim.SGD([*model[2].parameters(), second.logits], lr=0.0)
    schedule = Schedule(model, 3 * STEPS)
    start = first.logits.detach().clone()
    with pytest.warns(UserWarning, match=r"1 of 2 sites .*\(1\), .*param_groups"):
        train(model, optimizer, schedule, 3 * STEPS)
    assert torch.equal(first.logits, start)
    assert first.kept_original  # no warning
    assert (
        second.logits.detach() - second._initial_logits()
    ).abs().max() > 0.5  # by the Schedule, not with a learning rate of 0


def moved(optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]], given: bool) -> Tensor:
    """Returns the logits after some steps, each with the next of the optimizers."""
    torch.manual_seed(0)
    model = flexact.convert(part(3, 1), config=FlexConfig(**APART))
    every = optimizers(model)
    schedule = Schedule(model, 100 * STEPS, optimizer=every[0] if given else None)
    for number, x in enumerate(batches()):
        model(x).square().mean().backward()
        every[number * len(every) // STEPS].step()
        model.zero_grad()
        schedule.step()
    return logits_of(model)


@pytest.mark.parametrize("given", [False, True])
def test_replacing_the_optimizer_does_not_change_how_logits_move(given: bool) -> None:
    def one(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(param_groups(model), lr=0.0)]

    def replaced(model: nn.Module) -> list[torch.optim.Optimizer]:
        weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        groups = [{"params": weights, "lr": 0.0}, {"params": [site.logits for site in sites_of(model)], "lr": 10.0}]
        return [*one(model), torch.optim.Adam(groups)]

    assert torch.equal(moved(replaced, given), moved(one, given))


def test_a_parameter_group_added_later_is_found() -> None:
    model = flexact.convert(part(3, 1), config=FlexConfig(**APART))
    first, second = sites_of(model)
    optimizer = torch.optim.SGD([second.logits], lr=0.0)
    schedule = Schedule(model, 100 * STEPS)
    for number, x in enumerate(batches()):
        if number == STEPS // 2:
            assert first.at_start()
            assert not second.at_start()
            optimizer.add_param_group({"params": [first.logits]})
        model(x).square().mean().backward()
        optimizer.step()
        schedule.step()
    assert not first.at_start()


# Directions


@pytest.mark.parametrize("logit_step", ["schedule", "optimizer"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_maximizing_an_objective_is_minimizing_its_negative(kind: type[torch.optim.Optimizer], logit_step: str) -> None:
    found = []
    for sign in (1.0, -1.0):
        torch.manual_seed(0)
        model = flexact.convert(part(3, 1), config=flat(**(APART | {"logit_step": logit_step})))
        optimizer = kind(param_groups(model), lr=0.01, maximize=sign < 0)
        schedule = Schedule(model, 2 * STEPS)
        for x in batches():
            (sign * (model(x) - x.sin().sum(1, keepdim=True)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        found.append((logits_of(model), schedule._elimination.statistics.total))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0][0], torch.zeros_like(found[0][0]))


@pytest.mark.parametrize("measured", ["loss", "held_out"])
def test_a_trial_of_an_optimizer_that_maximizes_picks_the_candidate_with_the_highest_objective(measured: str) -> None:
    picks = []
    for sign in (1.0, -1.0):
        torch.manual_seed(0)
        config = FlexConfig(pick_by="trial", candidates=("relu", "tanh", "silu"))
        model = flexact.convert(part(3, 1), config=config)
        optimizer = torch.optim.Adam(param_groups(model), lr=0.01, maximize=sign < 0)
        value = {candidate: sign * loss for candidate, loss in enumerate((3.0, 1.0, 2.0))}
        tried = [0]

        def objective(value: dict[int, float] = value, tried: list[int] = tried) -> float:
            return value[tried[0]]

        schedule = Schedule(model, 10 * STEPS, held_out=objective if measured == "held_out" else None)
        while not schedule.committed:
            tried[0] = schedule.router.trying
            (sign * model(torch.randn(4, 3)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(objective())
        picks.append(sites_of(model)[0].picks)
    assert picks == [("tanh",), ("tanh",)]


# Steps that a gradient scaler skips


@pytest.mark.parametrize("logit_step", ["schedule", "optimizer"])
def test_a_fused_optimizer_that_skips_infinite_steps_moves_logits_as_one_that_is_not_called(
    logit_step: str,
) -> None:
    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = flexact.convert(part(3, 1), config=flat(**(APART | {"logit_step": logit_step})))
        optimizer = torch.optim.SGD(param_groups(model), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        schedule = Schedule(model, 2 * STEPS)
        for number, x in enumerate(batches()):
            loss = model(x).square().mean() * (math.inf if number % 7 == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
        assert logits_of(model).isfinite().all()
        found.append((logits_of(model), *schedule._elimination.statistics.state_dict().values()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0][0], torch.zeros_like(found[0][0]))


# Methods that bypass the network's call


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = part(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def sample(self, x: Tensor) -> Tensor:
        return self.layers(x)


def converted(config: FlexConfig) -> Sampler:
    return flexact.convert(Sampler(), config=config)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("logit_step", ["schedule", "optimizer"])
def test_a_method_other_than_the_call_uses_the_current_logits(logit_step: str, scheduled: bool) -> None:
    model = converted(flat(**(APART | {"logit_step": logit_step})))
    optimizer = torch.optim.SGD(param_groups(model), lr=0.5)
    schedule = Schedule(model, 10 * STEPS) if scheduled else None
    x = torch.randn(16, 3)
    for number in range(10):
        model.sample(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for training in (False, True):
            model.train(training)
            with torch.no_grad():
                ours, theirs = model.sample(x), model(x)
            assert torch.equal(ours, theirs), number
        if schedule is not None and number % 2:
            schedule.step()
    assert not torch.equal(logits_of(model), torch.zeros_like(logits_of(model)))


def test_an_averaged_model_uses_its_logits_and_the_commitment_in_another_method() -> None:
    model = converted(FlexConfig(**APART))
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05)
    schedule = Schedule(model, STEPS)
    probe = torch.randn(16, 3)
    for x in batches():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        averaged.update_parameters(model)
        averaged.eval()
        with torch.no_grad():
            ours = averaged.module.sample(probe)
            assert [site.alive for site in sites_of(averaged)] == [site.alive for site in sites_of(model)]
            assert torch.equal(ours, averaged(probe))
    assert all(site.committed for site in sites_of(averaged))


def test_logits_written_by_hand_are_used_by_every_call() -> None:
    model = converted(FlexConfig(**APART)).eval()
    x = torch.randn(16, 3)
    with torch.no_grad():
        before = model.sample(x)
        for site in sites_of(model):
            site.logits[1] = 50.0
        after = model.sample(x)
    assert not torch.equal(before, after)
    layers = copy.deepcopy(model.layers)
    layers[1], layers[3] = nn.Tanh(), nn.Tanh()
    torch.testing.assert_close(after, layers(x).detach())


# Loading earlier states


@pytest.mark.parametrize("way", ["blend", "trial"])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_run_that_loads_a_state_before_its_commitment_repeats_itself(way: str, model_first: bool) -> None:
    torch.manual_seed(0)
    config = FlexConfig(pick_by=way, candidates=("relu", "tanh", "silu"), trial_steps=6, rewind=way == "trial")
    model = flexact.convert(part(3, 1), config=config)
    optimizer = torch.optim.Adam(param_groups(model), lr=0.02)
    schedule = Schedule(model, STEPS)
    every = list(batches())

    def train(start: int, end: int) -> None:
        for x in every[start:end]:
            loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(loss)

    train(0, 7)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    assert not schedule.committed
    train(7, STEPS)
    assert schedule.committed
    first = copy.deepcopy(model.state_dict())
    for owner, state in list(zip((model, optimizer, schedule), saved, strict=True))[:: 1 if model_first else -1]:
        owner.load_state_dict(copy.deepcopy(state))
    assert not schedule.committed
    train(7, STEPS)
    assert schedule.committed
    torch.testing.assert_close(model.state_dict(), first, rtol=0, atol=0, equal_nan=True)


def test_loading_an_earlier_state_of_the_model_alone_warns_once() -> None:
    model = flexact.convert(part(3, 1), config=FlexConfig(**APART))
    optimizer = torch.optim.SGD(param_groups(model), lr=0.01)
    schedule = Schedule(model, STEPS)
    saved = copy.deepcopy(model.state_dict())
    while not schedule.committed:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    model.load_state_dict(saved)
    with pytest.warns(UserWarning, match="not into the schedule"):
        schedule.step()


def test_a_site_is_moved_only_by_an_optimizer_that_holds_it() -> None:
    sites = nn.ModuleList(FlexAct(("relu", "tanh"), FlexConfig(share="site")) for _ in range(2))
    schedule = Schedule(sites, 100, optimizer=torch.optim.SGD(sites.parameters(), lr=0.0))
    own = torch.optim.SGD([sites[1].logits], lr=0.0)
    x = torch.randn(16)
    (sites[0](x) + sites[1](x)).square().mean().backward()
    own.step()
    assert sites[0].at_start()
    assert sites[0].logits.grad is not None
    assert not sites[1].at_start()
    assert sites[1].logits.grad is None
    assert not schedule.committed


def test_a_schedule_that_is_garbage_collected_during_a_step_does_not_disturb_it() -> None:
    schedules = [Schedule(flexact.convert(part(3, 1), config=FlexConfig(**APART)), 100) for _ in range(3)]
    model = flexact.convert(part(3, 1), config=FlexConfig(**APART))
    optimizer = torch.optim.SGD(param_groups(model), lr=0.1)
    kept = Schedule(model, 100)

    def collect(*_: Any) -> None:
        schedules.clear()
        gc.collect()

    hook = torch_optimizer.register_optimizer_step_pre_hook(collect)
    try:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    finally:
        hook.remove()
    assert not sites_of(model)[0].at_start()
    assert not kept.committed


def test_the_optimizer_of_another_model_is_unaffected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Schedule allocates nothing before its step, which may be under CUDA-graph capture."""
    model = flexact.convert(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
    schedule = flexact.Schedule(model, 100)
    other = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with monkeypatch.context() as patched:
        patched.setattr(torch, "tensor", lambda *args, **kwargs: pytest.fail("a tensor was made"))
        optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0, equal_nan=True)
    assert schedule.steps_done == 0


def test_a_run_whose_optimizers_step_at_different_rates_resumes_exactly() -> None:
    config = flexact.FlexConfig(share="site", pick_by="blend", rewind=False, candidates=("relu", "tanh", "gelu"))

    def make() -> tuple[nn.Module, list[torch.optim.Optimizer], flexact.Schedule]:
        torch.manual_seed(0)
        layers = [nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)]
        model = flexact.convert(nn.Sequential(*layers), config=config)
        halves = (model[:3].parameters(), model[3:].parameters())
        return model, [torch.optim.SGD(half, lr=0.01) for half in halves], flexact.Schedule(model, 400)

    def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], schedule: flexact.Schedule, on: range) -> None:
        for step in on:
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            loss = (model(x).squeeze() - x[:, 0].tanh()).square().mean()
            model.zero_grad()
            loss.backward()
            for every, optimizer in enumerate(optimizers, 1):
                if step % every == 0:
                    optimizer.step()
            schedule.step(loss.detach())

    whole, resumed = make(), make()
    train(*whole, range(30))
    resumed[0].load_state_dict(whole[0].state_dict())
    resumed[2].load_state_dict(whole[2].state_dict())
    train(*whole, range(30, 40))
    train(*resumed, range(30, 40))
    for ours, theirs in zip(resumed[0].parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
