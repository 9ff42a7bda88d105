"""Which logits an optimizer's step moves, in which direction, and whether a gradient scaler skips it."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from flexact.policy.optimizers import signs
from flexact.routing.call_statistics import Gathered
from flexact.routing.sites import SiteRouter


class Step:
    """Which sites an optimizer moves at each of its steps.

    signs: of `flexact.policy.optimizers.signs`.
    """

    def __init__(self, router: SiteRouter, signs: tuple[int, ...]) -> None:
        self.sites = {site: sign < 0 for site, sign in zip(router.sites, signs, strict=True) if sign}
        """The sites whose logits it holds, and whether it maximizes there."""
        self.device = router.device
        self._is_plain = all(sign == 1 for sign in signs)
        by_row = [sign for site, sign in zip(router.sites, signs, strict=True) for _ in range(site.rows)]
        by_logit = [sign for site, sign in zip(router.sites, signs, strict=True) for _ in range(site.rows * site.k)]
        self._of_row = torch.tensor(by_row, device=self.device).unsqueeze(1)
        self._of_logit = torch.tensor(by_logit, device=self.device)

    def clear(self, gathered: Gathered) -> None:
        """Clear the statistics of the sites that the step moves."""
        if self._is_plain:
            gathered.clear()
        else:
            gathered.forget({site.view.first_row for site in self.sites})

    def read(self, gradients: list[Tensor], scaling: Scaling | None) -> tuple[list[Tensor], Tensor | None]:
        """The gradients of what is minimized, unscaled, and 0 where the step moves nothing; and which rows it moves,
        (rows, 1), or None for all. One flat tensor may stand for those of all sites."""
        if self._is_plain and scaling is None:
            return gradients, None
        factor, moves, moves_row = self._of_logit, self._of_logit != 0, self._of_row != 0
        if scaling is not None:
            goes_on = scaling.found_inf == 0
            moves, moves_row = moves & goes_on, moves_row & goes_on
            factor = factor / scaling.scale
        return [torch.where(moves, torch.cat(gradients) * factor, 0.0)], moves_row

    def written(self, table: Tensor, scaling: Scaling | None) -> Tensor:
        """A table of corrected gradients, (rows, K), as the optimizer is to find them."""
        return table * self._of_row if scaling is None else table * self._of_row * scaling.scale


class Scaling:
    """What a gradient scaler passes to an optimizer that unscales by itself, as fused ones do."""

    def __init__(self, found_inf: Tensor, scale: Tensor | float | None) -> None:
        self.found_inf = found_inf
        self.scale = 1.0 if scale is None else scale

    @classmethod
    def of(cls, optimizer: Optimizer) -> Scaling | None:
        """The scaling of an optimizer's next step; None where there is none."""
        found_inf = vars(optimizer).get("found_inf")
        return None if found_inf is None else cls(found_inf, vars(optimizer).get("grad_scale"))


class Steps:
    """The `Step` of each optimizer, updated where its groups have changed."""

    def __init__(self, router: SiteRouter) -> None:
        self._router = router
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[object, Step]] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Optimizer) -> Step:
        """The step of an optimizer. This runs before every step, so it skips the parameters of a known optimizer."""
        groups = [(id(own["params"]), len(own["params"]), own.get("maximize")) for own in optimizer.param_groups]
        known = self._known.get(optimizer)
        if known is None or known[0] != groups or known[1].device != self._router.device:
            known = self._known[optimizer] = (groups, Step(self._router, signs(optimizer, self._router.sites)))
        return known[1]
