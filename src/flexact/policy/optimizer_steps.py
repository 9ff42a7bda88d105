"""Which logits an optimizer's step moves, in which direction, and whether a gradient scaler skips it."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from flexact.routing.sites import SiteRouter


class Step:
    """The sites whose logits an optimizer holds, and the direction in which it moves them.

    signs: for each site, 1 if the optimizer minimizes, −1 if it maximizes, 0 if it does not hold the logits.
    """

    def __init__(self, router: SiteRouter, signs: tuple[int, ...]) -> None:
        signed = list(zip(router.sites, signs, strict=True))
        self.sites = {site: sign < 0 for site, sign in signed if sign}
        """The sites whose logits the optimizer holds, and whether it maximizes."""
        self._is_plain = all(sign == 1 for sign in signs)
        by_row = [sign for site, sign in signed for _ in range(site.rows)]
        by_logit = [sign for site, sign in signed for _ in range(site.rows * site.k)]
        self._of_row = torch.tensor(by_row, device=router.device).unsqueeze(1)
        self._of_logit = torch.tensor(by_logit, device=router.device)

    def read(self, gradients: list[Tensor], scaling: Scaling | None) -> tuple[list[Tensor], Tensor | None]:
        """Return the unscaled gradients of the minimized loss, and the rows that the step moves, (rows, 1).

        gradients: one flat tensor per site; the result may be one for all sites. Gradients that the step does not apply
        are 0. The rows are None if the step moves all of them.
        """
        if self._is_plain and scaling is None:
            return gradients, None
        factor, moves, moves_row = self._of_logit, self._of_logit != 0, self._of_row != 0
        if scaling is not None:
            is_finite = scaling.found_inf == 0  # otherwise the optimizer skips the step
            moves, moves_row = moves & is_finite, moves_row & is_finite
            factor = factor / scaling.scale
        return [torch.where(moves, torch.cat(gradients) * factor, 0.0)], moves_row

    def written(self, table: Tensor, scaling: Scaling | None) -> Tensor:
        """Return a (rows, K) table of corrected gradients with the sign and the scale that the optimizer expects."""
        return table * self._of_row if scaling is None else table * self._of_row * scaling.scale


class Scaling(NamedTuple):
    """The attributes that a gradient scaler sets on an optimizer that unscales by itself, as fused ones do."""

    found_inf: Tensor
    scale: Tensor | float

    @classmethod
    def of(cls, optimizer: Optimizer) -> Scaling | None:
        """Return the scaling of an optimizer's next step; None without a scaler."""
        found_inf, scale = (vars(optimizer).get(name) for name in ("found_inf", "grad_scale"))
        return None if found_inf is None else cls(found_inf, 1.0 if scale is None else scale)


class Steps:
    """The `Step` of each optimizer, updated if its parameter groups change."""

    def __init__(self, router: SiteRouter) -> None:
        self._router = router
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[object, Step | None]] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Optimizer) -> Step | None:
        """Return the step of an optimizer; None if it holds no logits of this model.

        This runs before every step of every optimizer, so the result is cached until the parameter groups change.
        """
        groups = [(id(own["params"]), len(own["params"]), own.get("maximize")) for own in optimizer.param_groups]
        at = (groups, self._router.device)
        known = self._known.get(optimizer)
        if known is None or known[0] != at:
            held = [(id(one), own.get("maximize")) for own in optimizer.param_groups for one in own["params"]]
            sign = {parameter: -1 if maximize else 1 for parameter, maximize in held}
            signs = tuple(sign.get(id(site.logits), 0) for site in self._router.sites)
            known = self._known[optimizer] = (at, Step(self._router, signs) if any(signs) else None)
        return known[1]
