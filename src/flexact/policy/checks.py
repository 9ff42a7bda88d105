"""Checks of a Schedule's arguments and saved state, and warnings about runs that cannot pick well."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from flexact.errors import FlexActError
from flexact.io import value_checks
from flexact.policy.evidence import RoundStatistics
from flexact.policy.rounds import Plan, rungs, trial_steps
from flexact.routing.router import Router
from flexact.routing.site import Site

SHORTEST = 150
"""Minimum steps of a round, or of the last rung of a trial; with fewer, picks are close to random."""


def checked_steps(total_steps: Any, network_steps: Any) -> int:
    """Return whichever of the two is given. Raise unless exactly one is."""
    if (total_steps is None) == (network_steps is None):
        raise FlexActError(
            f"a Schedule needs either total_steps or network_steps; got total_steps={total_steps!r:.80} and "
            f"network_steps={network_steps!r:.80}. Give total_steps, the optimizer steps of the whole run, or "
            "network_steps, those that train the network with its picks."
        )
    name, given = ("total_steps", total_steps) if network_steps is None else ("network_steps", network_steps)
    return value_checks.integer(name, given, 1, value_checks.MAX_STEPS)


def check_loss(loss: Any) -> None:
    """Raise if a loss is not a single number."""
    is_number = loss.numel() == 1 if isinstance(loss, Tensor) else isinstance(loss, Real)
    if loss is not None and not is_number:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:80]
        raise FlexActError(f"schedule.step takes the loss of the step, one number; got {got}. Give its mean.")


def divergence(loss: Tensor | float | None, sites: Sequence[Site]) -> str | None:
    """Return why a blend has diverged; None if it has not. A loss on a GPU is not read, to avoid a synchronization.

    sites: the sites whose logits are checked, which synchronizes with the GPU.
    """
    on_device = isinstance(loss, Tensor) and loss.device.type != "cpu"
    if loss is not None and not on_device and not math.isfinite(float(loss)):
        return "the loss is NaN or infinite"
    diverged = [site.label for site in sites if not site.committed and not site.has_finite_logits()]
    return f"the logits of {', '.join(diverged[:5])} are NaN or infinite" if diverged else None


def check_run(state: Any, version: int, own: Mapping[str, Any]) -> None:
    """Raise if a saved state has another version, or comes from a run with other properties.

    own: the properties of this run, which resumes the saved one; for a tensor, its shape.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise FlexActError(f"not a Schedule's state: {state!r:.200}.")
    if state["version"] != version:
        raise FlexActError(
            f"the saved run has version {state['version']}, but this flexact only reads version {version}. Resume it "
            "with the flexact that wrote it."
        )
    for name, value in own.items():
        saved = state.get(name)
        saved = tuple(saved.shape) if isinstance(saved, Tensor) else saved
        if saved != value:
            raise FlexActError(
                f"the saved run has {name}={saved!r:.80}, but this one has {name}={value!r:.80}. Create the Schedule "
                "with the same steps and rewinds, and convert the model with the same FlexConfig and share, as in the "
                "saved run."
            )
    for name in ("step", "steps_lost"):
        value_checks.integer(name, state.get(name), 0, own["total_steps"])


def warn_if_short(plan: Plan, network_steps: int | None) -> None:
    """Warn if a run that commits has too few steps to compare its candidates.

    network_steps: as given to the Schedule.
    """
    if plan.rungs:
        steps, wanted = float(plan.rungs[-1].until), plan.config.trial_steps
        needed = trial_steps(rungs(plan.k, plan.config, value_checks.MAX_STEPS))
    else:
        steps, wanted = plan.round_steps, plan.config.round_length or SHORTEST
        needed = wanted * plan.rounds
    commit_at = plan.config.commit_at
    if steps < min(SHORTEST, wanted) and commit_at is not None:
        run = "" if network_steps is None else f"with network_steps={network_steps}, the run's "
        warnings.warn(
            f"{run}{plan.total_steps} steps are few for a pick from {plan.k} candidates, which takes about {needed} "
            f"steps in the first {100 * commit_at:g} % of the run. Train longer, or give fewer candidates.",
            stacklevel=3,
        )


