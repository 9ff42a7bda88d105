"""The penalty that the policy adds to the loss, and its update of the logits before an optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexact.policy.evidence import Evidence
from flexact.policy.optimizer_steps import Scaling, Step
from flexact.policy.running_gradient import MEAN_DECAY, SQUARE_DECAY, RunningGradient
from flexact.routing import corrections
from flexact.routing.call_statistics import rank_count
from flexact.routing.gumbel import log_pi
from flexact.routing.sharding import is_sharded, local, own_part
from flexact.routing.sites import SiteRouter, bound_sites, routers_of

_TINY = 1e-30
_SMALLEST_NORM = 1e-100


def penalty(model: nn.Module) -> Tensor:
    """Return α·Σ KL(p̃ ‖ q) over the sites of a model, from the statistics of the last forward.

    It is 0 if the correction is not a KL, or if its weight is relative: the Schedule then adds its gradient. Sites
    that are in a warm-up or a trial, or committed, contribute 0.

    >>> import torch, flexact
    >>> act = flexact.FlexAct(config=flexact.FlexConfig.paper())
    >>> _ = act(torch.randn(8, 3))
    >>> bool(flexact.penalty(act) > 0)
    True
    """
    sites = bound_sites(model)
    routers = [router for router in routers_of(sites) if router.config.policy.adds_to_loss and router.ready]
    for router in routers:
        router.penalized = True
    terms = [_penalty(router) for router in routers if not (router.at_rest or router.committed)]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        unused = [site.logits for site in sites if site.committed or site.router.at_rest]
        idle: list[Tensor] = [logits for logits in unused if logits.requires_grad and not is_sharded(logits)]
        if idle:
            terms.append(0 * torch.cat(idle).sum())  # DistributedDataParallel waits for a gradient of every parameter
    if terms:
        return torch.stack(terms).sum()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.zeros((), device=device)


def before_step(
    router: SiteRouter,
    running: RunningGradient,
    evidence: Evidence,
    step_size: Tensor,
    step: Step,
    scaling: Scaling | None,
) -> None:
    """Correct the gradients of the logits that the stepping optimizer holds and, if the logits are paced, move them.

    step_size: the step of a paced logit, a scalar. Paced logits lose their gradient, so that the optimizer skips them.
    evidence: the advantages of this step are added to it.

    The number of operations does not depend on the depth, and none synchronizes with the device, so a CUDA graph can
    capture them.
    """
    held = [site.logits for site in step.sites]
    if router.at_rest:
        for logits in held:
            logits.grad = None  # zeros from DistributedDataParallel
        return
    if not router.ready or all(logits.grad is None for logits in held):
        return
    running.to(router.device)
    evidence.to(router.device)
    with torch.no_grad():
        gradients, rows = step.read(router.gradients(), scaling)
        before = [] if rows is None else [tensor.clone() for tensor in running.tensors]
        changes = (_fused_changes if router.runs_fused() else _changes)(router, gradients, running, step_size)
        advantage = router.shared(_advantage(router, router.table(gradients)))
        paced = router.config.policy.logit_step == "paced"
        if rows is None:
            evidence.add(advantage)
        else:
            for now, kept in zip(running.tensors, before, strict=True):
                now.copy_(torch.where(rows, now, kept))
            evidence.add(advantage, router.shared(rows.expand_as(advantage).float())[:, :1] > 0)
        if rows is not None or router.shares:
            table = router.table(changes)
            table = router.shared(table if rows is None else torch.where(rows, table, 0.0))
            changes = router.split(table if rows is None or paced else step.written(table, scaling))
        router.gathered.forget({site.view.first_row for site in step.sites})  # this step has used their statistics
        moving = {site for site in step.sites if site.logits.grad is not None}
        if paced:  # a site without a gradient moves together with its group
            groups = {site.group for site in moving} - {None}
            moving |= {site for site in router.sites if site.group in groups and site.logits.requires_grad}
        moved = [(site.logits, own) for site, own in zip(router.sites, changes, strict=True) if site in moving]
        parts = [own_part(own, logits) for logits, own in moved]
        if not paced:
            torch._foreach_copy_([local(logits.grad) for logits, _ in moved if logits.grad is not None], parts)
            return
        torch._foreach_sub_([local(logits) for logits, _ in moved], parts)
        for logits in held:
            logits.grad = None


def _advantage(router: SiteRouter, gradient: Tensor) -> Tensor:
    """Return ⟨δ, a_k − x⟩, scaled to a norm of 1 per row, (rows, K); 0 for dropped candidates."""
    # In double precision, so that the squares of small numbers do not underflow.
    return F.normalize(gradient.double() / router.p.clamp(min=_TINY), dim=-1, eps=_SMALLEST_NORM).float()


def _changes(
    router: SiteRouter,
    gradients: list[Tensor],
    running: RunningGradient,
    step_size: Tensor,
    sensitivity: Tensor | None = None,
) -> list[Tensor]:
    """Return the corrected gradient of each site, flat, or the step to subtract from its logits if they are paced.

    gradients: those of all sites, flat, in any number of tensors.
    sensitivity: the means over all ranks, if they are already known; computing them is a collective operation.
    """
    policy, alive, gradient = router.config.policy, router.alive(), router.table(gradients)
    if policy.correction == "clip_logit_gradient":
        gradient = corrections.clip_rows(gradient, policy.clip)
    mean, size = running.update(gradient, alive)
    direction = mean if policy.logit_step == "paced" else gradient
    if policy.pulls_logits:
        target = _target(router, router.sensitivity() if sensitivity is None else sensitivity, alive)
        pulled = corrections.relative_kl(direction, _q(router), target, router.alpha, size, router.width())
        direction = torch.where(router.called(), pulled, direction)  # a site that was not called has no target
    return router.split(step_size * (direction / size) if policy.logit_step == "paced" else direction)


def _fused_changes(
    router: SiteRouter, gradients: list[Tensor], running: RunningGradient, step_size: Tensor
) -> list[Tensor]:
    """Return `_changes`, computed by one kernel. On a single rank the kernel also averages the sensitivities."""
    from flexact.ops.triton import fallback  # needs Triton
    from flexact.ops.triton import policy as policy_kernels

    policy = router.config.policy
    rule = policy_kernels.Rule(
        clips=policy.correction == "clip_logit_gradient",
        pulls=policy.pulls_logits,
        clips_sensitivity=policy.correction == "clipped_norm_kl",
        paced=policy.logit_step == "paced",
        mean_rate=1 - MEAN_DECAY,
        square_rate=1 - SQUARE_DECAY,
        lam=None if policy.lam == "temperature" else policy.lam,
        clip=policy.clip,
    )
    sensitivity = router.sensitivity() if rule.pulls and rank_count() > 1 else None
    values = [*gradients, *(router.temperatures() if rule.tied else [])]
    calls = router.layout  # a placeholder: without sensitivities the kernel does not read it
    if rule.pulls:
        start = router.size + (len(router.sites) if rule.tied else 0)
        flat, calls = router.gathered.flat(router.device, start, sensitivity)
        values += flat
    tables = (router.layout, calls, router.alive(), running.tensors, _q(router), router.width(), router.alpha)

    def fused(values: Tensor) -> list[Tensor]:
        found = policy_kernels.direction(values, router.size, *tables, step_size, rule)
        return list(torch.split(found, [site.rows * site.k for site in router.sites]))

    return fallback.run(
        fused, lambda _: _changes(router, gradients, running, step_size, sensitivity), torch.cat(values)
    )


def _penalty(router: SiteRouter) -> Tensor:
    alive = router.alive()
    log_q = log_pi(router.logits(), alive)
    if router.config.policy.kl_on == "p":
        log_q = torch.log_softmax((log_q + router.noise) / router.temperature(), dim=-1)
    target = _target(router, router.sensitivity(), alive)
    return router.alpha * (corrections.kl(target, log_q) * router.called().squeeze(1)).sum()


def _q(router: SiteRouter) -> Tensor:
    """Return the distribution that the KL acts on."""
    return router.pi if router.config.policy.kl_on == "pi" else router.p


def _target(router: SiteRouter, sensitivity: Tensor, alive: Tensor) -> Tensor:
    policy = router.config.policy
    if policy.correction == "clipped_norm_kl":
        sensitivity = sensitivity.clamp(max=policy.clip)
    lam = router.temperature() if policy.lam == "temperature" else policy.lam
    return corrections.target(sensitivity, lam, alive)
