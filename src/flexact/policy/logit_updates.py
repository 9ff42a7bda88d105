"""The KL penalty, which a training loop adds to the loss, and the update of the logits before an optimizer step.

If the Schedule moves the logits (`Policy.logit_step`), how far they move in a round does not depend on the optimizer,
the loss scale or the run length: a site's logit gradient is averaged over recent steps and divided by its running
root-mean-square (`flexact.policy.evidence`), so its consistency matters, and its magnitude does not.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from flexact.ops import fallback
from flexact.ops.policy_tables import PolicyKernels, Tables, has_kernel
from flexact.policy.evidence import MEAN_DECAY, SQUARE_DECAY, RoundStatistics
from flexact.policy.optimizers import Step
from flexact.routing import corrections
from flexact.routing.call_statistics import rank_count
from flexact.routing.gumbel import log_pi
from flexact.routing.router import Router
from flexact.routing.sharding import is_sharded, local, own_part
from flexact.routing.sites import routers_of, sites_of

_SMALLEST_P = 1e-30
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
    sites = sites_of(model)
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
    router: Router,
    statistics: RoundStatistics,
    step_size: Tensor,
    step: Step,
    factors: Tensor | None,
) -> None:
    """Correct the gradients of the logits that the stepping optimizer holds or, if the Schedule moves the logits, move
    them.

    statistics: the gradients and advantages of this step are added to them.
    step_size: a scalar; only used if the Schedule moves the logits.
    factors: see `Step.factors`.

    The number of operations does not depend on the depth, and none synchronizes with the device, so a CUDA graph can
    capture them.
    """
    if router.at_rest:
        skip(router, step)  # DistributedDataParallel leaves gradients of zeros
        return
    if not router.ready or all(logits.grad is None for logits in step.logits()):
        return
    statistics.to(router.device)
    kernels = router.kernels() if has_kernel(router.config.policy) else None
    update = None if kernels is None else _FusedUpdate(kernels, router, statistics, step_size, factors)
    if update is not None and len(step.sites) == len(router.sites) and update.moves_logits():
        router.call_statistics.clear()
        return
    with torch.no_grad():
        changes = _update(router, statistics, step_size, factors) if update is None else update.changes()
        if router.config.policy.moves_logits:
            _move_logits(router, step, changes)
            skip(router, step)
        else:
            _replace_gradients(router, step, changes)
            router.call_statistics.forget(step.first_rows)


def skip(router: Router, step: Step) -> None:
    """Discard the gradients and the statistics of a step, so that the optimizer does not move its logits."""
    for logits in step.logits():
        logits.grad = None
    router.call_statistics.forget(step.first_rows)


def _move_logits(router: Router, step: Step, changes: list[Tensor]) -> None:
    """Subtract the changes from the logits. A site without a gradient moves together with its group."""
    every = list(zip(router.sites, router.parameters(), changes, strict=True))
    moving = {site for site, logits, _ in every if logits.grad is not None and site in step.sites}
    if len(moving) < len(every):
        groups = {site.group for site in moving} - {None}
        moving |= {site for site, logits, _ in every if site.group in groups and logits.requires_grad}
    moved = [(logits, change) for site, logits, change in every if site in moving]
    torch._foreach_sub_([local(logits) for logits, _ in moved], [own_part(change, logits) for logits, change in moved])


def _replace_gradients(router: Router, step: Step, changes: list[Tensor]) -> None:
    """Write the corrected gradients to the logits that the optimizer is about to step."""
    every = zip(router.sites, router.parameters(), changes, strict=True)
    found = [(own.grad, change) for site, own, change in every if own.grad is not None and site in step.sites]
    torch._foreach_copy_([local(own) for own, _ in found], [own_part(change, own) for own, change in found])


def _update(
    router: Router,
    statistics: RoundStatistics,
    step_size: Tensor,
    factors: Tensor | None,
    sensitivity: Tensor | None = None,
) -> list[Tensor]:
    """Update the statistics. Return the change to subtract from each site's logits, flat, or, if the optimizer moves
    the logits, each site's corrected gradient.

    factors: see `Step.factors`.
    sensitivity: the means over all ranks, if they are already known; computing them is a collective operation.
    """
    policy, alive = router.config.policy, router.alive()
    gradient = router.table(router.gradients())
    moves = None
    if factors is not None:
        moves = factors != 0
        gradient = torch.where(moves, gradient * factors, 0.0)
    statistics.add(
        router.shared(_advantage(router, gradient)), moves if moves is None else router.shared(moves.float())
    )
    if policy.correction == "clip_logit_gradient":
        gradient = corrections.clip_rows(gradient, policy.clip)
    mean, size = statistics.average(gradient, alive, moves)
    change = mean if policy.moves_logits else gradient
    if policy.pulls_logits:
        target = _target(router, router.sensitivity() if sensitivity is None else sensitivity, alive)
        pulled = corrections.relative_kl(change, _q(router), target, router.alpha, size, router.width())
        change = torch.where(router.called(), pulled, change)  # a row without a call has no target
    if policy.moves_logits:
        change = step_size * (change / size)
    if moves is not None:
        change = torch.where(moves, change, 0.0)
    change = router.shared(change)
    if factors is not None and not policy.moves_logits:
        change = torch.where(factors != 0, change / factors, 0.0)  # restore the sign and the loss scale
    return router.split(change)


def _advantage(router: Router, gradient: Tensor) -> Tensor:
    """Return ⟨δ, a_k − x⟩, scaled to a norm of 1 per row, (rows, K); 0 for dropped candidates."""
    # In double precision, so that the squares of small numbers do not underflow.
    advantage = gradient.double() / router.p.clamp_min(_SMALLEST_P)
    norm: Tensor = torch.linalg.vector_norm(advantage, dim=-1, keepdim=True)
    return (advantage / norm.clamp_min(_SMALLEST_NORM)).float()


class _FusedUpdate:
    """The computation of `_update` by one kernel; on one rank, the kernel also averages the sensitivities."""

    def __init__(
        self,
        kernels: PolicyKernels,
        router: Router,
        statistics: RoundStatistics,
        step_size: Tensor,
        factors: Tensor | None,
    ) -> None:
        self._kernels, self._router = kernels, router
        policy = router.config.policy
        self._sensitivity: Tensor | None = None
        self._called: list[Tensor] = []
        calls = router.layout  # without sensitivities the kernel does not read it
        if policy.pulls_logits:
            self._sensitivity = router.sensitivity() if rank_count() > 1 else None
            self._called, calls = router.call_statistics.of_calls(router.device, self._sensitivity)
        tables = Tables(
            router.layout, calls, router.grouped_rows, router.group_starts, router.kept_alive(), router.p, _q(router),
            router.width(), router.alpha, step_size, factors,
        )  # fmt: skip
        self._arguments = router.size, tables, statistics.tensors, (1 - MEAN_DECAY, 1 - SQUARE_DECAY), policy
        self._plain = functools.partial(_update, router, statistics, step_size, factors, self._sensitivity)

    def moves_logits(self) -> bool:
        """Move all logits in one call, and return whether that was possible."""
        return self._kernels.move(self._router.parameters(), self._called, *self._arguments)

    def changes(self) -> list[Tensor]:
        """Return the result of `_update`."""
        values = [*self._router.gradients(), *self._called]

        def fused(_: Tensor) -> list[Tensor]:
            return self._router.split_flat(self._kernels.update(values, *self._arguments))

        return fallback.run(fused, lambda _: self._plain(), values[0])


def _penalty(router: Router) -> Tensor:
    alive = router.alive()
    log_q = log_pi(router.logits(), alive)
    if router.config.policy.kl_on == "p":
        log_q = torch.log_softmax((log_q + router.noise) / router.temperature(), dim=-1)
    target = _target(router, router.sensitivity(), alive)
    return router.alpha * (corrections.kl(target, log_q) * router.called().squeeze(1)).sum()


def _q(router: Router) -> Tensor:
    """Return the distribution that the KL acts on."""
    return router.pi if router.config.policy.kl_on == "pi" else router.p


def _target(router: Router, sensitivity: Tensor, alive: Tensor) -> Tensor:
    policy = router.config.policy
    if policy.correction == "clipped_norm_kl":
        sensitivity = sensitivity.clamp(max=policy.clip)
    lam = router.temperature() if policy.lam == "temperature" else policy.lam
    return corrections.target(sensitivity, lam, alive)
