"""What a user's optimizer and the logits have to do with each other: groups for it, and whether it holds them."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from flexact.errors import FlexActError
from flexact.routing.layer import FlexAct
from flexact.routing.sites import sites_of


def param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    lr: float | None = None,
    logit_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Optimizer groups: the weights, and the logits apart, which are never decayed.

    weight_decay, lr: where left out, the optimizer's own.
    logit_lr: of the logits, where the policy leaves them to the optimizer (`FlexConfig.logit_step`); `lr` by default.

    >>> import torch, flexact
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU()))
    >>> [(len(g["params"]), g["weight_decay"]) for g in flexact.param_groups(model, weight_decay=5e-4)]
    [(2, 0.0005), (1, 0.0)]
    """
    sites = sites_of(model)
    for name, value in (("weight_decay", weight_decay), ("lr", lr), ("logit_lr", logit_lr)):
        _check_rate(name, value)
    if logit_lr is not None and any(site.config.logit_step == "paced" for site in sites):
        raise FlexActError(
            f"logit_lr={logit_lr} would have no effect: this policy moves the logits itself, at a pace set by the "
            "length of the run. Leave it out, or convert with FlexConfig(logit_step='optimizer')."
        )
    logits = [site.logits for site in sites]
    known = {id(parameter) for parameter in logits}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": logits, "weight_decay": 0.0}]
    if weight_decay is not None:
        groups[0]["weight_decay"] = weight_decay
    for group, rate in zip(groups, (lr, logit_lr if logit_lr is not None else lr), strict=True):
        if rate is not None:
            group["lr"] = rate
    return [group for group in groups if group["params"]]


def _check_rate(name: str, value: Any) -> None:
    """Refuse what no optimizer can take; a rate may be a tensor, as a captured CUDA graph needs it."""
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if value is not None and not (is_number and 0 <= number < math.inf):
        raise FlexActError(f"{name} must be a finite number, at least 0; got {value!r:.80}.")


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that a wrapper without hooks of its own, such as accelerate's, stands for."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return unwrapped(inner)
    return optimizer


def check_holds_logits(optimizer: Optimizer, sites: list[FlexAct]) -> None:
    """Refuse an optimizer that would never move the logits."""
    if not isinstance(optimizer, Optimizer):
        raise FlexActError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}.")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    lost = [site.name or "FlexAct" for site in sites if id(site.logits) not in held]
    if lost:
        raise FlexActError(
            f"the optimizer does not hold the logits of {len(lost)} of {len(sites)} sites ({', '.join(lost[:5])}), so "
            "they would never train. Convert the model before you build the optimizer, and give it "
            "flexact.param_groups(model)."
        )


def signs(optimizer: Optimizer, sites: list[FlexAct]) -> tuple[int, ...]:
    """How an optimizer's step uses the gradient of each site's logits: 1 where it descends, −1 where it maximizes, 0
    where it does not hold them."""
    of = {id(held): -1 if group.get("maximize") else 1 for group in optimizer.param_groups for held in group["params"]}
    return tuple(of.get(id(site.logits), 0) for site in sites)
