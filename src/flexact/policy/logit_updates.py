"""The policy at work: what is added to the loss, and what is done to the logits before an optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexact.config import FlexConfig
from flexact.policy.evidence import Evidence
from flexact.policy.running_gradient import MEAN_DECAY, SQUARE_DECAY, RunningGradient
from flexact.routing import corrections
from flexact.routing.call_statistics import mean_over_ranks, rank_count
from flexact.routing.router import Router, log_pi
from flexact.routing.sharding import is_sharded, local, own_part
from flexact.routing.sites import bound_sites, routers_of

if TYPE_CHECKING:
    from flexact.ops.triton.policy import Rule
    from flexact.policy.optimizer_steps import Scaling, Step
    from flexact.routing.layer import FlexAct

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
    routers = [router for router in routers_of(sites) if _adds_to_loss(router.config) and router.ready]
    terms = [_penalty(router) for router in routers if not (router.at_rest or router.committed)]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        unused = [site for site in sites if site.committed or site.router.at_rest]
        idle: list[Tensor] = [
            site.logits for site in unused if site.logits.requires_grad and not is_sharded(site.logits)
        ]
        if idle:
            terms.append(0 * torch.cat(idle).sum())  # DistributedDataParallel waits for a gradient of every parameter
    if terms:
        return torch.stack(terms).sum()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.zeros((), device=device)


def acts_before_steps(config: FlexConfig) -> bool:
    """Whether a policy acts on the logit gradients between the backward pass and the optimizer's step."""
    corrects = config.advantage == "normalized" or config.correction == "clip_logit_gradient"
    return config.logit_step == "paced" or corrects or _is_relative(config)


def before_step(
    router: Router, running: RunningGradient, evidence: Evidence, step_size: Tensor, step: Step, scaling: Scaling | None
) -> None:
    """Correct the gradients that the logits of the stepping optimizer hold; then move these logits, or leave that to
    the optimizer.

    step_size: of a paced logit, a scalar. Its gradient is taken away, so that the optimizer passes it over.
    evidence: gets the step's advantages.

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
            changes = router.split(torch.where(rows, router.table([own.flatten() for own in changes]), 0.0))
            evidence.add(advantage, router.shared(rows.expand_as(advantage).float())[:, :1] > 0)
        if router.shares:
            changes = router.split(router.shared(router.table([own.flatten() for own in changes])))
        step.clear(router.gathered)  # this step's are used up
        if router.config.logit_step == "optimizer":
            if rows is not None:
                changes = router.split(step.written(router.table([own.flatten() for own in changes]), scaling))
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


def _moving(router: Router, step: Step) -> set[FlexAct]:
    """The sites whose logits a paced step moves: those with a gradient, and those that pick together with one of
    these."""
    moving = {site for site in step.sites if site.logits.grad is not None}
    groups = {site.group for site in moving} - {None}
    return moving | {site for site in router.sites if site.group in groups and site.logits.requires_grad}


def _advantage(router: Router, gradient: Tensor) -> Tensor:
    """⟨δ, a_k − x⟩ of the candidates of a row, scaled to a norm of 1, (rows, K); 0 for what is out."""
    # In double precision, whose squares of small numbers are still numbers.
    return F.normalize(gradient.double() / router.p.clamp(min=_TINY), dim=-1, eps=_SMALLEST_NORM).float()


def _changes(
    router: Router, gradients: list[Tensor], running: RunningGradient, step_size: Tensor, means: Tensor | None = None
) -> Sequence[Tensor]:
    """Of each site, flat: its corrected gradient or, when paced, what its logits are moved back by.

    gradients: of all sites, flat, in any number of pieces.
    means: of the statistics, where they are known already: ranks wait for each other there, so it is done once a step.
    """
    means = _statistics(router) if means is None else means
    direction = _direction(router, router.table(gradients), means, running)
    return router.split(step_size * direction if router.config.logit_step == "paced" else direction)


def _fused_changes(
    router: Router, gradients: list[Tensor], running: RunningGradient, step_size: Tensor
) -> Sequence[Tensor]:
    """`_changes` by one kernel, which also averages the statistics where there are those of one rank only."""
    from flexact.ops.triton import fallback  # needs Triton
    from flexact.ops.triton import policy as policy_kernels

    rule = _rule(router.config)
    means = _statistics(router) if rank_count() > 1 else None
    values, calls = _joined(router, gradients, rule, means)
    q = _q(router)
    tables = (router.layout, calls, router.alive(), running.tensors, q, router.width(), router.alpha, step_size)

    def fused(values: Tensor) -> Sequence[Tensor]:
        found = policy_kernels.direction(values, router.size, *tables, rule)
        return torch.split(found, [site.rows * site.k for site in router.sites])

    return fallback.run(fused, lambda _: _changes(router, gradients, running, step_size, means), values)


def _rule(config: FlexConfig) -> Rule:
    from flexact.ops.triton.policy import Rule  # needs Triton

    return Rule(
        normalises=config.advantage == "normalized",
        clips=config.correction == "clip_logit_gradient",
        pulls=_is_relative(config),
        clips_sensitivity=config.correction == "clipped_norm_kl",
        paced=config.logit_step == "paced",
        mean_rate=1 - MEAN_DECAY,
        square_rate=1 - SQUARE_DECAY,
        lam=None if config.lam == "temperature" else config.lam,
        clip=config.clip,
    )


def _joined(router: Router, gradients: list[Tensor], rule: Rule, means: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the kernel reads of the sites, as one flat tensor, and where it finds the statistics of each row in it."""
    values, start, calls = [*gradients], router.size, router.layout
    if rule.tied:
        values += router.temperatures()
        start += len(router.sites)
    if _needs_statistics(router.config):
        statistics, calls = router.gathered.flat(router.device, start, means)
        values += statistics
    return torch.cat(values), calls  # without statistics any table will do for them


