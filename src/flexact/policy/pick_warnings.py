"""Warnings about picks that little or nothing decides: too few steps, no optimizer, no gradient."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

from flexact.config import FlexConfig
from flexact.io.value_checks import MOST_STEPS
from flexact.policy.rounds import Plan, rungs, trial_steps
from flexact.policy.running_gradient import RunningGradient
from flexact.routing.layer import FlexAct
from flexact.routing.sites import SiteRouter

SHORTEST_ROUND, SHORTEST_TRIAL = 150, 150
"""Steps of a round, or of the last rung of a trial, under which picks are close to random."""


def warn_if_short(plan: Plan, k: int, config: FlexConfig, round_steps: float, rounds: int) -> None:
    """Warn where a run has too few steps to tell k candidates apart.

    round_steps, rounds: how long an elimination round of a blend is, and how many there are.
    """
    if config.commit_at is None:
        return
    if plan.rungs:
        is_short = plan.rungs[-1].until < min(SHORTEST_TRIAL, config.trial_steps)
        needed = trial_steps(rungs(k, config, MOST_STEPS))
    else:
        longest = config.round_length or SHORTEST_ROUND
        is_short = round_steps < min(SHORTEST_ROUND, longest)
        needed = longest * rounds
    if is_short:
        warnings.warn(
            f"{plan.total_steps} steps are few for a pick from {k} candidates, which takes about {needed} steps. "
            "Train longer, or give fewer candidates.",
            stacklevel=3,
        )


def warn_if_frozen(sites: Sequence[FlexAct]) -> None:
    """Warn of sites whose logits nothing can train."""
    frozen = [site.name or "FlexAct" for site in sites if not site.logits.requires_grad]
    if frozen:
        warnings.warn(f"the logits of {', '.join(frozen[:5])} have requires_grad=False: no pick there", stacklevel=3)


def warn_of_arbitrary_picks(
    router: SiteRouter, running: RunningGradient, stepped: Collection[FlexAct], acts: bool
) -> None:
    """Warn where a site is about to drop a candidate and nothing has told its candidates apart.

    stepped: the sites whose logits an optimizer holds that has made a step. acts: whether the policy acts before steps.
    """
    count, paced = len(router.sites), router.config.policy.logit_step == "paced"
    if not stepped and (acts or all(site.at_start() for site in router.sites)):
        # Otherwise something that no hook sees, such as another library's optimizer, has moved them.
        message = (
            "no optimizer of torch.optim that holds the logits has made a step yet, so what is dropped now is "
            "arbitrary. Convert the model before you build the optimizer, give it flexact.param_groups(model), "
            "and call schedule.step() after optimizer.step()."
        )
    elif acts and (left_out := _left_out(router, stepped)):
        message = (
            f"no optimizer that holds the logits of {len(left_out)} of {count} sites ({', '.join(left_out[:5])}) has "
            "made a step yet, so what these drop now is arbitrary. Give the optimizer flexact.param_groups(model), or "
            "leave these sites out of convert's where."
        )
    elif paced and (idle := _without_gradient(router, running)):
        message = (
            f"no gradient came to {len(idle)} of {count} sites so far ({', '.join(idle[:5])}), so their picks are "
            "arbitrary. The usual reason is a forward that never calls them: leave them out of convert's where."
        )
    else:
        return
    warnings.warn(message, stacklevel=3)


def _left_out(router: SiteRouter, stepped: Collection[FlexAct]) -> list[str]:
    """The trainable sites that no optimizer has stepped, nor any site that they pick together with."""
    groups = {site.group for site in stepped} - {None}
    sites = [site for site in router.sites if site.logits.requires_grad and site not in stepped]
    return [site.name or "FlexAct" for site in sites if site.group not in groups]


def _without_gradient(router: SiteRouter, running: RunningGradient) -> list[str]:
    """The trainable sites that still have their candidates alike, and that nothing has asked for any of them."""
    still = (running.mean == 0).all(-1).split([site.rows for site in router.sites])
    idle = [site for site, rows in zip(router.sites, still, strict=True) if site.logits.requires_grad and rows.all()]
    return [site.name or "FlexAct" for site in idle if site.pi().std(-1).max() < 1e-6]
