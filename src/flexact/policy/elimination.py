"""Elimination: when a blend drops candidates, which ones, and on what evidence."""

from __future__ import annotations

import warnings
from itertools import pairwise

import torch
from torch import Tensor

from flexact.errors import FlexActError
from flexact.policy.evidence import SIGNIFICANT, RoundStatistics
from flexact.policy.rounds import Plan, drops
from flexact.routing.router import Router
from flexact.routing.site import Site


class Elimination:
    """Drops each site's weaker candidates at the end of every round.

    The original function of a site is protected: it is only dropped after a round in which another candidate was
    significantly better.
    """

    def __init__(self, router: Router, plan: Plan) -> None:
        self._router, self._commit_step, config = router, plan.commit_step, plan.config
        self._left = {site: drops(site.k, config, plan.total_steps, plan.commit_step) for site in router.sites}
        self.steps = {step for left in self._left.values() for step in left}
        """The steps at which candidates are dropped."""
        if config.commit_at is not None:
            self.steps.add(plan.commit_step)
        spans = {drop: following - drop for drop, following in pairwise(sorted(self.steps))}
        self.settled_after = {
            drop: drop + min(round(config.policy.settle * span), span - 1) for drop, span in spans.items()
        }
        """For each of these steps but the last, the step at which the logits start to move again."""
        self.statistics = RoundStatistics(router.rows, router.k, router.device)
        self._protects = config.policy.moves_logits  # otherwise there may be no evidence
        self.protected = torch.ones(router.rows, dtype=torch.bool, device="cpu")
        """(rows,), True while no candidate has been significantly better than the original."""

    def drop(self, step: int) -> None:
        """End a round: drop the weakest candidates of every site."""
        sites = self._router.sites
        leader = torch.cat([site.likeliest() for site in sites])
        margin, error = self.statistics.leads(leader)
        count = self.statistics.count.cpu().expand_as(margin)
        found = torch.stack([margin, error, count], dim=-1)
        significant = margin > SIGNIFICANT * error
        for site in sites:
            rows = site.table_rows
            own = found[rows, : site.k].clone()
            if site.original_index >= 0:
                self._weigh_original(site, own, significant[rows, site.original_index], leader[rows])
            left = min((k for at, k in self._left[site].items() if at <= step), default=site.k)
            if step >= self._commit_step:
                left = 1
            site.keep(left, step, own, self.protected[rows] if self._protects else None)
        self.statistics.reset()  # the remaining candidates have gradients of another size

    def _weigh_original(self, site: Site, found: Tensor, significant: Tensor, leader: Tensor) -> None:
        """Unprotect a site's original in the rows where it is significantly behind the leader.

        found: (rows, K, 3), this round's evidence, edited in place. An unprotected original keeps the evidence of the
        round that unprotected it. The leader is dropped only if the original is kept instead, so the leader's evidence
        becomes its margin behind the original, which is negative if the leader was ahead.
        """
        protected = self.protected[site.table_rows]
        unprotected = ~protected
        evidence = site.evidence.cpu()
        found[:, site.original_index][unprotected] = evidence[:, site.original_index][unprotected]
        protected &= ~significant
        newly = significant & ~unprotected
        evidence[:, site.original_index][newly] = found[:, site.original_index][newly]
        site.evidence.copy_(evidence)
        behind = found[:, site.original_index] * found.new_tensor([-1.0, 1.0, 1.0])
        found[torch.arange(site.rows, device="cpu"), leader] = behind

    def state_dict(self) -> dict[str, Tensor]:
        return self.statistics.state_dict() | {"protected": self.protected}


def keep_originals(router: Router, reason: str, step: int, rewinds: bool) -> None:
    """Warn that a run diverged, and commit every site to its original. Raise if a site has none.

    reason: why nothing can be picked. rewinds: whether the weights are restored next.
    """
    without = [site.label for site in router.sites if site.original_index < 0]
    if without:
        raise FlexActError(
            f"{reason}, and {without[0]} has no original among its candidates to keep. Lower the learning rate, or "
            "leave out the candidates that diverge."
        )
    weights = "The initial weights are restored" if rewinds else "The weights are not changed"
    warnings.warn(
        f"{reason}, so picking stops, and every site keeps its original function. {weights}. Lower the "
        "learning rate, or leave out the candidates that diverge.",
        stacklevel=4,
    )
    router.trying = None
    for site in router.sites:
        if not site.committed:
            site.restore_original(step)
