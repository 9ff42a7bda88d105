"""Parameter groups for a user's optimizer, and a check that it holds the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from flexact.errors import FlexActError
from flexact.io import value_checks
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
    logit_lr: of the logits, where the policy leaves them to the optimizer (`Policy.logit_step`); `lr` by default.

    >>> import torch, flexact
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU()))
    >>> [(len(g["params"]), g["weight_decay"]) for g in flexact.param_groups(model, weight_decay=5e-4)]
    [(2, 0.0005), (1, 0.0)]
    """
    sites = sites_of(model)
    rates: dict[str, Any] = {"weight_decay": weight_decay, "lr": lr, "logit_lr": logit_lr}
    for name, value in rates.items():
        if value is not None:  # a rate may be a tensor, as a captured CUDA graph needs it
            is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1
            value_checks.number(name, value.item() if is_tensor else value, at_least=0)
    if logit_lr is not None and any(site.config.policy.logit_step == "paced" for site in sites):
        raise FlexActError(
            f"logit_lr={logit_lr} would have no effect: this policy moves the logits itself, at a pace set by the "
            "length of the run. Leave it out, or convert with policy=Policy(logit_step='optimizer')."
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