def _direction(router: Router, gradient: Tensor, means: Tensor, running: RunningGradient) -> Tensor:
    """The corrected gradient, or when paced its running mean in units of its running size."""
    config, alive = router.config, router.alive()
    if config.advantage == "normalized":
        gradient = corrections.normalised_advantage(gradient, means[1], alive)
    if config.correction == "clip_logit_gradient":
        gradient = corrections.clip_rows(gradient, config.clip)
    mean, size = running.update(gradient, alive)
    if config.logit_step == "paced":
        gradient = mean
    if _is_relative(config):
        q, target = _q(router), _target(router, means[0], alive)
        pulled = corrections.relative_kl(gradient, q, target, router.alpha, size, router.width())
        gradient = torch.where(router.called(), pulled, gradient)  # a site that was not called has no target
    return gradient / size if config.logit_step == "paced" else gradient


def _penalty(router: Router) -> Tensor:
    alive = router.alive()
    log_q = log_pi(router.logits(), alive)
    if router.config.kl_on == "p":
        log_q = torch.log_softmax((log_q + router.noise) / router.temperature(), dim=-1)
    called = router.called().squeeze(1)
    target = _target(router, router.mean_statistics()[0], alive)
    return router.alpha * (corrections.kl(target, log_q) * called).sum()


def _q(router: Router) -> Tensor:
    """What the KL acts on. Its gradient is linear in it: where each rank has a draw, their mean gives its mean."""
    if router.config.kl_on == "pi":
        return router.pi
    return router.p if router.config.noise_across_ranks == "shared" else mean_over_ranks(router.p)


def _target(router: Router, sensitivity: Tensor, alive: Tensor) -> Tensor:
    config = router.config
    if config.correction == "clipped_norm_kl":
        sensitivity = corrections.clipped(sensitivity, config.clip)
    lam = router.temperature() if config.lam == "temperature" else config.lam
    return corrections.target(sensitivity, lam, alive)


def _statistics(router: Router) -> Tensor:
    """`Router.mean_statistics`; empty where the policy needs none before a step."""
    return router.mean_statistics() if _needs_statistics(router.config) else torch.empty(0)


def _needs_statistics(config: FlexConfig) -> bool:
    """Whether the policy reads statistics before a step; its penalty may read them, too."""
    return config.advantage == "normalized" or _is_relative(config)


def _uses_kl(config: FlexConfig) -> bool:
    return config.correction in ("grad_norm_kl", "clipped_norm_kl") and config.alpha > 0


def _adds_to_loss(config: FlexConfig) -> bool:
    return _uses_kl(config) and config.alpha_kind == "absolute"


def _is_relative(config: FlexConfig) -> bool:
    return _uses_kl(config) and config.alpha_kind == "relative"
