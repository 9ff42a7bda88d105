"""Elimination: which candidates of a blend are dropped when, and on what evidence."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexact.config import FlexConfig
from flexact.policy.evidence import SIGNIFICANT, Evidence
from flexact.policy.rounds import drops
from flexact.routing.layer import FlexAct
from flexact.routing.saved_state import check_tensors
from flexact.routing.sites import SiteRouter


class Elimination:
    """Drops each site's weaker candidates at the end of every round.

    What a site had before is dropped only once another candidate was significantly better over a round: without
    evidence the site keeps it.
    """

    def __init__(self, router: SiteRouter, config: FlexConfig, total_steps: int, commit_step: int) -> None:
        self._router, self._commit_step = router, commit_step
        self._left = {site: drops(site.k, config, total_steps, commit_step) for site in router.sites}
        self.steps = {step for left in self._left.values() for step in left}
        """The steps at which something is dropped."""
        if config.commit_at is not None:
            self.steps.add(commit_step)
        self.settled_after = _settled_after(sorted(self.steps), config.policy.settle)
        """For each of these steps but the last, the step from which logits move again."""
        self.evidence = Evidence(router.rows, router.k, router.device)
        self._protects = config.policy.logit_step == "paced"  # logits that an optimizer moves gather no evidence
        self.protected = torch.ones(router.rows, dtype=torch.bool)
        """The rows whose original was never significantly worse than another candidate."""

    def drop(self, step: int) -> None:
        """Drop the candidates that the round which ends at this step eliminates."""
        sites = self._router.sites
        leader = torch.cat([site.likeliest() for site in sites])
        margin, error = self.evidence.leads(leader)
        count = self.evidence.count.expand_as(margin)
        found = torch.stack([margin, error, count], dim=-1)
        significant = (margin > SIGNIFICANT * error).cpu()
        for site in sites:
            rows = site.view.rows
            own = found[rows, : site.k].clone()
            if site.original_index >= 0:
                self._weigh_original(site, own, significant[rows, site.original_index], leader[rows])
            left = min((count for at, count in self._left[site].items() if at <= step), default=site.k)
            protected = self.protected[rows] if self._protects else None
            while int((site.dropped_at < 0).sum(-1).max()) > left:
                site.drop_weakest(step, own, protected)
            if step >= self._commit_step and not site.committed:
                site.keep(self._choice(site), step, own)
        self.evidence.reset()

    def _weigh_original(self, site: FlexAct, found: Tensor, significant: Tensor, leader: Tensor) -> None:
        """Remove the protection of a site's original where it is significantly behind, and keep that round's evidence
        for when it is dropped.

        found: (rows, K, 3), this round's evidence. The leader is only ever dropped for the original, so its evidence is
        its lead over the original.
        """
        protected = self.protected[site.view.rows]
        gone = ~protected.to(found.device)
        found[:, site.original_index][gone] = site.evidence[:, site.original_index][gone]
        protected &= ~significant
        newly = significant.to(found.device) & ~gone
        site.evidence[:, site.original_index][newly] = found[:, site.original_index][newly]
        behind = found[:, site.original_index] * found.new_tensor([-1.0, 1.0, 1.0])
        found[torch.arange(site.rows, device=found.device), leader] = behind

    def _choice(self, site: FlexAct) -> Tensor:
        """What each row of a site that dropped nothing so far commits to: (rows,). The likeliest candidate, or the
        original where no other is significantly better."""
        likeliest = site.likeliest()
        if site.original_index < 0 or not self._protects:
            return likeliest
        protected = self.protected[site.view.rows].to(likeliest.device)
        keeps = protected & (site.dropped_at[:, site.original_index] < 0)
        return torch.where(keeps, site.original_index, likeliest)

    def lost(self) -> list[str]:
        """The names of the sites whose logits are NaN or infinite."""
        undecided = [site for site in self._router.sites if not site.committed]
        return [site.name or "FlexAct" for site in undecided if not site.has_finite_logits()]

    def state_dict(self) -> dict[str, Tensor]:
        state = {name: tensor.clone() for name, tensor in self.evidence.state_dict().items()}
        return state | {"protected": self.protected.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_tensors(state, self.state_dict())
        self.evidence.load_state_dict(state)
        self.protected.copy_(state["protected"])


def _settled_after(drops: list[int], settle: float) -> dict[int, int]:
    spans = {drop: following - drop for drop, following in pairwise(drops)}
    return {drop: drop + min(round(settle * span), span - 1) for drop, span in spans.items()}
