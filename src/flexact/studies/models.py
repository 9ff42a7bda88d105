"""The models of the synthetic studies, by name.

`flexact-default` is `FlexConfig()`; `flexact-a0.3` is the chosen policy with α = 0.3; a correction's name is the chosen
policy with that correction; everything else is a candidate, fixed, or a baseline.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, get_args

from torch import nn

from flexact.baselines import BASELINES, make
from flexact.candidates import known_names, lookup
from flexact.config import Correction, FlexConfig
from flexact.errors import FlexActError, suggestion
from flexact.layer import FlexAct
from flexact.studies.options import Options

DEFAULT = "flexact-default"
CORRECTIONS: tuple[str, ...] = get_args(Correction)
_ABLATED: dict[str, dict[str, Any]] = {
    # Every ḡ is clipped, which makes all candidates alike: at the config's own bound none would be.
    "clipped_norm_kl": {"correction": "clipped_norm_kl", "clip": 0.05},
    # A committed site runs its function as it is; the paper's errors are those of normalised outputs.
    "output_norm": {"correction": "output_norm", "commit_at": None, "eliminate": False},
}
_ALPHA = re.compile(r"flexact-a(\d+(?:\.\d+)?)")


def literal() -> FlexConfig:
    """The paper's formulas as they stand: the KL acts on the sampled p, λ is τ, α never falls, nothing commits."""
    return FlexConfig.paper(
        noise=1.0, kl_on="p", lam="temperature", alpha=0.3, alpha_schedule="constant", commit_at=None
    )


def policy(model: str, options: Options) -> FlexConfig | None:
    """The config behind a Flex-Act model, one pick a replica; None for a fixed activation or a baseline."""
    alpha = _ALPHA.fullmatch(model)
    if model == DEFAULT:
        config = FlexConfig()
    elif alpha:
        config = dataclasses.replace(_chosen(options), alpha=float(alpha[1]))
    elif model in CORRECTIONS:
        config = dataclasses.replace(_chosen(options), **_ABLATED.get(model, {"correction": model}))
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


def check(models: Sequence[str], usual: Sequence[str]) -> None:
    """Refuse a name that stands for no model."""
    if not models:
        raise FlexActError(f"--models names nothing; known: {', '.join(usual)}.")
    for model in models:
        if model == DEFAULT or _ALPHA.fullmatch(model) or model in (*CORRECTIONS, *BASELINES, *known_names()):
            continue
        known = list(dict.fromkeys((DEFAULT, *usual, *BASELINES, *known_names())))
        raise FlexActError(
            f"unknown model {model!r};{suggestion(model, known)} Known: {', '.join(usual)}; any other candidate; and "
            "flexact-a followed by a number for the chosen policy at that α."
        )


def _chosen(options: Options) -> FlexConfig:
    if options.policy == "literal":
        return literal()
    return FlexConfig() if options.policy == "default" else FlexConfig.paper()
