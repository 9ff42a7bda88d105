"""The models of the synthetic studies, by name.

`flexact-default` is `FlexConfig()`. `flexact-a0.3` is the policy of `--policy` with α = 0.3, and the name of a
correction is that policy with this correction. `kan` is a Kolmogorov-Arnold layer, without a linear unit. Any other
name is a fixed candidate or a baseline.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

import torch
from torch import nn

from flexact.baselines import BASELINES, KolmogorovArnoldLayer, make
from flexact.candidates.registry import known_names, lookup
from flexact.config import Correction, FlexConfig
from flexact.errors import FlexActError
from flexact.io.value_checks import check_names
from flexact.routing.layer import FlexAct
from flexact.studies.synthetic.options import DEFAULT, KAN, POLICIES, Options, alpha_of

CORRECTIONS: tuple[str, ...] = get_args(Correction)


def policy(model: str, options: Options) -> FlexConfig | None:
    """Return the config of a Flex-Act model, with one pick per replica; None for a fixed activation or a baseline."""
    config, alpha = POLICIES[options.policy], alpha_of(model)
    if model == DEFAULT:
        config = FlexConfig()
    elif alpha is not None:
        config = config.with_policy(alpha=alpha)
    elif model in CORRECTIONS:
        config = config.with_policy(correction=model)
    else:
        return None
    if model == "clipped_norm_kl":
        # This bound clips every ḡ, which makes the candidates nearly equal. The default bound would clip none.
        config = config.with_policy(clip=0.05)
    if model == "output_norm":
        # A committed site does not normalise its output, but the paper's errors are for normalised outputs.
        config = dataclasses.replace(config, commit_at=None, eliminate="none")
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
    return sum(parameter.numel() for parameter in activation(model, options).parameters()) // len(options.cells)


def check(options: Options) -> None:
    """Raise if a model is unknown, or if a truth is not among the candidates of a model that picks."""
    alphas = [model for model in options.models if alpha_of(model) is not None] or ["flexact-a0.3"]
    check_names("models", options.models, (DEFAULT, KAN, *alphas, *CORRECTIONS, *BASELINES, *known_names()))
    picking = [model for model in options.models if policy(model, options) is not None]
    missing = [truth for truth in options.truths if truth not in options.candidates]
    if picking and missing:
        raise FlexActError(
            f"{picking[0]} picks from {', '.join(options.candidates)}, and can never find the truth "
            f"{', '.join(missing)}. Add it to --candidates, or change --truths or --models."
        )
