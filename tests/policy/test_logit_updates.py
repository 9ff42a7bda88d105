"""Tests of the corrections on a model: the penalty in the loss, and changes of the gradients before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexact
from configs import flat_paper
from flexact import FlexAct, FlexConfig, Policy
from flexact.config import PAPER_CANDIDATES
from flexact.ops import reference
from flexact.policy import logit_updates as policy
from flexact.policy.evidence import RoundStatistics
from flexact.policy.optimizers import Step
from flexact.routing.sites import sites_of

FIVE = PAPER_CANDIDATES


def site_with(logits: list[float] | None = None, **changes: Any) -> FlexAct:
    site = FlexAct(config=flat_paper(**changes))
    if logits is not None:
        with torch.no_grad():
            site.logits.copy_(torch.tensor(logits))
    return site


def kl(target: Tensor, q: Tensor) -> Tensor:
    return (target * (target.log() - q.log())).sum()


@pytest.mark.parametrize("lam", [0.3, 2.0, "temperature"])
def test_penalty_is_alpha_times_the_kl_from_the_target_to_pi(lam: float | str) -> None:
    h = torch.randn(50, 3)
    site = site_with([0.5, 0.0, -1.0, 1.0, 0.2], lam=lam, alpha=0.7, temperature=0.5)
    site(h)
    sensitivity = reference.mean_sensitivity(h, FIVE)[0]
    target = torch.softmax(-sensitivity / (0.5 if lam == "temperature" else float(lam)), -1)
    expected = 0.7 * kl(target, torch.softmax(site.logits, -1))
    torch.testing.assert_close(flexact.penalty(site), expected)
    (gradient,) = torch.autograd.grad(flexact.penalty(site), site.logits)
    torch.testing.assert_close(gradient, 0.7 * (torch.softmax(site.logits.detach(), -1) - target))


def test_penalty_on_the_sampled_p_has_the_gradient_of_proposition_2() -> None:
    h = torch.randn(50, 3)
    site = site_with([0.5, 0.0, -1.0, 1.0, 0.2], kl_on="p", temperature=0.5, alpha=1.0, lam=0.4)
    site(h)
    p = site.router.p[0]
    target = torch.softmax(-reference.mean_sensitivity(h, FIVE)[0] / 0.4, -1)
    (gradient,) = torch.autograd.grad(flexact.penalty(site), site.logits)
    # (p − p̃)/τ is the gradient of log π; that of the logits is the same, since it sums to zero.
    torch.testing.assert_close(gradient, (p - target) / 0.5)
    torch.testing.assert_close(flexact.penalty(site), kl(target, p))


def test_penalty_from_clipped_norms() -> None:
    h = torch.randn(50, 3)
    site = site_with(correction="clipped_norm_kl", clip=0.3, lam=0.5, alpha=1.0)
    site(h)
    target = torch.softmax(-reference.mean_sensitivity(h, FIVE)[0].clamp(max=0.3) / 0.5, -1)
    torch.testing.assert_close(flexact.penalty(site), kl(target, torch.full((5,), 0.2)))


@pytest.mark.parametrize(
    "changes",
    [
        {"correction": "none"},
        {"correction": "clip_logit_gradient"},
        {"correction": "output_norm"},
        {"alpha": 0.0},
        {"alpha_kind": "relative"},
    ],
    ids=str,
)
def test_the_penalty_is_zero_where_none_is_needed(changes: dict[str, Any]) -> None:
    site = site_with([1.0, 0.0, 0.0, 0.0, 0.0], **changes)
    site(torch.randn(5))
    assert flexact.penalty(site).item() == 0


def test_penalty_is_zero_before_a_forward_after_an_eval_forward_once_committed_and_for_any_model() -> None:
    site = site_with([1.0, 0.0, 0.0, 0.0, 0.0])
    assert flexact.penalty(site).item() == 0
    site.eval()(torch.randn(5))
    assert flexact.penalty(site).item() == 0
    site.train()(torch.randn(5))
    assert flexact.penalty(site).item() > 0
    flexact.commit(site)
    assert flexact.penalty(site).item() == 0
    assert flexact.penalty(nn.Linear(2, 2)).item() == 0
    assert flexact.penalty(nn.ReLU()).shape == ()


def test_penalty_of_a_model_is_the_sum_over_its_sites() -> None:
    torch.manual_seed(0)
    config = FlexConfig.paper(policy=Policy.paper(noise=0.0, lam=1.0, alpha=0.3))
    model = flexact.convert(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh()), "*", config=config)
    x = torch.randn(20, 3)
    first, second = sites_of(model)
    with torch.no_grad():
        first.logits.copy_(torch.randn(5))
        second.logits.copy_(torch.randn(5))
    model(x)
    total, h = torch.zeros(()), x
    for linear, site in ((model[0], first), (model[2], second)):
        h = linear(h)
        target = torch.softmax(-reference.mean_sensitivity(h, FIVE)[0], -1)
        total = total + 0.3 * kl(target, torch.softmax(site.logits, -1))
        h = site(h)
    torch.testing.assert_close(flexact.penalty(model), total)


def test_penalty_ignores_dropped_candidates_and_has_a_finite_gradient() -> None:
    h = torch.randn(50)
    for kl_on in ("pi", "p"):
        site = site_with(kl_on=kl_on, alpha=1.0, lam=1.0)
        site.drop(torch.tensor([[False, True, False, True, False]]), step=0)
        site(h)
        kept = ("relu", "tanh", "identity")
        target = torch.softmax(-reference.mean_sensitivity(h, kept)[0], -1)
        q = torch.full((3,), 1 / 3) if kl_on == "pi" else site.router.p[0, [0, 2, 4]]
        torch.testing.assert_close(flexact.penalty(site), kl(target, q))
        (gradient,) = torch.autograd.grad(flexact.penalty(site), site.logits)
        assert gradient.isfinite().all()
        assert gradient[[1, 3]].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "acts"),
    [
        ({"correction": "none"}, False),
        ({"correction": "clip_logit_gradient"}, True),
        ({"alpha_kind": "relative"}, True),
        ({"alpha_kind": "absolute"}, False),
        ({"alpha_kind": "relative", "alpha": 0.0}, False),
        ({"correction": "none", "logit_step": "schedule"}, True),
    ],
    ids=str,
)
def test_which_policies_act_before_steps(changes: dict[str, Any], acts: bool) -> None:
    assert flat_paper(**changes).policy.acts_before_steps is acts


def act(site: FlexAct, step_size: float = 0.0) -> RoundStatistics:
    router = site.router
    statistics = RoundStatistics(router.rows, router.k, router.device)
    step = Step(router, (1,) * len(router.sites))
    policy.before_step(router, statistics, torch.tensor(step_size), step, None)
    return statistics


def corrected(site: FlexAct, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a site's logit gradient before and after its policy changed it."""
    site.logits.grad = None
    site(h).backward(delta)
    assert site.logits.grad is not None
    before = site.logits.grad.clone()
    act(site)
    return before, site.logits.grad


