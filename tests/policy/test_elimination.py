"""Tests of elimination: which candidates of a blend are dropped, and when a site keeps its original function."""

from __future__ import annotations

import math
import warnings

import numpy
import pytest
import torch
from torch import nn

import flexact
from flexact import FlexActError, FlexConfig, Schedule, convert, param_groups, selection
from flexact.policy.elimination import Elimination
from flexact.policy.rounds import Plan
from flexact.routing.sites import sites_of

NAMES = ("relu", "gelu", "silu", "tanh")
CONFIG = FlexConfig(candidates=NAMES, pick_by="blend", eliminate="one", share="site", rewind=False)
pytestmark = pytest.mark.filterwarnings("ignore:.*steps are few for a pick")


def network(config: FlexConfig = CONFIG, original: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(3, 6), original or nn.ReLU(), nn.Linear(6, 1)), config=config)


class Rounds:
    """Rounds of one site, with given logits and advantages."""

    def __init__(self, config: FlexConfig = CONFIG, original: nn.Module | None = None) -> None:
        (self.site,) = sites_of(network(config, original))
        self.elimination = Elimination(self.site.router, Plan(self.site.k, config, 100, 90, (), rewinds=False))

    def end(self, step: int, logits: list[float], advantages: numpy.ndarray | None = None) -> list[str]:
        """Returns the candidates that are alive after a round. advantages: (steps, K)."""
        with torch.no_grad():
            self.site.logits.copy_(torch.tensor(logits))
        for one in () if advantages is None else advantages:
            self.elimination.statistics.add(torch.from_numpy(one).float().unsqueeze(0))
        self.elimination.drop(step)
        return [NAMES[at] for at in self.site.alive]


def noise(mean: list[float], steps: int = 30) -> numpy.ndarray:
    """Returns advantages with these means. A lower advantage means that the loss favours the candidate."""
    return numpy.random.default_rng(0).normal(size=(steps, 4)) * 0.1 + numpy.array(mean)


def test_rounds_end_evenly_and_the_last_is_the_commitment() -> None:
    assert sorted(Rounds().elimination.steps) == [30, 60, 90]


def test_the_weakest_candidate_is_dropped() -> None:
    assert Rounds().end(30, [3.0, 1.0, 0.0, 2.0]) == ["relu", "gelu", "tanh"]


def test_without_significant_evidence_the_original_stays_and_the_next_weakest_is_dropped() -> None:
    rounds, even = Rounds(), noise([0.0, 0.0, 0.0, 0.0])
    assert rounds.end(30, [-5.0, 1.0, 0.0, 2.0], even) == ["relu", "gelu", "tanh"]
    assert rounds.end(60, [-5.0, 1.0, 0.0, 2.0], even) == ["relu", "tanh"]
    assert rounds.end(90, [-5.0, 1.0, 0.0, 2.0], even) == ["relu"]
    assert rounds.site.kept_original


def test_an_original_that_is_as_good_as_the_others_stays() -> None:
    rounds = Rounds()
    for step in (30, 60, 90):
        rounds.end(step, [-1.0, 1.0, 0.0, 2.0], noise([0.0, 0.0, 0.0, 0.0]))
    assert rounds.site.kept_original


def test_an_original_that_is_significantly_behind_is_dropped_when_it_is_the_weakest() -> None:
    rounds = Rounds()
    assert rounds.end(30, [-5.0, 1.0, 0.0, 2.0], noise([1.0, 0.0, 0.0, -1.0])) == ["gelu", "silu", "tanh"]


def test_an_original_that_was_significantly_behind_once_is_no_longer_protected() -> None:
    rounds = Rounds()
    assert "relu" in rounds.end(30, [1.0, 0.5, 0.0, 2.0], noise([1.0, 0.0, 0.0, -1.0]))
    assert rounds.end(60, [-5.0, 1.0, 0.0, 2.0]) == ["gelu", "tanh"]


def test_a_site_whose_original_is_no_candidate_protects_nothing() -> None:
    rounds = Rounds(original=nn.Mish())
    assert rounds.end(30, [-5.0, 1.0, 0.0, 2.0]) == ["gelu", "silu", "tanh"]


