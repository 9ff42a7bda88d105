"""Tests of the trial: candidates are trained one after another from the same start, and the winner continues as the
plain network would.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import flexact
from configs import flat
from flexact import FlexAct, FlexActError, FlexConfig, Schedule, convert, param_groups, selection
from flexact.routing.sites import sites_of

MODULES = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "elu": nn.ELU, "tanh": nn.Tanh}
NAMES = tuple(MODULES)
CONFIG = FlexConfig(trial_steps=12)
# Of five candidates: 5 for 3 steps, 3 for 3 more, 2 for 6 more.
TRIAL, WINNER = 36, 12
LENGTH = 40
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*steps are few for a pick")


class Network(nn.Module):
    """A network without normalisation, with a buffer that every training step changes."""

    def __init__(self, seed: int = 0, act: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.act, self.second, self.other, self.last = (
            nn.Linear(4, 8), act(), nn.Linear(8, 8), act(), nn.Linear(8, 2)
        )  # fmt: skip
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        return self.last(self.other(self.second(self.act(self.first(x)))))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(x), (x[:, 0] * x[:, 1] > 0).long())


class Run:
    """A loop that restarts its data with the weights. reported: maps the loss and the candidate to the loss that is
    passed on.
    """

    def __init__(
        self,
        make: Make = OPTIMIZERS["SGD"],
        seed: int = 0,
        config: FlexConfig = CONFIG,
        reported: Callable[[float, str | None, int], float] | None = None,
        **length: int,
    ) -> None:
        self.model = convert(Network(seed), config=config).train()
        self.optimizer = make(param_groups(self.model))
        self.schedule = Schedule(self.model, optimizer=self.optimizer, **(length or {"network_steps": LENGTH}))
        self.reported = reported
        self.losses: list[tuple[str | None, int, float]] = []

    @property
    def tried(self) -> str | None:
        at = self.schedule.router.trying
        return None if at is None else self.model.act.candidates[at]

    def to(self, step: int) -> Run:
        while self.schedule.steps_done < step:
            place, tried = self.schedule.trained_steps, self.tried
            loss = loss_of(self.model, place)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append((tried, place, loss.item()))
            self.schedule.step(loss if self.reported is None else self.reported(loss.item(), tried, place))
        return self

    def weights(self) -> dict[str, Tensor]:
        own = ("logits", "dropped_at", "evidence", "temperature", "signature")
        return {name: t.clone() for name, t in self.model.state_dict().items() if not name.endswith(own)}


def favouring(wanted: str) -> Callable[[float, str | None, int], float]:
    return lambda loss, tried, place: loss if tried == wanted else loss + 10


def trained_plain(pick: str, make: Make, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    plain = Network(act=MODULES[pick]).train()
    optimizer = make(plain.parameters())
    losses = []
    for step in range(steps):
        loss = loss_of(plain, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return plain, optimizer, losses


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=0, atol=0, equal_nan=True)


# The winner is the plain network


@pytest.mark.parametrize(("name", "wanted"), [("SGD", "relu"), ("SGD", "silu"), ("AdamW", "tanh")])
def test_the_winner_is_bit_identical_to_the_plain_network_after_the_trial_and_at_the_end(
    name: str, wanted: str
) -> None:
    make = OPTIMIZERS[name]
    run = Run(make, reported=favouring(wanted))
    for end, steps in ((TRIAL, WINNER), (run.schedule.total_steps, LENGTH)):
        run.to(end)
        assert run.schedule.trained_steps == steps
        assert selection(run.model).picks == {"act": wanted, "other": wanted}
        plain, optimizer, losses = trained_plain(wanted, make, steps)
        assert_same(run.weights(), plain.state_dict())
        parameters = dict(run.model.named_parameters())
        for name, parameter in plain.named_parameters():
            assert_same(run.optimizer.state[parameters[name]], optimizer.state[parameter])
        own = [(place, loss) for tried, place, loss in run.losses if tried in (wanted, None)]
        assert own == list(enumerate(losses))
    x = torch.randn(5, 4)
    assert torch.equal(flexact.extract(run.model).eval()(x), plain.eval()(x))


def test_every_candidate_starts_from_the_same_weights_and_resumes_where_it_stopped() -> None:
    run = Run(reported=favouring("elu")).to(TRIAL)
    for name in NAMES:
        own = [(place, loss) for tried, place, loss in run.losses if tried == name]
        _, _, losses = trained_plain(name, OPTIMIZERS["SGD"], len(own))
        assert own == list(enumerate(losses)), name
    lengths = sorted(sum(tried == name for tried, _, _ in run.losses) for name in NAMES)
    assert lengths == [3, 3, 6, 12, 12]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_lowest_loss_over_the_last_steps_of_each_rung_wins(make: Make) -> None:
    """Successive halving by hand: three candidates for 6 steps, the better two for 12, each compared over three."""
    names = ("tanh", "elu", "silu")
    losses = {name: trained_plain(name, make, 12)[2] for name in names}
    finalists = sorted(names, key=lambda name: sum(losses[name][3:6]))[:2]
    run = Run(make, config=FlexConfig(candidates=names, trial_steps=12)).to(30)
    assert run.model.act.picks == (min(finalists, key=lambda name: sum(losses[name][9:12])),)
    assert {name for name in names if int(run.model.act.dropped_at[0, names.index(name)]) == 18} == (
        set(names) - set(finalists)
    )


@pytest.mark.parametrize("steps", [20, 40, 77])
def test_the_final_network_was_trained_for_the_requested_steps(steps: int) -> None:
    run = Run(network_steps=steps)
    run.to(run.schedule.total_steps)
    assert run.schedule.trained_steps == steps
    assert_same(run.weights(), trained_plain(run.model.act.picks[0], OPTIMIZERS["SGD"], steps)[0].state_dict())


def test_a_learning_rate_schedule_named_in_rewinds_is_that_of_the_networks_step() -> None:
    model = convert(Network(), config=CONFIG)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    schedule = Schedule(model, 60, optimizer, [scheduler])
    for _ in range(60):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / (1 + schedule.trained_steps))
        loss = loss_of(model, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        schedule.step(loss)


def test_in_a_trial_every_site_runs_one_candidate_in_both_modes_and_no_logit_moves() -> None:
    run = Run()
    x, modules = torch.randn(5, 8), {name: module() for name, module in MODULES.items()}
    for step in range(1, TRIAL):
        expected = modules[run.tried](x)
        for training in (True, False):
            run.model.train(training)
            assert torch.equal(run.model.act(x), expected)
            assert torch.equal(run.model.other(x), expected)
        run.model.train()
        run.to(step)
    assert not any(site.logits.detach().any() for site in sites_of(run.model))
    assert flexact.penalty(run.model).item() == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_in_a_trial_runs_the_candidate_being_trained(copied: Callable[[nn.Module], nn.Module]) -> None:
    run = Run().to(5)
    x = torch.randn(5, 4)
    own = copied(run.model)
    assert run.tried == "gelu"
    assert torch.equal(own(x), run.model(x))
    run.to(7)
    assert own.act.router.trying == NAMES.index("gelu")
    assert run.tried != "gelu"
    assert Schedule(own, total_steps=2).router.trying is None


# Resuming


@pytest.mark.parametrize(("name", "cut"), [("SGD", 3), ("AdamW", 1), ("AdamW", 17), ("AdamW", TRIAL), ("AdamW", 50)])
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, cut: int) -> None:
    make = OPTIMIZERS[name]
    whole = Run(make).to(cut)
    saved = io.BytesIO()
    parts = (whole.model, whole.optimizer, whole.schedule)
    torch.save([part.state_dict() for part in parts], saved)
    whole.to(whole.schedule.total_steps)
    resumed = Run(make, seed=9)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    for part, state in zip((resumed.model, resumed.optimizer, resumed.schedule), states, strict=True):
        part.load_state_dict(state)
    resumed.to(resumed.schedule.total_steps)
    assert resumed.losses == whole.losses[cut:]
    assert_same(resumed.model.state_dict(), whole.model.state_dict())
    assert resumed.schedule.trained_steps == whole.schedule.network_steps == LENGTH
    assert resumed.schedule.rewound_at == whole.schedule.rewound_at


def test_a_schedule_made_for_a_model_that_was_loaded_first_has_the_same_plan() -> None:
    whole = Run().to(TRIAL + 2)
    model = convert(Network(), config=CONFIG)
    model.load_state_dict(whole.model.state_dict())
    schedule = Schedule(model, network_steps=LENGTH)
    schedule.load_state_dict(whole.schedule.state_dict())
    assert (schedule.total_steps, schedule.trained_steps) == (whole.schedule.total_steps, WINNER + 2)


# Missing and non-finite losses


def test_without_a_loss_the_run_falls_back_to_a_blend_with_a_warning() -> None:
    run = Run(total_steps=60)
    start = run.weights()
    loss_of(run.model, 0).backward()
    run.optimizer.step()
    with pytest.warns(UserWarning, match=r"schedule\.step\(loss\)") as caught:
        run.schedule.step()
    assert caught[0].filename == __file__
    assert_same(run.weights(), start)
    assert not run.optimizer.state
    assert (run.tried, run.schedule.trained_steps, run.schedule.rewound_at) == (None, 0, 1)
    x = torch.randn(5, 8)
    torch.testing.assert_close(run.model.act(x), sum(module()(x) for module in MODULES.values()) / 5)
    assert run.schedule.commit_step == 42  # 70 % of the run, as a blend has it
    again = Run(seed=5, total_steps=60)
    again.schedule.load_state_dict(run.schedule.state_dict())
    assert (again.tried, again.schedule.commit_step) == (None, 42)


def test_a_blend_needs_no_loss() -> None:
    run = Run(config=FlexConfig(pick_by="blend", round_steps=5), total_steps=60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(run.model, 0).backward()
        run.optimizer.step()
        run.schedule.step()


@pytest.mark.parametrize("steps", [0, 4])
def test_a_missing_loss_in_a_trial_is_an_error(steps: int) -> None:
    run = Run().to(steps)
    with pytest.raises(FlexActError, match="without a loss"):
        run.schedule.step()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("loser", ["relu", "tanh"])
def test_a_candidate_whose_loss_is_nan_is_dropped_first(loser: str, value: float) -> None:
    run = Run(reported=lambda loss, tried, place: value if tried == loser and place == 2 else loss)
    with pytest.warns(UserWarning, match="NaN or infinite loss"):
        run.to(5 * 3)
    at = NAMES.index(loser)
    for site in sites_of(run.model):
        assert int(site.dropped_at[0, at]) == 15
        assert math.isinf(site.evidence[0, at, 0])
    run.to(TRIAL)
    assert run.model.act.picks[0] != loser


def test_a_candidate_that_diverges_is_named_in_a_warning() -> None:
    with pytest.warns(UserWarning, match="NaN or infinite loss in the trial and are dropped: silu") as caught:
        Run(reported=lambda loss, tried, place: math.nan if tried == "silu" else loss).to(15)
    assert caught[0].filename == __file__


def test_a_learning_rate_that_is_not_rewound_is_warned_about_at_the_users_line() -> None:
    run = Run()
    rate = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)

    def train() -> None:
        for step in range(4):
            loss = loss_of(run.model, step)
            loss.backward()
            run.optimizer.step()
            rate.step()
            run.schedule.step(loss)

    with pytest.warns(UserWarning, match="the learning rate of SGD stays at") as caught:
        train()
    assert [warning.filename for warning in caught] == [__file__]


def test_a_network_with_several_originals_blends_so_that_it_can_keep_them() -> None:
    model = convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    assert not Schedule(model, network_steps=2_000)._plan.rungs


def test_if_no_candidate_trains_every_site_keeps_its_original_and_the_weights_are_reset() -> None:
    run = Run(reported=lambda loss, tried, place: math.nan)
    start = run.weights()
    run.to(14)
    with pytest.warns(UserWarning, match="NaN or infinite"):
        run.to(15)
    assert run.schedule.committed
    assert selection(run.model).picks == {"act": "relu", "other": "relu"}
    assert_same(run.weights(), start)
    assert (run.schedule.trained_steps, run.schedule.rewound_at) == (0, 15)
    run.reported = None
    run.to(25)
    assert_same(run.weights(), trained_plain("relu", OPTIMIZERS["SGD"], 10)[0].state_dict())


def test_if_no_candidate_trains_and_there_is_no_original_it_is_an_error() -> None:
    run = Run(config=FlexConfig(candidates=("tanh", "elu"), trial_steps=4), reported=lambda *_: math.inf)
    with pytest.raises(FlexActError, match="act has no original"):
        run.to(8)


# Undecided and decided


def noisy(original: str, best: str, lead: float) -> Callable[[float, str | None, int], float]:
    """Returns losses of two candidates that differ by a mean lead, with noise of size 1. Others are far behind."""

    def reported(loss: float, tried: str | None, place: int) -> float:
        generator = torch.Generator().manual_seed(1000 * place + NAMES.index(tried or original))
        noise = torch.randn((), generator=generator).item()
        return {original: 5 + noise, best: 5 + noise - lead}.get(tried or "", 50.0)

    return reported


@pytest.mark.parametrize(("lead", "pick"), [(0.0, "relu"), (50.0, "silu")])
def test_the_original_is_kept_unless_another_is_significantly_better(lead: float, pick: str) -> None:
    run = Run(reported=noisy("relu", "silu", lead)).to(TRIAL)
    assert run.model.act.picks == (pick,)


def test_the_original_is_kept_if_all_candidates_are_equal() -> None:
    config = FlexConfig(candidates=("tanh", "relu"), trial_steps=6)
    run = Run(config=config, reported=lambda *_: 1.0).to(12)
    assert run.model.act.picks == ("relu",)


def test_the_evidence_is_the_mean_difference_of_the_compared_losses() -> None:
    """The last rung compares a third of its six steps, but at least three."""
    run = Run(reported=favouring("tanh")).to(TRIAL)
    (loser,) = {name for name in NAMES if sum(tried == name for tried, _, _ in run.losses) == 12} - {"tanh"}
    reported = {name: [loss for tried, place, loss in run.losses if tried == name and place >= 9] for name in NAMES}
    difference = torch.tensor(reported[loser]) + 10 - torch.tensor(reported["tanh"])
    expected = [difference.mean(), difference.std() / 3**0.5, 3]
    found = run.model.act.evidence[0, NAMES.index(loser)]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


# When there is a trial


@pytest.mark.parametrize(
    "changes",
    [
        {"share": "site"},
        {"noise": 1.0},
        {"warmup": 0.1},
        {"logit_step": "optimizer"},
        {"rewind": False},
        {"eliminate": "one"},
        {"commit_at": None},
        {"pick_by": "blend"},
    ],
    ids=str,
)
def test_a_config_that_asks_for_something_else_blends(changes: dict[str, Any]) -> None:
    assert Run(config=flat(**changes), total_steps=100).tried is None


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_network_that_normalises_its_weights_only_runs_a_trial(wrap: Callable[[nn.Module], nn.Module]) -> None:
    def network(act: type[nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(wrap(nn.Linear(4, 8)), act(), nn.Linear(8, 2))

    model = convert(network(nn.ReLU), config=CONFIG)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    schedule = Schedule(model, network_steps=LENGTH, optimizer=optimizer)
    assert schedule.router.trying is not None
    for _ in range(schedule.total_steps):
        loss = loss_of(model, schedule.trained_steps)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(loss)
    plain = network(MODULES[selection(model)[0].pick])
    optimizer = OPTIMIZERS["AdamW"](plain.parameters())
    for step in range(LENGTH):
        loss_of(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flexact.extract(model).state_dict(), plain.state_dict())


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)], ids=repr)
def test_a_network_with_normalisation_blends_unless_a_trial_is_asked_for(norm: nn.Module) -> None:
    layers = [nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 2)]
    for pick_by, tries in (("auto", False), ("trial", True)):
        config = FlexConfig(pick_by=pick_by)  # type: ignore[arg-type]
        model = convert(nn.Sequential(*copy.deepcopy(layers)), config=config)
        schedule = Schedule(model, 100)
        assert (schedule.router.trying is not None) is tries


def test_sites_with_different_candidates_cannot_be_tried_together() -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Mish(), nn.Linear(8, 2))

    model = convert(network(), config=FlexConfig(pick_by="trial"))
    with pytest.raises(FlexActError, match="different candidates"):
        Schedule(model, 100)
    assert Schedule(convert(network()), 100).router.trying is None


def test_a_model_with_no_parameters_outside_its_sites_blends() -> None:
    assert Schedule(nn.Sequential(FlexAct()), 100).router.trying is None


# Runs that are too short


@pytest.mark.filterwarnings("default")
def test_a_short_run_warns_of_the_steps_that_picking_takes() -> None:
    model = convert(Network())
    # 5 candidates for 75 steps, 3 for 75 more, 2 for 150 more
    with pytest.warns(UserWarning, match="100 steps .*1260 steps"):
        Schedule(model, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Schedule(model, 1300)


@pytest.mark.parametrize("total", [1, 2, 5, 10, 14])
def test_a_run_too_short_for_a_trial_falls_back_to_a_blend_and_still_commits(total: int) -> None:
    run = Run(total_steps=total)
    assert run.tried is None
    run.to(total)
    assert run.schedule.committed


# Evidence


def noise(seed: int) -> Callable[[float, str | None, int], float]:
    """Losses that are independent of the candidates."""
    generator = torch.Generator().manual_seed(seed)
    return lambda loss, tried, place: 10 + float(torch.randn((), generator=generator))


def test_noise_rarely_replaces_the_original() -> None:
    config = replace(CONFIG, candidates=("relu", "gelu", "silu", "tanh"), trial_steps=84)
    kept = 0
    for seed in range(12):
        run = Run(config=config, reported=noise(seed))
        row = selection(run.to(run.schedule.commit_step).model)[0]
        kept += row.pick == "relu"
        assert row.pick == "relu" or row.decided
    assert kept >= 8


def test_a_pick_is_decided_by_its_lead_over_the_original_and_not_over_the_runner_up() -> None:
    run = Run(
        reported=lambda loss, tried, place: (
            (0.0 if tried == "silu" else 0.0 if tried == "tanh" else 10.0) + 1e-3 * place
        )
    )
    run.to(TRIAL)
    row = selection(run.model)[0]
    assert row.pick in ("silu", "tanh")
    assert row.decided
    assert row.over_original is not None
    assert row.over_original.z > 2
    assert not (row.lead and row.lead.is_significant)


def held_out_run(function: Callable[[], Any], **config: Any) -> tuple[nn.Module, Schedule]:
    model = convert(Network(), config=replace(CONFIG, **config)).train()
    optimizer = torch.optim.SGD(param_groups(model), lr=0.01)
    schedule = Schedule(model, optimizer=optimizer, network_steps=LENGTH, held_out=function)
    while not schedule.committed:
        loss = loss_of(model, schedule.trained_steps)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(loss)
    return model, schedule


def test_a_held_out_loss_that_is_the_same_for_all_keeps_the_original_undecided() -> None:
    numbers = iter(range(10**6))
    model, _ = held_out_run(lambda: 1.0 + 0.1 * (next(numbers) % 2))
    row = selection(model)[0]
    assert (row.pick, row.decided) == (row.original, False)


def test_held_out_runs_in_eval_mode_and_does_not_change_the_model() -> None:
    seen: list[tuple[bool, bool]] = []

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.training, torch.is_grad_enabled()))
            return x

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Noting(), nn.Linear(4, 1))
    model = convert(model, config=replace(CONFIG, candidates=("relu", "tanh"))).train()
    optimizer = torch.optim.SGD(param_groups(model), lr=0.01)
    x = torch.randn(8, 3)
    schedule = Schedule(model, optimizer=optimizer, network_steps=LENGTH, held_out=lambda: model(x).square().mean())
    while not schedule.committed:
        seen.clear()
        loss = model(x).square().mean()
        assert seen == [(True, True)]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(loss)
        assert all(one == (False, False) for one in seen[1:])
        assert model.training


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: torch.ones(2), "must return one number"),
        (lambda: None, "must return one number"),
        (lambda: True, "must return one number"),
        (lambda: "1.0", "must return one number"),
        (lambda: math.nan, "returned nan for the initial weights"),
        (lambda: math.inf, "returned inf for the initial weights"),
    ],
)
def test_an_invalid_held_out_loss_is_refused_before_the_run(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(FlexActError, match=message):
        Schedule(convert(Network(), config=CONFIG), network_steps=LENGTH, held_out=function)


def test_the_held_out_loss_before_the_run_changes_nothing() -> None:
    model = convert(Network(), config=CONFIG).train()
    model.other.eval()
    found: list[tuple[str, bool]] = []

    def held_out() -> Tensor:
        random.random()
        found.append((model.act.candidates[model.act.router.trying], model.training))
        return model(torch.randn(8, 4)).square().mean()

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    Schedule(model, network_steps=LENGTH, held_out=held_out)
    assert found == [("relu", False)]
    assert (model.training, model.act.training, model.other.training) == (True, True, False)
    assert_same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"share": "site"}, "picks by a blend"), ({"pick_by": "blend"}, "picks by a blend"), ({"rewind": False}, "blend")],
)
def test_held_out_is_refused_where_it_is_not_used(changes: dict[str, Any], message: str) -> None:
    model = convert(Network(), config=replace(CONFIG, **changes))
    with pytest.raises(FlexActError, match=message):
        Schedule(model, network_steps=LENGTH, held_out=lambda: 1.0)
    with pytest.raises(FlexActError, match="held_out"):
        Schedule(convert(Network(), config=CONFIG), network_steps=LENGTH, held_out=3)  # type: ignore[arg-type]


# Resuming, and states that are refused


def test_an_error_for_other_steps_shows_those_of_the_saved_run() -> None:
    state = Run().schedule.state_dict()
    with pytest.raises(FlexActError, match=f"the saved run has network_steps={LENGTH}, but"):
        Run(network_steps=LENGTH + 1).schedule.load_state_dict(state)


def test_the_warning_about_a_short_run_names_the_network_steps_and_those_that_picking_takes() -> None:
    needed = "which takes about 1260 steps in the first 70 % of the run"
    with pytest.warns(UserWarning, match=rf"^with network_steps=300, the run's \d+ steps are few .* {needed}\."):
        Schedule(convert(Network()), network_steps=300)


def test_a_state_in_memory_does_not_change_as_training_continues() -> None:
    run = Run().to(TRIAL // 2)
    state = run.schedule.state_dict()
    kept = set(state["trial"]["saved"])
    run.to(TRIAL - 1)
    assert set(state["trial"]["saved"]) == kept


def test_a_state_of_another_plan_is_refused() -> None:
    run = Run(config=replace(CONFIG, trial_steps=WINNER)).to(3)
    other = convert(Network(), config=replace(CONFIG, trial_steps=WINNER // 2))
    schedule = Schedule(other, total_steps=run.schedule.total_steps)
    with pytest.raises(FlexActError, match=r"the saved run has (network_steps|drops)="):
        schedule.load_state_dict(run.schedule.state_dict())


def test_a_commitment_during_a_trial_is_to_the_candidate_whose_weights_the_model_has() -> None:
    run = Run().to(TRIAL // 2)
    tried, weights = run.tried, run.weights()
    assert tried not in (None, "relu")
    plain = flexact.extract(run.model, commit=True)
    assert type(plain.act) is MODULES[tried]
    assert not run.schedule.committed
    flexact.commit(run.model)
    assert selection(run.model).picks == {"act": tried, "other": tried}
    assert_same(run.weights(), weights)
    run.to(run.schedule.total_steps)
    assert selection(run.model).picks == {"act": tried, "other": tried}


def test_a_trial_gives_no_pick_a_name_before_its_end() -> None:
    run = Run().to(1)
    assert set(selection(run.model).picks.values()) == {None}
    assert selection(run.model).to_dict()["rows"][0]["pick"] is None


def test_groups_cannot_be_tried_together() -> None:
    config = replace(CONFIG, pick_by="trial")
    with pytest.raises(FlexActError, match="pick together"):
        Schedule(convert(Network(), config=config, share=lambda name: name), total_steps=100)


def test_a_loss_that_is_no_number_is_refused_immediately() -> None:
    schedule = Run().schedule
    for loss in (torch.ones(2), "low"):
        with pytest.raises(FlexActError, match="one number"):
            schedule.step(loss)  # type: ignore[arg-type]
    assert schedule.steps_done == 0


def test_the_number_of_network_steps_is_kept_in_short_runs_and_without_a_loss() -> None:
    normalised = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 1))
    schedule = Schedule(convert(normalised), network_steps=500)
    assert schedule.network_steps == 500 == schedule.total_steps - schedule.commit_step
    schedule = Run().schedule
    with pytest.raises(FlexActError, match=r"schedule\.step\(loss\)"):
        schedule.step()


@pytest.mark.parametrize("trains_another_model", [False, True])
def test_a_loop_that_does_not_train_the_model_is_warned_about(trains_another_model: bool) -> None:
    run = Run()
    other = Network()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)

    def train() -> None:
        for step in range(4):
            loss_of(other if trains_another_model else run.model, step).backward()
            optimizer.step()
            run.schedule.step(1.0)

    with pytest.warns(
        UserWarning, match=r"no optimizer of torch.optim has stepped the weights.*optimizer\.step\(\)"
    ) as caught:
        train()
    assert [warning.filename for warning in caught] == [__file__]


def test_a_new_schedule_for_a_model_that_has_dropped_candidates_warns_once() -> None:
    run = Run().to(5 * 3)  # one rung: two candidates are dropped
    run.optimizer = OPTIMIZERS["SGD"](param_groups(run.model))
    run.schedule = Schedule(run.model, network_steps=LENGTH, optimizer=run.optimizer)
    with pytest.warns(UserWarning, match="state of an earlier run") as caught:
        run.to(2)
    assert len(caught) == 1


def test_a_site_that_is_committed_before_training_is_no_earlier_run() -> None:
    run = Run()
    sites_of(run.model)[0].commit(candidate=0)
    run.schedule = Schedule(run.model, network_steps=LENGTH, optimizer=run.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.to(2)


def test_a_new_schedule_that_adds_steps_to_a_committed_model_warns_once() -> None:
    model = flexact.commit(convert(Network()))
    schedule = Schedule(model, network_steps=LENGTH)
    with pytest.warns(UserWarning, match="every site of this model is committed") as caught:
        schedule.step(1.0)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step(1.0)


def test_a_candidate_that_the_original_displaces_keeps_the_evidence_of_their_own_difference() -> None:
    """In the first rung relu, the original, is last by less than the noise, so it takes the place of the third."""
    order = ("gelu", "silu", "elu", "tanh", "relu")

    def loss(candidate: str, place: int) -> float:
        rank = order.index(candidate)
        return 0.01 * rank + (0.3 if place % 2 else -0.3) * rank

    def reported(_: float, tried: str | None, place: int) -> float:
        return loss(str(tried), place)

    run = Run(config=replace(CONFIG, trial_steps=48), reported=reported, network_steps=200).to(5 * 12)
    (site, *_) = sites_of(run.model)
    assert [site.candidates[k] for k in site.alive] == ["relu", "gelu", "silu"]
    margin, error, _ = site.evidence[0, site.candidates.index("elu")].tolist()
    difference = torch.tensor([loss("elu", place) - loss("relu", place) for place in range(8, 12)])
    assert margin == pytest.approx(float(difference.mean()), abs=1e-5)
    assert error == pytest.approx(float(difference.std()) / 2, rel=1e-4)


def test_a_candidate_whose_weights_become_nan_in_a_step_with_a_finite_loss_is_dropped() -> None:
    model = convert(Network(), config=CONFIG)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05)
    schedule = Schedule(model, network_steps=LENGTH, optimizer=optimizer, held_out=lambda: loss_of(model, 99))
    silu = model.act.candidates.index("silu")

    def train() -> None:
        for step in range(5 * 3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if schedule.router.trying == silu:
                model.first.weight.data.fill_(math.nan)
            schedule.step(1.0)

    with pytest.warns(UserWarning, match=r"NaN or infinite loss.*silu"):
        train()
    assert int(model.act.dropped_at[0, silu]) == 5 * 3
