"""The policy at work: what is added to the loss, and what is done to the logits before an optimizer's step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexact import corrections
from flexact.config import FlexConfig
from flexact.layer import routers_of, sites_of
from flexact.pace import RunningGradient
from flexact.routing import Router, log_pi


def penalty(model: nn.Module) -> Tensor:
    """α·Σ KL(p̃ ‖ q) over the sites of a model, from the last forward's statistics; 0 where the policy needs none.

    It needs none when the correction is no KL, when its weight is relative (it then acts on the gradient, through the
    Schedule), and for sites that are committed.

    >>> import torch, flexact
    >>> act = flexact.FlexAct(config=flexact.FlexConfig.paper())
    >>> _ = act(torch.randn(8, 3))
    >>> bool(flexact.penalty(act) > 0)
    True
    """
    sites = sites_of(model)
    routers = [router for router in routers_of(sites) if _adds_to_loss(router.config) and router.ready]
    terms = [_penalty(router) for router in routers if not all(site.committed for site in router.sites)]
    idle: list[Tensor] = [site.logits for site in sites if site.committed and site.logits.requires_grad]
    if idle and torch.distributed.is_available() and torch.distributed.is_initialized():
        terms.append(0 * torch.cat(idle).sum())  # DistributedDataParallel waits for a gradient of every parameter
    if terms:
        return torch.stack(terms).sum()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.zeros((), device=device)


def acts_before_steps(config: FlexConfig) -> bool:
    """Whether a policy acts on the logit gradients between the backward pass and the optimizer's step."""
    corrects = config.advantage == "normalized" or config.correction == "clip_logit_gradient"
    return config.logit_step == "paced" or corrects or _is_relative(config)


def before_step(router: Router, running: RunningGradient, step_size: Tensor) -> None:
    """Correct the gradients that the sites' logits hold; then move the logits, or leave that to the optimizer.

    step_size: of a paced logit, a scalar. Its gradient is taken away, so that the optimizer passes it over.

    The number of operations does not depend on the depth, and none waits for the device: a CUDA graph can hold it.
    """
    if not router.ready or all(site.logits.grad is None for site in router.sites):
        return
    running.to(router.device)
    with torch.no_grad():
        gradients = [torch.zeros_like(s.logits) if s.logits.grad is None else s.logits.grad for s in router.sites]
        direction = _direction(router, router.table(gradients), running)
        router.gathered.clear()  # this step's are used up
        if router.config.logit_step == "optimizer":
            torch._foreach_copy_(gradients, router.split(direction))
            return
        held = [site.logits.grad is not None for site in router.sites]
        moves = router.split(step_size * direction)
        torch._foreach_sub_(
            [site.logits for site, has in zip(router.sites, held, strict=True) if has],
            [move for move, has in zip(moves, held, strict=True) if has],
        )
        for site in router.sites:
            site.logits.grad = None


def _direction(router: Router, gradient: Tensor, running: RunningGradient) -> Tensor:
    """The corrected gradient, or when paced its running mean in units of its running size."""
    config, alive = router.config, router.alive()
    if config.advantage == "normalized":
        gradient = corrections.normalised_advantage(gradient, router.mean_statistics()[1], alive)
    if config.correction == "clip_logit_gradient":
        gradient = corrections.clip_rows(gradient, config.clip)
    mean, size = running.update(gradient, alive)
    if config.logit_step == "paced":
        gradient = mean
    if _is_relative(config):
        q = router.pi if config.kl_on == "pi" else router.p
        pulled = corrections.relative_kl(gradient, q, _target(router, alive), router.alpha, size, router.width())
        gradient = torch.where(router.called(), pulled, gradient)  # a site that was not called has no target
    return gradient / size if config.logit_step == "paced" else gradient


def _penalty(router: Router) -> Tensor:
    alive = router.alive()
    log_q = log_pi(router.logits(), alive)
    if router.config.kl_on == "p":
        log_q = torch.log_softmax((log_q + router.noise) / router.temperature(), dim=-1)
    called = router.called().squeeze(1)
    return router.alpha * (corrections.kl(_target(router, alive), log_q) * called).sum()


def _target(router: Router, alive: Tensor) -> Tensor:
    config = router.config
    sensitivity, _ = router.mean_statistics()
    if config.correction == "clipped_norm_kl":
        sensitivity = corrections.clipped(sensitivity, config.clip)
    lam = router.temperature() if config.lam == "temperature" else config.lam
    return corrections.target(sensitivity, lam, alive)


def _uses_kl(config: FlexConfig) -> bool:
    return config.correction in ("grad_norm_kl", "clipped_norm_kl") and config.alpha > 0


def _adds_to_loss(config: FlexConfig) -> bool:
    return _uses_kl(config) and config.alpha_kind == "absolute"


def _is_relative(config: FlexConfig) -> bool:
    return _uses_kl(config) and config.alpha_kind == "relative"