def warn_if_rates_end(rewinds: Sequence[Any], plan: Plan) -> None:
    """Warn about a OneCycleLR that ends during a blend. It raises an error if it is stepped further."""
    if plan.rungs or not plan.rewinds:
        return
    for other in rewinds:
        rate = getattr(other, "scheduler", other)  # accelerate wraps schedulers
        if isinstance(rate, OneCycleLR) and rate.total_steps < plan.commit_step:
            warnings.warn(
                f"OneCycleLR ends after {rate.total_steps} steps, but it is rewound only at step {plan.commit_step}, "
                "and raises an error if it is stepped further. Step it only while "
                f"schedule.trained_steps < {rate.total_steps}, or train longer.",
                stacklevel=3,
            )


def omissions(router: Router, steps_done: int, stepped: bool, adds_steps: bool, rewinds_untrained: bool) -> list[str]:
    """Return warnings about what the training loop forgot: to load the schedule's state, to add the penalty, or to
    train the model.

    stepped: whether an optimizer that holds logits has made a step. adds_steps: whether picking takes extra steps.
    rewinds_untrained: whether this step rewinds weights that no optimizer has stepped.
    """
    needs_penalty = router.config.policy.adds_to_loss and router.ready and not (router.at_rest or router.committed)
    starts = steps_done == 0
    warnings_if = (
        (
            starts and router.committed and adds_steps,
            "every site of this model is committed, so the steps that network_steps adds for picking are not needed. "
            "To resume a run, load the schedule's state as well: schedule.load_state_dict(...). To train longer, "
            "extract the network, and train it without a Schedule.",
        ),
        (
            starts and router.resumes and not router.committed,
            "the model or the optimizer has the state of an earlier run, but this schedule starts at step 0. To "
            "resume that run, load the schedule's state as well: schedule.load_state_dict(...).",
        ),
        (
            needs_penalty and stepped and not router.penalized,
            "this policy needs a penalty, but the training loop does not add it. Use loss = loss + "
            "flexact.penalty(model).",
        ),
        (
            rewinds_untrained,
            "no optimizer of torch.optim has stepped the weights that are rewound now. Call optimizer.step() before "
            "schedule.step(loss), with an optimizer of this model's parameters. If it is not one of torch.optim, pass "
            "it to Schedule(..., rewinds=[optimizer]).",
        ),
    )
    return [message for applies, message in warnings_if if applies]


def warn_of_arbitrary_picks(router: Router, statistics: RoundStatistics, stepped: bool, acts: bool) -> None:
    """Warn if a site is about to drop a candidate without any evidence.

    stepped: whether an optimizer that holds logits has made a step. acts: whether the policy acts before steps.
    """
    if not stepped and (acts or all(site.at_start() for site in router.sites)):
        # If the logits have moved, an optimizer without torch's hooks has stepped them.
        message = (
            "no optimizer of torch.optim has stepped the logits yet, so the candidates that are dropped now are "
            "arbitrary. Convert the model before you build the optimizer, and call schedule.step() after its step."
        )
    elif acts and (idle := _without_gradient(router, statistics)):
        message = (
            f"{len(idle)} of {len(router.sites)} sites have received no gradient so far ({', '.join(idle[:5])}), so "
            "their picks are arbitrary. If no optimizer holds their logits, give it flexact.param_groups(model); if "
            "the logits are frozen, unfreeze them; if the forward never calls them, exclude them in convert."
        )
    else:
        return
    warnings.warn(message, stacklevel=5)


def _without_gradient(router: Router, statistics: RoundStatistics) -> list[str]:
    """Return the sites that have equal probabilities and never received a gradient."""
    still = (statistics.mean.cpu() == 0).all(-1)
    idle = [site for site in router.sites if bool(still[site.table_rows].all())]
    return [site.label for site in idle if site.pi().std(-1).max() < 1e-6]
