"""Tests that `convert`, `Schedule(model, total_steps, optimizer)` and `schedule.step(loss)` are enough.

They are, for every torch optimizer and any weight decay. Where a policy needs more, the Schedule says what.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import flexact
from flexact import FlexActError, FlexConfig, Schedule
from flexact.routing.sites import sites_of

STEPS = 24
OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
}
APART = {"LBFGS", "SparseAdam", "Muon"}
"""LBFGS takes a single group, and has its own tests here; the others refuse the weights of an ordinary network."""
VARIANTS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    **{name: (cls, {}) for name, cls in OPTIMIZERS.items() if name not in APART},
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "lr": 0.05}),
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
    "AdamW in a loop": (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
    "foreach SGD": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
}


def network(normalized: bool) -> nn.Module:
    torch.manual_seed(0)
    norms = [nn.LayerNorm(8) if normalized else nn.Identity() for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 8), norms[0], nn.ReLU(), nn.Linear(8, 8), norms[1], nn.ReLU(), nn.Linear(8, 1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :1].sin()).square().mean()


def trained(model: nn.Module, optimizer: Optimizer) -> tuple[list[Tensor], dict[str, str | None]]:
    """Returns the logits after each step of a run with three lines, and its picks."""
    schedule = Schedule(model, STEPS, optimizer)
    generator = torch.Generator().manual_seed(1)
    logits = []
    for _ in range(STEPS):
        loss = loss_of(model, torch.randn(16, 4, generator=generator))
        loss.backward()
        optimizer.step()
        assert all(site.logits.grad is None for site in sites_of(model))
        optimizer.zero_grad()
        schedule.step(loss)
        logits.append(torch.cat([site.logits.detach().clone() for site in sites_of(model)]))
    assert schedule.committed
    return logits, flexact.selection(model).picks


@pytest.mark.parametrize(
    ("name", "normalized"),
    [*((name, True) for name in VARIANTS), ("SGD with momentum", False), ("fused AdamW", False)],
)
@pytest.mark.filterwarnings("ignore:.*steps are few")
def test_plain_parameters_give_the_logits_and_picks_of_param_groups(name: str, normalized: bool) -> None:
    """A normalized network picks by a blend, any other by a trial."""
    cls, settings = VARIANTS[name]
    if "weight_decay" in inspect.signature(cls).parameters:
        settings = settings | {"weight_decay": 10.0}
    plain, grouped = (flexact.convert(network(normalized)) for _ in range(2))
    logits, picks = trained(plain, cls(plain.parameters(), **settings))
    expected, expected_picks = trained(grouped, cls(flexact.param_groups(grouped), **settings))
    assert all(torch.equal(one, other) for one, other in zip(logits, expected, strict=True))
    assert picks == expected_picks
    assert any(bool(one.any()) for one in logits) == normalized  # a blend moves them, a trial does not
    weights = [one for name, one in plain.named_parameters() if "logits" not in name]
    assert all(
        torch.equal(one, other)
        for one, other in zip(weights, [p for n, p in grouped.named_parameters() if "logits" not in n], strict=True)
    )


def test_every_optimizer_of_torch_is_tested() -> None:
    assert {cls for cls, _ in VARIANTS.values()} | {OPTIMIZERS[name] for name in APART & OPTIMIZERS.keys()} == set(
        OPTIMIZERS.values()
    )


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.filterwarnings("ignore:.*steps are few")
def test_lbfgs_does_not_move_the_logits_but_the_policy_does(line_search: str | None) -> None:
    model = flexact.convert(network(normalized=True))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6, line_search_fn=line_search)
    schedule = Schedule(model, 600, optimizer)  # its first drop comes after these steps
    x = torch.randn(16, 4)
    for _ in range(8):
        at_calls: list[Tensor] = []

        def closure(at_calls: list[Tensor] = at_calls) -> Tensor:
            at_calls.append(torch.cat([site.logits.detach().clone() for site in sites_of(model)]))
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        after = torch.cat([site.logits.detach() for site in sites_of(model)])
        assert len(at_calls) > 2
        assert not torch.equal(at_calls[0], after)  # the policy, once
        assert all(torch.equal(one, after) for one in at_calls[1:])
        schedule.step(loss)


@pytest.mark.filterwarnings("ignore:.*steps are few")
def test_the_penalty_of_the_default_policy_is_zero_at_every_step() -> None:
    model = flexact.convert(network(normalized=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = Schedule(model, STEPS, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(STEPS):
            loss = loss_of(model, torch.randn(16, 4))
            assert float(flexact.penalty(model)) == 0.0
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(loss)


def test_an_optimizer_that_would_decay_the_logits_of_the_papers_policy_is_refused() -> None:
    model = flexact.convert(network(normalized=True), config=FlexConfig.paper())
    for build in (torch.optim.AdamW, lambda own: torch.optim.SGD(own, lr=0.1, weight_decay=0.01)):
        with pytest.raises(FlexActError, match=r"weight_decay=0.01 to the logits of 2 sites \(2, 5\).*param_groups"):
            Schedule(model, STEPS, build(model.parameters()))
        Schedule(model, STEPS, build(flexact.param_groups(model)))
    Schedule(model, STEPS, torch.optim.Adam(model.parameters()))


@pytest.mark.parametrize(("alpha", "adds", "warns"), [(0.1, False, True), (0.1, True, False), (0.0, False, False)])
def test_a_loop_that_leaves_out_the_papers_penalty_is_warned_once(alpha: float, adds: bool, warns: bool) -> None:
    config = FlexConfig.paper(policy=flexact.Policy.paper(alpha=alpha))
    model = flexact.convert(network(normalized=True), config=config)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = Schedule(model, STEPS, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            loss = loss_of(model, torch.randn(16, 4))
            (loss + flexact.penalty(model) if adds else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(loss)
    texts = [str(one.message) for one in caught if "flexact.penalty(model)" in str(one.message)]
    assert len(texts) == int(warns)


def resumed(normalized: bool, parts: tuple[str, ...], after: int = 5) -> list[str]:
    """Returns the warnings of a run that resumes from a checkpoint of which only some parts are loaded."""

    def build() -> dict[str, Any]:
        model = flexact.convert(network(normalized))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule = Schedule(model, 600, optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": schedule}

    def step(run: dict[str, Any]) -> None:
        loss = loss_of(run["model"], torch.randn(16, 4))
        loss.backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        run["schedule"].step(loss)

    first = build()
    for _ in range(after):
        step(first)
    saved = {name: copy.deepcopy(part.state_dict()) for name, part in first.items()}
    again = build()
    for name in parts:
        again[name].load_state_dict(saved[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(again)
    return [str(one.message) for one in caught if "schedule.load_state_dict" in str(one.message)]


@pytest.mark.parametrize("normalized", [True, False], ids=["blend", "trial"])
def test_resuming_without_the_schedules_state_warns_once(normalized: bool) -> None:
    assert len(resumed(normalized, ("model", "optimizer"))) == 1
    assert len(resumed(normalized, ("optimizer",))) == 1
    assert len(resumed(normalized, ("model",))) == int(normalized)  # in a trial the sites look as at the start
    for order in (("model", "optimizer", "schedule"), ("schedule", "optimizer", "model"), ()):
        assert resumed(normalized, order) == []
    assert resumed(normalized, ("model", "optimizer"), after=0) == []


def test_extract_reports_a_schedule_that_was_never_stepped() -> None:
    model = flexact.convert(network(normalized=True))
    with pytest.raises(FlexActError, match="Let the Schedule reach its commitment"):
        flexact.extract(model)
    schedule = Schedule(model, 600, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(FlexActError, match=re.escape("schedule.step(loss) was never called")):
        flexact.extract(model)
    schedule.step(torch.ones(()))
    with pytest.raises(FlexActError, match="Let the Schedule reach its commitment"):
        flexact.extract(model)


def test_a_plain_checkpoint_says_to_load_it_before_convert() -> None:
    plain = network(normalized=True)
    model = flexact.convert(network(normalized=True))
    before = copy.deepcopy(model.state_dict())
    message = r"Load the weights before convert, or use flexact\.load_picks"
    with pytest.warns(UserWarning, match=message), pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(plain.state_dict())
    with pytest.warns(UserWarning, match=message), pytest.raises(RuntimeError, match="Missing key"):
        nn.ModuleDict({"net": model}).load_state_dict({f"net.{k}": v for k, v in plain.state_dict().items()})
    sites = [name for name in before if name.partition(".")[0] in ("2", "5")]
    assert all(torch.equal(before[name].nan_to_num(), model.state_dict()[name].nan_to_num()) for name in sites)
    with pytest.warns(UserWarning, match="with strict=False the sites keep their state"):
        model.load_state_dict(plain.state_dict(), strict=False)
    model.load_state_dict(flexact.convert(network(normalized=True)).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        nn.ModuleDict({"net": model}).load_state_dict({})


def test_muon_which_cannot_hold_logits_needs_a_second_optimizer() -> None:
    model = flexact.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    matrices = [one for one in model.parameters() if one.ndim == 2]
    others = [one for one in model.parameters() if one.ndim != 2]
    with pytest.raises(FlexActError, match="as Muon does, let a second optimizer hold the logits"):
        Schedule(model, STEPS, torch.optim.Muon(matrices))
    Schedule(model, STEPS, torch.optim.AdamW(others))
