"""Tests of the router, from logits to probabilities: the noise, the draws of a whole model, and their tables."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import flexact
from flexact import FlexAct, FlexConfig, Policy
from flexact.routing.gumbel import gumbel_noise, log_pi, probabilities
from flexact.routing.sites import bind, sites_of

PAPER = FlexConfig.paper()


def noisy_model(seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return flexact.convert(model, config=FlexConfig.paper(seed=seed))


def test_noise_depends_on_seed_and_step_only() -> None:
    first = gumbel_noise(3, 5, seed=1, step=2)
    torch.manual_seed(99)
    assert torch.equal(first, gumbel_noise(3, 5, seed=1, step=2))


@given(seed=st.integers(-(2**70), 2**70), step=st.integers(0, 2**40))
def test_neighbouring_seeds_and_steps_draw_different_noise(seed: int, step: int) -> None:
    draws = {tuple(gumbel_noise(1, 4, s, t)[0].tolist()) for s, t in ((seed, step), (seed + 1, step), (seed, step + 1))}
    assert len(draws) == 3


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(20_000, 1, seed=0, step=0).flatten()
    assert scipy.stats.kstest(noise.numpy(), scipy.stats.gumbel_r.cdf).pvalue > 0.01


def test_noise_of_successive_steps_is_gumbel_distributed_and_uncorrelated() -> None:
    noise = torch.cat([gumbel_noise(1, 1, seed=3, step=step) for step in range(3000)]).flatten()
    assert scipy.stats.kstest(noise.numpy(), scipy.stats.gumbel_r.cdf).pvalue > 0.01
    assert scipy.stats.spearmanr(noise[1:].numpy(), noise[:-1].numpy()).pvalue > 0.01


@pytest.mark.parametrize("u", [0.0, 1.0, 1e-300, 1 - 1e-16])
def test_noise_is_finite_for_every_uniform_number(u: float) -> None:
    with mock.patch("torch.rand", lambda *size, **kwargs: torch.full(size, u, dtype=kwargs["dtype"])):
        assert gumbel_noise(2, 3, seed=0, step=0).float().isfinite().all()


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
def test_sampled_frequencies_match_gumbel_softmax(temperature: float) -> None:
    torch.manual_seed(0)
    draws, logits = 40_000, torch.tensor([[0.0, 1.0, -1.0, 0.5, 2.0]])
    everyone = torch.ones(1, 5, dtype=torch.bool)
    p = probabilities(log_pi(logits, everyone), gumbel_noise(draws, 5, 0, 0).float(), torch.tensor(temperature))
    ours = torch.bincount(p.argmax(-1), minlength=5)
    torchs = F.gumbel_softmax(logits.expand(draws, 5), tau=temperature, hard=True).sum(0).long()
    assert scipy.stats.chi2_contingency(torch.stack([ours, torchs]).numpy()).pvalue > 0.01
    expected = draws * torch.softmax(logits[0].double(), -1)
    assert scipy.stats.chisquare(ours.numpy(), expected.numpy()).pvalue > 0.01


def test_frequencies_of_a_sites_own_draws_over_the_steps_match_pi() -> None:
    site = FlexAct(config=FlexConfig.paper(candidates=("relu", "tanh", "gelu")))
    with torch.no_grad():
        site.logits.copy_(torch.tensor([0.0, 1.0, 0.5]))
    counts, steps = torch.zeros(3), 3000
    for _ in range(steps):
        site.router.refresh(training=True)
        counts[site.router.p[0].argmax()] += 1
    expected = steps * torch.softmax(site.logits.detach().double(), -1)
    assert scipy.stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 0.01


@given(logits=st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=6), data=st.data())
def test_log_pi_is_the_log_softmax_over_alive_candidates(logits: list[float], data: st.DataObject) -> None:
    k = len(logits)
    kept = sorted(data.draw(st.sets(st.integers(0, k - 1), min_size=1)))
    alive = torch.zeros(1, k, dtype=torch.bool)
    alive[0, kept] = True
    table = torch.tensor([logits], dtype=torch.float64)
    ours = log_pi(table, alive)
    torch.testing.assert_close(ours[:, kept], torch.log_softmax(table[:, kept], -1))
    assert (ours[~alive] == -torch.inf).all()


@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=6),
    temperature=st.floats(0.001, 10),
    seed=st.integers(0, 1000),
)
def test_probabilities_are_finite_and_sum_to_one(logits: list[float], temperature: float, seed: int) -> None:
    table = torch.tensor([logits])
    alive = torch.ones(table.shape, dtype=torch.bool)
    noise = gumbel_noise(1, len(logits), seed, 0).float()
    p = probabilities(log_pi(table, alive), noise, torch.tensor(temperature))
    assert p.isfinite().all()
    assert float(p.sum()) == pytest.approx(1, abs=1e-5)


def test_a_forward_does_not_change_the_global_random_state() -> None:
    for model in (noisy_model(), FlexAct(config=PAPER)):
        before = torch.get_rng_state()
        model(torch.ones(2, 3)).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)


def test_all_sites_draw_once_a_step_with_different_noise() -> None:
    model = noisy_model()
    first, second = sites_of(model)
    assert first.router is second.router
    model(torch.randn(2, 3))
    router = first.router
    assert router.step == 1
    assert torch.equal(router.noise, gumbel_noise(2, 5, seed=0, step=1).float())
    assert not torch.equal(router.p[0], router.p[1])
    model(torch.randn(2, 3))
    assert router.step == 2


def test_a_run_is_bit_identical_with_the_same_seed_and_differs_with_another() -> None:
    x = torch.randn(8, 3)

    def outputs(seed: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = noisy_model(seed)
        return [model(x).detach() for _ in range(3)]

    one, again, other = outputs(1), outputs(1), outputs(2)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[1]), "different steps must draw differently"


def test_under_a_schedule_the_draw_changes_with_its_step_only() -> None:
    model = noisy_model()
    schedule = flexact.Schedule(model, total_steps=10)
    x = torch.randn(8, 3)
    one, again = model(x), model(x)
    assert torch.equal(one, again)
    schedule.step()
    assert not torch.equal(model(x), one)


def test_sites_called_outside_of_the_models_forward_use_their_logits() -> None:
    model = noisy_model()
    schedule = flexact.Schedule(model, total_steps=10)
    site = sites_of(model)[0]
    model[1](torch.randn(2, 4))
    with torch.no_grad():
        site.logits[2] = 100.0
    schedule.step()
    h = torch.randn(2, 4)
    torch.testing.assert_close(model[1](h), torch.tanh(h))
    assert site.router.called()[0]


def test_the_noise_is_scaled_by_the_config() -> None:
    for scale in (0.0, 0.5, 1.0):
        site = FlexAct(config=FlexConfig(seed=7, policy=Policy(noise=scale)))
        site(torch.ones(1))
        assert torch.equal(site.router.noise, (scale * gumbel_noise(1, 5, 7, 1)).float())


def mixed_sites() -> list[FlexAct]:
    by_channel = FlexConfig(granularity="channel", candidates=("relu", "tanh"))
    return [FlexAct(("relu", "tanh", "gelu")), FlexAct(config=by_channel, channels=2), FlexAct(("silu", "elu"))]


def test_sites_of_different_sizes_share_one_padded_table() -> None:
    sites = mixed_sites()
    router = bind(nn.ModuleList(sites), sites)
    for i, site in enumerate(sites):
        nn.init.constant_(site.logits, i + 1)
    router.move_to_device()
    assert router.logits().tolist() == [[1, 1, 1], [2, 2, 0], [2, 2, 0], [3, 3, 0]]
    assert router.alive().tolist() == [[True] * 3, *[[True, True, False]] * 3]
    parts = router.split(router.logits())
    assert all(torch.equal(part, site.logits) for part, site in zip(parts, sites, strict=True))


def test_padding_has_no_probability_and_rows_sum_to_one() -> None:
    sites = mixed_sites()
    router = bind(nn.ModuleList(sites), sites)
    router.refresh(training=True)
    assert router.pi[1:, 2].tolist() == [0, 0, 0]
    torch.testing.assert_close(router.pi.sum(-1), torch.ones(4))


def test_gradients_go_through_the_table_to_each_site() -> None:
    sites = mixed_sites()
    router = bind(nn.ModuleList(sites), sites)
    router.move_to_device()
    (router.logits() * torch.arange(12.0).view(4, 3)).sum().backward()
    grads = [site.logits.grad.tolist() for site in sites if site.logits.grad is not None]
    assert grads == [[0, 1, 2], [3, 4, 6, 7], [9, 10]]


def test_each_row_has_its_sites_temperature() -> None:
    sites = mixed_sites()
    router = bind(nn.ModuleList(sites), sites)
    sites[1].temperature.fill_(0.5)
    router.move_to_device()
    assert router.temperature().flatten().tolist() == [1.0, 0.5, 0.5, 1.0]


def test_statistics_of_several_calls_are_averaged_and_reset_by_each_training_forward() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.act(x) - 1)

    model = flexact.convert(Twice(), config=FlexConfig(candidates=("relu", "identity")))
    (site,) = sites_of(model)
    x = torch.tensor([-1.0, 0.5, 3.0, 4.0])
    for _ in range(2):
        inner = (torch.relu(x) + x) / 2 - 1
        model(x)
        sensitivity = site.router.sensitivity()
        expected = ((x > 0).float().mean() + (inner > 0).float().mean()) / 2
        torch.testing.assert_close(sensitivity, torch.tensor([[float(expected), 1.0]]))
        assert site.router.called().tolist() == [[True]]


def test_an_eval_forward_does_not_change_the_statistics_of_training() -> None:
    model = flexact.convert(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    model(torch.randn(5, 3))
    (site,) = sites_of(model)
    before = site.router.sensitivity()
    assert before.any()
    model.eval()
    model(torch.randn(5, 3))
    assert torch.equal(site.router.sensitivity(), before)


def test_moving_a_model_puts_its_draws_on_the_new_device() -> None:
    model = noisy_model()
    model(torch.randn(2, 3))
    model.to("meta")
    model(torch.randn(2, 3, device="meta"))
    router = sites_of(model)[0].router
    assert {table.device.type for table in (router.p, router.noise, router.alpha, router.sensitivity())} == {"meta"}


def test_gumbels_mean_and_variance() -> None:
    noise = gumbel_noise(100_000, 1, seed=5, step=5)
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.03)


class Operators(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operators(model: nn.Module, x: Tensor) -> int:
    model(x)
    with Operators() as counted:
        model(x)
    return counted.count


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_committed_model_computes_what_the_extracted_one_does(training: bool, scheduled: bool) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model, x = flexact.convert(plain, config=FlexConfig(policy=Policy(noise=1.0))), torch.randn(2, 3)
    schedule = flexact.Schedule(model, total_steps=1000) if scheduled else None
    flexact.commit(model).train(training)
    assert operators(model, x) == operators(flexact.extract(model).train(training), x)
    if schedule is not None:
        schedule.step()
        with Operators() as counted:
            schedule.step()
        assert counted.count == 0


def test_a_model_that_is_undecided_again_uses_the_draw_of_its_step() -> None:
    model, duplicate, x = noisy_model(), noisy_model(), torch.randn(2, 3)
    before = copy.deepcopy(model.state_dict())
    schedules = [flexact.Schedule(one, total_steps=100) for one in (model, duplicate)]
    flexact.commit(model)
    for _ in range(3):
        for schedule in schedules:
            schedule.step()
    model.load_state_dict(before)
    with torch.no_grad():
        for one, other in zip(sites_of(model), sites_of(duplicate), strict=True):
            one.temperature.copy_(other.temperature)
    duplicate.load_state_dict(model.state_dict())
    assert torch.equal(model(x), duplicate(x))


def test_a_training_forward_with_noise_works_under_torch_func() -> None:
    model = noisy_model()
    x = torch.randn(4, 3)
    assert torch.func.grad(lambda x: model(x).sum())(x).isfinite().all()
    assert copy.deepcopy(model)(x).isfinite().all()
