"""The options of a synthetic study (its models, truths and seeds, and the task), and the models by name.

`flexact-default` is `FlexConfig()`. `flexact-a0.3` is the policy of `--policy` with α = 0.3. The name of a
correction stands for that policy with this correction. `kan` is a Kolmogorov-Arnold layer in place of the linear unit
and its activation. Any other name is a fixed candidate or a baseline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, get_args

import torch
from torch import nn

from flexact.baselines import BASELINES, KolmogorovArnoldLayer, make
from flexact.candidates.registry import ORIGINAL, known_names, lookup
from flexact.config import PAPER_CANDIDATES, Correction, FlexConfig, Policy
from flexact.errors import FlexActError
from flexact.io.value_checks import check_known, check_names, check_whole, number
from flexact.routing.layer import FlexAct
from flexact.studies.grid.study import Setting

DEFAULT = "flexact-default"
"""The model of `FlexConfig()`."""
KAN = "kan"
"""The model that is a Kolmogorov-Arnold layer."""
CORRECTIONS: tuple[str, ...] = get_args(Correction)


def alpha_of(model: str) -> float | None:
    """Return α of a model that is named after it; None for any other model.

    >>> alpha_of("flexact-a0.3"), alpha_of("relu")
    (0.3, None)
    """
    found = re.fullmatch(r"flexact-a(\d+(?:\.\d+)?)", model)
    return float(found[1]) if found else None


POLICIES = {
    "default": FlexConfig(),
    "paper": FlexConfig.paper(),
    # The KL acts on the sampled p, λ is τ, α is constant, nothing commits.
    "literal": FlexConfig.paper(policy=Policy.literal(), commit_at=None),
}

_POLICY = (
    "Policy of the flexact-a… models and of the corrections: paper (our interpretation of the paper), literal (its "
    "formulas taken literally) or default (FlexConfig())."
)
_HIDDEN = (
    "Width of a two-layer teacher and student; the student starts from its teacher's weights and must find the hidden "
    "activation. 0 for the paper's single unit."
)


class Cell(NamedTuple):
    """One replica: the true function to find, and the seed."""

    truth: str
    seed: int


@dataclass(frozen=True)
class Options:
    """Which models are trained, on which truths and seeds, and on which task.

    The task is y = scale·a(slope·x₁) + noise, with distractors as further inputs; or a two-layer teacher with
    activation a.

    >>> Options(truths=("relu", "tanh"), seeds=2, first_seed=7).cells
    [Cell(truth='relu', seed=7), Cell(truth='relu', seed=8), Cell(truth='tanh', seed=7), Cell(truth='tanh', seed=8)]
    """

    seeds: Annotated[int, Setting("Number of seeds.", "5; 3 in alpha")] = 5
    first_seed: Annotated[int, Setting("The first seed.")] = 0
    epochs: Annotated[int, Setting("Passes over the data.")] = 100
    policy: Annotated[str, Setting(_POLICY)] = "paper"
    truths: Annotated[
        tuple[str, ...], Setting("The functions to find.", "the paper's five; sigmoid in alpha and corrections")
    ] = PAPER_CANDIDATES
    candidates: Annotated[tuple[str, ...], Setting("The candidates.", "the paper's five")] = PAPER_CANDIDATES
    models: Annotated[tuple[str, ...], Setting("The models to train.", "all of the study")] = ()
    slope: Annotated[float, Setting("K in y = a(K·x₁).")] = 5.0
    label_noise: Annotated[float, Setting("Standard deviation of the noise on the labels.")] = 0.0
    distractors: Annotated[int, Setting("Number of uninformative inputs.")] = 3
    target_scale: Annotated[float, Setting("Factor by which the labels are multiplied.")] = 1.0
    hidden: Annotated[int, Setting(_HIDDEN)] = 0

    def __post_init__(self) -> None:
        check_whole("seeds", self.seeds, 1, 10_000)
        check_whole("first-seed", self.first_seed, 0, 2**40)
        check_whole("epochs", self.epochs, 1, 100_000)
        check_whole("distractors", self.distractors, 0, 10_000)
        check_whole("hidden", self.hidden, 0, 10_000)
        number("--label-noise", self.label_noise, at_least=0)
        for flag, value in (("--slope", self.slope), ("--target-scale", self.target_scale)):
            if number(flag, value) == 0:
                raise FlexActError(f"{flag} 0 leaves nothing to find; give a number other than 0.")
        check_known("policy", self.policy, POLICIES)
        known = [name for name in known_names() if name != ORIGINAL]
        check_names("truths", self.truths, known)
        check_names("candidates", self.candidates, known)
        if len(self.candidates) < 2:
            raise FlexActError(f"--candidates must name at least two candidates; got {', '.join(self.candidates)}.")

    @property
    def cells(self) -> list[Cell]:
        """The replicas of each model, truth by truth."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [Cell(truth, seed) for truth in self.truths for seed in seeds]

    def to_dict(self) -> dict[str, Any]:
        """Return the options in plain JSON types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Options:
        """Return the inverse of `to_dict`. Missing names keep their defaults."""
        fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**fields)


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
        config = replace(config, commit_at=None, eliminate="none")
    return replace(config, candidates=options.candidates, granularity="channel", channel_dim=1, seed=options.first_seed)


def activation_of(model: str, options: Options) -> nn.Module:
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
    return sum(parameter.numel() for parameter in activation_of(model, options).parameters()) // len(options.cells)


def check_models(options: Options) -> None:
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
