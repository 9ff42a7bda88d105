"""The sites of a model with everything that the policy reads and writes, for tests that compare its kernels with plain
torch. They have different numbers of candidates, by layer and by channel, some of them dropped."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from configs import flat
from flexact import FlexAct, FlexConfig
from flexact.policy import logit_updates as policy
from flexact.policy.evidence import RoundStatistics
from flexact.policy.optimizers import Step
from flexact.routing.sites import bind
from kernels import using

CANDIDATES = ("relu", "sigmoid", "tanh", "leaky_relu", "identity", "gelu", "silu", "elu")
SITES = ((3, 1), (2, 4), (5, 1), (8, 3), (5, 1))
"""Candidates and rows of each site: ten rows together, which take two programs."""

POLICIES: list[dict[str, Any]] = [
    {},
    {"kl_on": "p", "noise": 1.0},
    {"lam": "temperature"},
    {"lam": 1},
    {"correction": "clipped_norm_kl", "clip": 0.4},
    {"correction": "clipped_norm_kl", "clip": 0.4, "lam": "temperature", "kl_on": "p"},
    {"correction": "clip_logit_gradient", "clip": 0.5},
    {"correction": "none"},
    {"correction": "none", "lam": "temperature"},
    {"correction": "output_norm"},
    {"alpha_kind": "absolute"},
    {"alpha": 0.0},
]

plain_torch = functools.partial(using, "closed_form")


class Sites:
    """Builds a router's sites from a seed: the same seed gives identical sites."""

    def __init__(self, device: torch.device, seed: int = 0, sizes: tuple[tuple[int, int], ...] = SITES, **changes: Any):
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        self.sites = [site(k, rows, flat(**changes)).to(device) for k, rows in sizes]
        self.router = bind(nn.ModuleList(self.sites), self.sites)
        self.router.scheduled = True
        self.statistics = RoundStatistics(self.router.rows, self.router.k, device)
        self.step = Step(self.router, (1,) * len(self.sites))
        self.optimizer: Any = SimpleNamespace()
        with torch.no_grad():
            for one in self.sites:
                one.logits.copy_(self.normal(one.logits.numel()))
                one.temperature.fill_(float(0.2 + self.normal(1).abs()))
                one.width = 1 + int(10 * self.normal(1).abs())

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(self.device)

    def drop(self) -> None:
        """Drops random candidates of some sites, but never the first one."""
        for one in self.sites[1:4]:
            goes = self.normal(one.rows, one.k) > 0.7
            goes[:, 0] = False
            one.drop(goes, step=1)

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        self.router.go_to(step)
        self.router.refresh(training=True)
        return self.router.pi, self.router.p

    def call(self, *numbers: int, scale: float = 1.0) -> None:
        """Writes statistics of sites, as if they had been called in this order."""
        for number in numbers:
            one = self.sites[number]
            self.router.call_statistics.add(one.table_rows.start, scale * self.normal(one.rows, one.k).abs())

    def differentiate(self, *numbers: int, scale: float = 1.0) -> None:
        for number in numbers:
            one = self.sites[number]
            one.logits.grad = scale * self.normal(one.logits.numel())

    def act(self, step_size: float | Tensor = 0.05) -> None:
        step = torch.as_tensor(step_size, device=self.device)
        factors = self.step.factors(self.optimizer)
        policy.before_step(self.router, self.statistics, step, self.step, factors)

    def state(self) -> list[Tensor]:
        """Returns everything that a step changes, with zeros for missing gradients."""
        logits = [one.logits for one in self.sites]
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in logits]
        return [torch.cat(logits).detach(), torch.cat(gradients), *self.statistics.state_dict().values()]


def site(k: int, rows: int, config: FlexConfig) -> FlexAct:
    names = CANDIDATES[:k]
    if rows == 1:
        return FlexAct(names, config)
    by_channel = FlexConfig.from_dict(config.to_dict() | {"granularity": "channel"})
    return FlexAct(names, by_channel, channels=rows)


def assert_alike(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-5, atol=1e-6, equal_nan=True)


def one_step(sites: Sites, step: int) -> None:
    """Includes a site that is called twice and, in some steps, one that is not called or has no gradient."""
    sites.draw(step)
    sites.call(0, 1, 2, 4, 2, *([3] if step % 2 else []))
    sites.differentiate(0, 1, 3, 4, *([2] if step % 3 else []), scale=10.0**-step)
    sites.act()
