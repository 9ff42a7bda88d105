"""The models of the synthetic studies, by name.

`flexact-default` is `FlexConfig()`; `flexact-a0.3` is the chosen policy with α = 0.3; a correction's name is the chosen
policy with that correction; everything else is a candidate, fixed, or a baseline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

from torch import nn

from flexact.baselines import BASELINES, make
from flexact.candidates import known_names, lookup
from flexact.config import Correction, FlexConfig, Policy
from flexact.errors import FlexActError, suggestion
from flexact.routing.layer import FlexAct
from flexact.studies.synthetic.names import DEFAULT, alpha_of
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.replicas import LEARNING_RATE

CORRECTIONS: tuple[str, ...] = get_args(Correction)
_ABLATED: dict[str, dict[str, Any]] = {
    # Every ḡ is clipped, which makes all candidates alike: at the config's own bound none would be.
    "clipped_norm_kl": {"clip": 0.05},
}
_ABLATED_RUN: dict[str, dict[str, Any]] = {
    # A committed site runs its function as it is; the paper's errors are those of normalised outputs.
    "output_norm": {"commit_at": None, "eliminate": "none"},
}
_FALLING_FROM = 5.0
"""Where the learning rate of a model that does not route starts, as a factor on that of one that does."""


def literal() -> FlexConfig:
    """The paper's formulas as they stand: the KL acts on the sampled p, λ is τ, α never falls, nothing commits."""
    return FlexConfig.paper(policy=Policy.literal(), commit_at=None)


def policy(model: str, options: Options) -> FlexConfig | None:
    """The config behind a Flex-Act model, one pick a replica; None for a fixed activation or a baseline."""
    alpha = alpha_of(model)
    if model == DEFAULT:
        config = FlexConfig()
    elif alpha is not None:
        config = _chosen(options).with_policy(alpha=alpha)
    elif model in CORRECTIONS:
        chosen = _chosen(options).with_policy(correction=model, **_ABLATED.get(model, {}))
        config = dataclasses.replace(chosen, **_ABLATED_RUN.get(model, {}))
    else:
        return None
    return dataclasses.replace(
        config, candidates=options.candidates, granularity="channel", channel_dim=1, seed=options.first_seed
    )


def activation(model: str, options: Options) -> nn.Module:
    """A model's activation for all its replicas at once: takes (B, R, width)."""
    config = policy(model, options)
    if config is not None:
        return FlexAct(config=config, channels=len(options.cells))
    if model in BASELINES:
        return make(model, channels=len(options.cells), channel_dim=1)
    return lookup(model).module()


def rate(model: str, options: Options) -> Callable[[float], float]:
    """A factor on the learning rate of an epoch, by the fraction of the run before it.

    Flex-Act trains at a constant rate, as in the paper. A fixed activation or a baseline starts at five times that and
    ends at nothing: its row stands for the least error it can have, and at a constant 0.01 Sigmoid is 2.8 % above its
    least error on Tanh after 100 epochs, because its best weights are infinite.
    """
    return _constant if policy(model, options) is not None else _falling


def told_rate(model: str, options: Options) -> str:
    """The learning rate in words."""
    if policy(model, options) is not None:
        return f"{LEARNING_RATE:g}"
    return f"{_FALLING_FROM * LEARNING_RATE:g}, falling linearly to 0"


def check(options: Options, usual: Sequence[str]) -> None:
    """Refuse a name that stands for no model, and a truth that a model which picks could never pick."""
    if not options.models:
        raise FlexActError(f"--models names nothing; known: {', '.join(usual)}.")
    others = (DEFAULT, *CORRECTIONS, *BASELINES, *known_names())
    for model in options.models:
        if alpha_of(model) is None and model not in others:
            known = list(dict.fromkeys((DEFAULT, *usual, *BASELINES, *known_names())))
            raise FlexActError(
                f"unknown model {model!r}{suggestion(model, known)} Known: {', '.join(usual)}; any other candidate; "
                "and flexact-a followed by a number for the chosen policy at that α."
            )
    picking = [model for model in options.models if policy(model, options) is not None]
    missing = [truth for truth in options.truths if truth not in options.candidates]
    if picking and missing:
        raise FlexActError(
            f"{picking[0]} picks from {', '.join(options.candidates)}, and can never find the truth "
            f"{', '.join(missing)}; name it in --candidates too, or give --truths from these, or --models that do not "
            "pick."
        )


def _constant(progress: float) -> float:
    return 1.0


def _falling(progress: float) -> float:
    return _FALLING_FROM * (1 - progress)


def _chosen(options: Options) -> FlexConfig:
    if options.policy == "literal":
        return literal()
    return FlexConfig() if options.policy == "default" else FlexConfig.paper()
