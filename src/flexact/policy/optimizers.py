"""Parameter groups for an optimizer, checks that it holds the logits, and which logits its step moves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from flexact.errors import FlexActError
from flexact.io import value_checks
from flexact.routing.router import Router
from flexact.routing.site import Site
from flexact.routing.sites import sites_of


def param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    lr: float | None = None,
    logit_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return two parameter groups for an optimizer: the weights, and the logits without weight decay.

    weight_decay, lr: by default those of the optimizer.
    logit_lr: learning rate of the logits if the optimizer moves them (see `Policy.logit_step`); `lr` by default.

    >>> import torch, flexact
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU()))
    >>> [(len(g["params"]), g["weight_decay"]) for g in flexact.param_groups(model, weight_decay=5e-4)]
    [(2, 0.0005), (1, 0.0)]
    """
    sites = sites_of(model)
    rates: dict[str, Any] = {"weight_decay": weight_decay, "lr": lr, "logit_lr": logit_lr}
    for name, value in rates.items():
        if value is not None:  # a learning rate may be a tensor, for CUDA graphs
            is_tensor = isinstance(value, Tensor) and value.numel() == 1
            value_checks.number(name, value.item() if is_tensor else value, at_least=0)
    check_logit_lr(logit_lr, sites)
    logits = [site.logits for site in sites]
    known = {id(parameter) for parameter in logits}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": weight_decay, "lr": lr},
        {"params": logits, "weight_decay": 0.0, "lr": lr if logit_lr is None else logit_lr},
    ]
    return [{key: own for key, own in group.items() if own is not None} for group in groups if group["params"]]


def check_logit_lr(logit_lr: float | None, sites: Sequence[Site]) -> None:
    """Raise if the logits are given a learning rate, but the policy moves them."""
    if logit_lr is not None and any(site.config.policy.moves_logits for site in sites):
        raise FlexActError(
            f"logit_lr={logit_lr} has no effect, because this policy moves the logits itself. Leave it out, or "
            "convert with policy=Policy(logit_step='optimizer')."
        )


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a wrapper without step hooks, such as that of accelerate."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return unwrapped(inner)
    return optimizer


def check_optimizer(optimizer: Optimizer, sites: Sequence[Site]) -> None:
    """Raise if an optimizer does not hold the logits, or decays logits that it moves."""
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise FlexActError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}.")
    decay = {id(one): group.get("weight_decay", 0) for group in optimizer.param_groups for one in group["params"]}
    lost = [site.label for site in sites if id(site.logits) not in decay]
    if lost:
        raise FlexActError(
            f"the optimizer does not hold the logits of {len(lost)} of {len(sites)} sites ({', '.join(lost[:5])}). "
            "Convert the model before you build the optimizer, and give it flexact.param_groups(model). If it takes "
            "matrices only, as Muon does, let a second optimizer hold the logits, and give that one to the Schedule."
        )
    moved = [site for site in sites if site.config.policy.logit_step == "optimizer"]
    decayed = [site for site in moved if decay[id(site.logits)] != 0]
    if decayed:
        raise FlexActError(
            f"the optimizer applies weight_decay={decay[id(decayed[0].logits)]} to the logits of {len(decayed)} sites "
            f"({', '.join(site.label for site in decayed[:5])}), which this policy leaves to the optimizer. Give it "
            "flexact.param_groups(model, weight_decay=...) instead of model.parameters()."
        )


def has_stepped(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's state shows earlier steps. A count on a device is assumed to be positive."""
    for state in optimizer.state.values():
        count = state.get("step", state.get("n_iter", 0))
        on_device = torch.is_tensor(count) and count.device.type != "cpu"
        if on_device or count > 0 or state.get("momentum_buffer") is not None:
            return True
    return False


class Step:
    """The sites whose logits an optimizer holds, and the direction in which it moves them.

    signs: for each site, 1 if the optimizer minimizes, −1 if it maximizes, 0 if it does not hold the logits.
    """

    def __init__(self, router: Router, signs: tuple[int, ...]) -> None:
        signed = list(zip(router.sites, signs, strict=True))
        self.sites = {site: sign < 0 for site, sign in signed if sign}
        """The sites whose logits the optimizer holds, and whether it maximizes."""
        self.first_rows = {site.table_rows.start for site in self.sites}
        self._is_plain = all(sign == 1 for sign in signs)
        by_row = [float(sign) for site, sign in signed for _ in range(site.rows)]
        self._signs = torch.tensor(by_row, dtype=torch.float32, device=router.device).unsqueeze(1)

    def logits(self) -> list[nn.Parameter]:
        """Return the logits that the optimizer holds."""
        return [site._parameters["logits"] for site in self.sites]  # type: ignore[misc]  # faster than an attribute

    def factors(self, optimizer: Optimizer) -> Tensor | None:
        """Return the factors that turn the gradients into those of the minimized, unscaled loss, (rows, 1).

        optimizer: a fused optimizer unscales the gradients itself, by attributes that the gradient scaler sets on it.

        A factor is 0 in rows that the step does not move, because the optimizer does not hold them or the scaler skips
        the step. None means that all factors are 1, as in most runs.
        """
        own = vars(optimizer)
        found_inf, scale = own.get("found_inf"), own.get("grad_scale")
        if found_inf is None:
            return None if self._is_plain else self._signs
        return torch.where(found_inf == 0, self._signs / (1.0 if scale is None else scale), 0.0)


class Steps:
    """The `Step` of each optimizer, updated if its parameter groups change.

    note: called with each optimizer before its first step, and after a change of its groups.
    """

    def __init__(self, router: Router, note: Callable[[Optimizer], None]) -> None:
        self._router, self._note = router, note
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[object, Step | None]] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Optimizer) -> Step | None:
        """Return the step of an optimizer; None if it holds no logits of this model. Cached, because this runs before
        every step of every optimizer."""
        groups = [(id(own["params"]), len(own["params"]), own.get("maximize")) for own in optimizer.param_groups]
        at = (groups, self._router.device)
        known = self._known.get(optimizer)
        if known is None or known[0] != at:
            self._note(optimizer)
            held = [(id(one), own.get("maximize")) for own in optimizer.param_groups for one in own["params"]]
            sign = {parameter: -1 if maximize else 1 for parameter, maximize in held}
            signs = tuple(sign.get(id(site.logits), 0) for site in self._router.sites)
            known = self._known[optimizer] = (at, Step(self._router, signs) if any(signs) else None)
        return known[1]
