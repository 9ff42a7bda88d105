"""The policy at work: the penalty that is added to the loss, and what is done to the logits before a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexact.policy.evidence import Evidence
from flexact.policy.optimizer_steps import Scaling, Step
from flexact.policy.running_gradient import MEAN_DECAY, SQUARE_DECAY, RunningGradient
from flexact.routing import corrections
from flexact.routing.call_statistics import rank_count
from flexact.routing.gumbel import log_pi
from flexact.routing.layer import FlexAct
from flexact.routing.sharding import is_sharded, local, own_part
from flexact.routing.sites import SiteRouter, bound_sites, routers_of

if TYPE_CHECKING:
    from flexact.ops.triton.policy import Rule  # needs Triton

_TINY = 1e-30
_SMALLEST_NORM = 1e-100


def penalty(model: nn.Module) -> Tensor:
    """α·Σ KL(p̃ ‖ q) over the sites of a model, from the last forward's statistics; 0 where the policy needs none.

    It needs none when the correction is no KL, when its weight is relative (it then acts on the gradient, through the
    Schedule), and for sites that wait for the end of a warm-up or are committed.

    >>> import torch, flexact
    >>> act = flexact.FlexAct(config=flexact.FlexConfig.paper())
    >>> _ = act(torch.randn(8, 3))
    >>> bool(flexact.penalty(act) > 0)
    True
    """
    sites = bound_sites(model)
    routers = [router for router in routers_of(sites) if router.config.policy.adds_to_loss and router.ready]
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
    """Correct the gradients of the logits that the stepping optimizer holds; then move these logits, or leave that to
    the optimizer.

    step_size: that of a paced logit, a scalar. Its gradient is removed, so that the optimizer skips it.
    evidence: receives the step's advantages.

    The number of operations does not depend on the depth, and none waits for the device: a CUDA graph can hold it.
    """
    held = [site.logits for site in step.sites]
    if router.at_rest:
        for logits in held:
            logits.grad = None  # DistributedDataParallel's zeros
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
        if rows is None:
            evidence.add(advantage)
        else:
            for now, kept in zip(running.tensors, before, strict=True):
                now.copy_(torch.where(rows, now, kept))
            changes = router.split(torch.where(rows, _joined_again(router, changes), 0.0))
            evidence.add(advantage, router.shared(rows.expand_as(advantage).float())[:, :1] > 0)
        if router.shares:
            changes = router.split(router.shared(_joined_again(router, changes)))
        step.clear(router.gathered)  # this step's are used up
        if router.config.policy.logit_step == "optimizer":
            if rows is not None:
                changes = router.split(step.written(_joined_again(router, changes), scaling))
            written = [
                (local(site.logits.grad), own_part(own, site.logits))
                for site, own in zip(router.sites, changes, strict=True)
                if site in step.sites and site.logits.grad is not None
            ]
            torch._foreach_copy_([gradient for gradient, _ in written], [own for _, own in written])
            return
        moving = _moving(router, step)
        moved = [(site.logits, own) for site, own in zip(router.sites, changes, strict=True) if site in moving]
        torch._foreach_sub_([local(logits) for logits, _ in moved], [own_part(own, logits) for logits, own in moved])
        for logits in held:
            logits.grad = None


def _joined_again(router: SiteRouter, changes: Sequence[Tensor]) -> Tensor:
    return router.table([own.flatten() for own in changes])


def _moving(router: SiteRouter, step: Step) -> set[FlexAct]:
    """The sites whose logits a paced step moves: those with a gradient, and those that pick together with one."""
    moving = {site for site in step.sites if site.logits.grad is not None}
    groups = {site.group for site in moving} - {None}
    return moving | {site for site in router.sites if site.group in groups and site.logits.requires_grad}


def _advantage(router: SiteRouter, gradient: Tensor) -> Tensor:
    """⟨δ, a_k − x⟩ of the candidates of a row, scaled to a norm of 1, (rows, K); 0 for what is out."""
    # In double precision, whose squares of small numbers do not underflow.
    return F.normalize(gradient.double() / router.p.clamp(min=_TINY), dim=-1, eps=_SMALLEST_NORM).float()


def _changes(
    router: SiteRouter,
    gradients: list[Tensor],
    running: RunningGradient,
    step_size: Tensor,
    sensitivity: Tensor | None = None,
) -> Sequence[Tensor]:
    """The corrected gradient of each site, flat, or, when paced, what is subtracted from its logits.

    gradients: of all sites, flat, in any number of pieces.
    sensitivity: the means over several ranks, where they are known: ranks wait for each other to compute them.
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
) -> Sequence[Tensor]:
    """`_changes` by one kernel, which also averages the sensitivities unless there are several ranks."""
    from flexact.ops.triton import fallback  # needs Triton
    from flexact.ops.triton import policy as policy_kernels

    rule = _rule(router)
    sensitivity = router.sensitivity() if rule.pulls and rank_count() > 1 else None
    values, calls = _joined(router, gradients, rule, sensitivity)
    tables = (router.layout, calls, router.alive(), running.tensors, _q(router), router.width(), router.alpha)

    def fused(values: Tensor) -> Sequence[Tensor]:
        found = policy_kernels.direction(values, router.size, *tables, step_size, rule)
        return torch.split(found, [site.rows * site.k for site in router.sites])

    return fallback.run(fused, lambda _: _changes(router, gradients, running, step_size, sensitivity), values)


def _rule(router: SiteRouter) -> Rule:
    from flexact.ops.triton.policy import Rule  # needs Triton

    policy = router.config.policy
    return Rule(
        clips=policy.correction == "clip_logit_gradient",
        pulls=policy.pulls_logits,
        clips_sensitivity=policy.correction == "clipped_norm_kl",
        paced=policy.logit_step == "paced",
        mean_rate=1 - MEAN_DECAY,
        square_rate=1 - SQUARE_DECAY,
        lam=None if policy.lam == "temperature" else policy.lam,
        clip=policy.clip,
    )


def _joined(
    router: SiteRouter, gradients: list[Tensor], rule: Rule, sensitivity: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the kernel reads of the sites, as one flat tensor, and where it finds the sensitivities of each row in it;
    without sensitivities, any table will do for their places."""
    values, start, calls = [*gradients], router.size, router.layout
    if rule.tied:
        values += router.temperatures()
        start += len(router.sites)
    if rule.pulls:
        flat, calls = router.gathered.flat(router.device, start, sensitivity)
        values += flat
    return torch.cat(values), calls


def _penalty(router: SiteRouter) -> Tensor:
    alive = router.alive()
    log_q = log_pi(router.logits(), alive)
    if router.config.policy.kl_on == "p":
        log_q = torch.log_softmax((log_q + router.noise) / router.temperature(), dim=-1)
    target = _target(router, router.sensitivity(), alive)
    return router.alpha * (corrections.kl(target, log_q) * router.called().squeeze(1)).sum()


def _q(router: SiteRouter) -> Tensor:
    """What the KL acts on."""
    return router.pi if router.config.policy.kl_on == "pi" else router.p


def _target(router: SiteRouter, sensitivity: Tensor, alive: Tensor) -> Tensor:
    policy = router.config.policy
    if policy.correction == "clipped_norm_kl":
        sensitivity = sensitivity.clamp(max=policy.clip)
    lam = router.temperature() if policy.lam == "temperature" else policy.lam
    return corrections.target(sensitivity, lam, alive)
