"""The models of the synthetic studies, by name.

`flexact-default` is `FlexConfig()`. `flexact-a0.3` is the policy of `--policy` with α = 0.3, and the name of a
correction is that policy with this correction. `kan` is a Kolmogorov-Arnold layer, without a linear unit. Any other
name is a fixed candidate or a baseline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import nn

from flexact.baselines import BASELINES, KolmogorovArnoldLayer, make
from flexact.candidates import known_names, lookup
from flexact.config import Correction, FlexConfig, Policy
from flexact.errors import FlexActError, suggestion
from flexact.routing.layer import FlexAct
from flexact.studies.synthetic.options import DEFAULT, KAN, Options, alpha_of
from flexact.studies.synthetic.replicas import LEARNING_RATE

CORRECTIONS: tuple[str, ...] = get_args(Correction)
_ABLATED: dict[str, dict[str, Any]] = {
    # This bound clips every ḡ, which makes the candidates nearly equal. The default bound would clip none.
    "clipped_norm_kl": {"clip": 0.05},
}
_ABLATED_RUN: dict[str, dict[str, Any]] = {
    # A committed site does not normalise its output, but the paper's errors are for normalised outputs.
    "output_norm": {"commit_at": None, "eliminate": "none"},
}
_FALLING_FROM = 5.0
"""Initial learning rate of models that do not route, relative to models that do."""


def literal() -> FlexConfig:
    """The paper's formulas taken literally: the KL acts on the sampled p, λ is τ, α is constant, nothing commits."""
    return FlexConfig.paper(policy=Policy.literal(), commit_at=None)


def policy(model: str, options: Options) -> FlexConfig | None:
    """Return the config of a Flex-Act model, with one pick per replica; None for a fixed activation or a baseline."""
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
    """Return one activation for all replicas of a model; it takes (B, R, width)."""
    config = policy(model, options)
    if config is not None:
        return FlexAct(config=config, channels=len(options.cells))
    if model in BASELINES:
        return make(model, channels=len(options.cells), channel_dim=1)
    if model == KAN:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.first_seed)
            return KolmogorovArnoldLayer(1 + options.distractors, max(options.hidden, 1), len(options.cells))
    return lookup(model).module()


def learned(model: str, options: Options) -> int:
    """Return the number of parameters that one replica's activation learns; a KAN layer's include its linear part."""
    each = sum(parameter.numel() for parameter in activation(model, options).parameters())
    return each // len(options.cells)


def rate(model: str, options: Options) -> Callable[[float], float]:
    """Return the schedule of the learning rate: a factor as a function of the completed fraction of the run.

    Flex-Act trains at a constant rate, as in the paper. A fixed activation or a baseline starts at five times that and
    ends at 0, because its row shows the minimum error that it can reach. At a constant rate of 0.01, Sigmoid is
    2.8 % above its minimum error on Tanh after 100 epochs, because its best weights are infinite.
    """
    if policy(model, options) is not None:
        return lambda progress: 1.0
    return lambda progress: _FALLING_FROM * (1 - progress)


def rate_text(model: str, options: Options) -> str:
    """Return the learning rate in words."""
    if policy(model, options) is not None:
        return f"{LEARNING_RATE:g}"
    return f"{_FALLING_FROM * LEARNING_RATE:g}, falling linearly to 0"


def check(options: Options, usual: Sequence[str]) -> None:
    """Raise if a name is unknown, or if a truth is not among the candidates of a model that picks."""
    if not options.models:
        raise FlexActError(f"--models names nothing; known: {', '.join(usual)}.")
    others = (DEFAULT, KAN, *CORRECTIONS, *BASELINES, *known_names())
    for model in options.models:
        if alpha_of(model) is None and model not in others:
            known = list(dict.fromkeys((DEFAULT, KAN, *usual, *BASELINES, *known_names())))
            raise FlexActError(
                f"unknown model {model!r}{suggestion(model, known)} Known: {', '.join(usual)}, any other candidate, "
                "and flexact-a followed by a number for the policy of --policy with that α."
            )
    picking = [model for model in options.models if policy(model, options) is not None]
    missing = [truth for truth in options.truths if truth not in options.candidates]
    if picking and missing:
        raise FlexActError(
            f"{picking[0]} picks from {', '.join(options.candidates)}, and can never find the truth "
            f"{', '.join(missing)}. Add it to --candidates, or change --truths or --models."
        )


def _chosen(options: Options) -> FlexConfig:
    if options.policy == "literal":
        return literal()
    return FlexConfig() if options.policy == "default" else FlexConfig.paper()