@pytest.mark.parametrize("kl_on", ["pi", "p"])
def test_relative_kl_adds_alpha_times_the_task_gradients_size_towards_the_target(kl_on: str) -> None:
    h, delta = torch.randn(50), torch.randn(50)
    site = site_with([0.1, 0.3, 0.0, 0.5, 0.2], alpha_kind="relative", alpha=0.4, lam=0.5, kl_on=kl_on)
    before, after = corrected(site, h, delta)
    q = site.pi()[0] if kl_on == "pi" else site.router.p[0]
    pull = q - torch.softmax(-reference.mean_sensitivity(h, FIVE)[0] / 0.5, -1)
    torch.testing.assert_close(after, before + 0.4 * before.square().mean().sqrt() * pull)


def test_a_logit_moves_by_its_normalised_gradient_and_no_optimizer_moves_it() -> None:
    h, delta = torch.randn(50), torch.randn(50)
    site = site_with([0.1, 0.3, 0.0, 0.5, 0.2], alpha_kind="relative", alpha=0.4, lam=0.5, logit_step="schedule")
    site(h).backward(delta)
    gradient, before = site.logits.grad.clone(), site.logits.detach().clone()
    pull = site.pi()[0] - torch.softmax(-reference.mean_sensitivity(h, FIVE)[0] / 0.5, -1)
    act(site, step_size=0.05)
    assert site.logits.grad is None
    moved = gradient / gradient.square().mean().sqrt() + 0.4 * pull
    torch.testing.assert_close(site.logits.detach(), before - 0.05 * moved)