def test_half_of_the_candidates_are_dropped_at_once() -> None:
    config = FlexConfig(candidates=NAMES, pick_by="blend", eliminate="half", rewind=False)
    rounds = Rounds(config, original=nn.Mish())
    assert sorted(rounds.elimination.steps) == [45, 90]
    assert rounds.end(45, [-5.0, 1.0, 0.0, 2.0]) == ["gelu", "tanh"]
    assert rounds.end(90, [-5.0, 1.0, 0.0, 2.0]) == ["tanh"]


def test_a_dropped_candidate_keeps_its_evidence_against_the_leader() -> None:
    advantages = noise([0.0, 0.5, 1.0, -0.5])
    rounds = Rounds()
    rounds.end(30, [1.0, 0.5, 0.0, 2.0], advantages)
    behind = advantages[:, 2] - advantages[:, 3]
    expected = [behind.mean(), behind.std(ddof=1) / math.sqrt(30), 30]
    numpy.testing.assert_allclose(rounds.site.evidence[0, 2], expected, rtol=1e-3)
    assert rounds.site.evidence[0, [1, 3]].isnan().all()


def test_each_round_has_evidence_of_its_own() -> None:
    rounds = Rounds()
    rounds.end(30, [3.0, 1.0, 0.0, 2.0], noise([0.0, 0.5, 1.0, -0.5]))
    rounds.end(60, [3.0, 1.0, 0.0, 2.0], noise([0.0, 0.5, 1.0, -0.5], steps=7))
    assert rounds.site.evidence[0, 1, 2] == 7


def test_a_state_round_trips_between_rounds() -> None:
    one, other = Rounds(), Rounds()
    one.end(30, [1.0, 0.5, 0.0, 2.0], noise([1.0, 0.0, 0.0, -1.0]))
    saved = one.elimination.state_dict()
    for name, own in other.elimination.state_dict().items():
        own.copy_(saved[name])
    other.site.load_state_dict(one.site.state_dict())
    assert one.end(60, [-5.0, 1.0, 0.0, 2.0]) == other.end(60, [-5.0, 1.0, 0.0, 2.0]) == ["gelu", "tanh"]


# In a run


def fitted(original: nn.Module, target: nn.Module, seed: int = 0) -> nn.Module:
    """One unit that has to approximate the target, starting from the original function."""
    torch.manual_seed(seed)
    config = FlexConfig(pick_by="blend", round_steps=60)
    model = convert(nn.Sequential(nn.Linear(4, 1), original), "1", config)
    optimizer = torch.optim.Adam(param_groups(model), lr=0.05)
    schedule = Schedule(model, 300, optimizer)
    for _ in range(300):
        x = torch.rand(64, 4) * 2 - 1
        nn.functional.mse_loss(model(x), target(5 * x[:, :1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def test_an_original_is_dropped_if_another_candidate_is_better() -> None:
    assert selection(fitted(nn.ReLU(), nn.Tanh())).picks == {"1": "tanh"}


def test_an_original_is_kept_if_no_candidate_is_better() -> None:
    model = fitted(nn.Tanh(), nn.Tanh())
    assert model[1].kept_original


def diverged(original: nn.Module, value: float) -> Schedule:
    model = network(original=original)
    schedule = Schedule(model, 10)
    with torch.no_grad():
        model[1].logits[1] = value
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no optimizer of torch.optim")
        while not schedule.committed:
            schedule.step()
    return schedule


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_with_nan_logits_the_original_is_kept_with_a_warning(value: float) -> None:
    with pytest.warns(UserWarning, match="NaN or infinite"):
        schedule = diverged(nn.ReLU(), value)
    (site,) = schedule.router.sites
    assert site.kept_original
    assert schedule.steps_done == 2  # at the end of the first round
    assert site.logits.isfinite().all()
    assert type(flexact.extract(nn.Sequential(site))[0]) is nn.ReLU


def test_nan_logits_without_an_original_are_an_error() -> None:
    with pytest.raises(FlexActError, match="1 has no original"):
        diverged(nn.Mish(), math.nan)