@pytest.mark.parametrize("scale", [2.0**-110, 1e-20, 1e-12, 1e-6, 1e6, 1e25])
def test_a_step_does_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    h, delta = torch.randn(50), torch.randn(50)
    moved = []
    for factor in (1.0, scale):
        site = site_with(logit_step="schedule", alpha_kind="relative", noise=0.0)
        site(h).backward(factor * delta)
        evidence = act(site, step_size=1.0)
        moved.append((site.logits.detach(), evidence.total))
    torch.testing.assert_close(moved[0], moved[1])


@pytest.mark.parametrize("lead", [5.0, 12.0, 25.0, 60.0])
def test_a_step_of_a_site_that_is_sure_follows_the_gradient_and_not_rounding(
    lead: float,
) -> None:
    torch.manual_seed(0)
    for _ in range(5):
        h, delta = torch.randn(200), torch.randn(200)
        logits = [lead, 0.0, 1.0, -1.0, 0.5]
        site = site_with(logits, logit_step="schedule", correction="none", noise=0.0)
        site(h).backward(delta)
        act(site, step_size=1.0)
        exact = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
        alive, none = torch.ones(1, 5, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.float64)
        x = reference.routed_activation(h.double(), exact, none, site.config.policy.temperature, FIVE, alive)
        (gradient,) = torch.autograd.grad(x, exact, delta.double())
        expected = torch.tensor(logits) - gradient[0] / gradient.square().mean().sqrt()
        torch.testing.assert_close(site.logits.detach().double(), expected, rtol=1e-4, atol=1e-4)


def test_clipping_bounds_each_sites_logit_gradient() -> None:
    site = site_with(correction="clip_logit_gradient", clip=0.25)
    before, after = corrected(site, torch.randn(50), 10 * torch.randn(50))
    assert before.norm() > 0.25
    torch.testing.assert_close(after, before * 0.25 / before.norm())


def test_output_norm_trains() -> None:
    site = site_with(correction="output_norm")
    before, after = corrected(site, torch.randn(8, 5), torch.randn(8, 5))
    assert before.any()
    assert torch.equal(before, after)


def test_a_site_without_a_gradient_is_unchanged() -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    model = flexact.convert(layers, "*", share="site")
    first, second = sites_of(model)
    act(first)  # before any forward
    model(torch.randn(5, 3)).sum().backward()
    second.logits.grad = None
    act(first, step_size=1.0)
    assert second.logits.grad is None
    assert not second.logits.detach().any()
    assert first.logits.detach().any()


def test_a_site_that_only_ran_in_eval_mode_is_not_moved() -> None:
    site = site_with([0.1, 0.3, 0.0, 0.5, 0.2], alpha_kind="relative").eval()
    before, after = corrected(site, torch.randn(50), torch.randn(50))
    assert torch.equal(before, after)


def test_the_schedule_applies_the_policy_before_the_optimizers_step() -> None:
    torch.manual_seed(0)
    model = flexact.convert(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)),
        config=FlexConfig(policy=Policy(correction="clip_logit_gradient", clip=1e-3, logit_step="optimizer")),
    )
    optimizer = torch.optim.SGD(flexact.param_groups(model, lr=1.0))
    schedule = flexact.Schedule(model, total_steps=10, optimizer=optimizer)
    (site,) = sites_of(model)
    (100 * model(torch.randn(8, 3)).square().sum()).backward()
    optimizer.step()
    schedule.step()
    assert site.logits.detach().norm().item() == pytest.approx(1e-3, rel=1e-4)


def test_a_model_in_distributed_data_parallel_trains_past_its_commitment() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = flexact.convert(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(flexact.param_groups(model), lr=0.1)
        schedule = flexact.Schedule(model, total_steps=10)
        for _ in range(10):
            (parallel(torch.randn(8, 3)).square().mean() + flexact.penalty(model)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        assert schedule.committed
    finally:
        torch.distributed.destroy_process_group()
