"""FlexConfig and Policy: all settings of a run, with those of its routing in a Policy."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flexact.candidates.registry import ORIGINAL, lookup
from flexact.errors import FlexActError
from flexact.io import value_checks
from flexact.io.json_input import parsed_json

VERSION = 2
_type_hints = functools.cache(get_type_hints)

SMALLEST_TEMPERATURE = 1e-6
"""Minimum temperature, at which the likeliest candidate already has practically all of the probability."""

PAPER_CANDIDATES = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")
DEFAULT_CANDIDATES = (ORIGINAL, "relu", "gelu", "silu", "elu", "tanh")

Correction = Literal["none", "grad_norm_kl", "clip_logit_gradient", "clipped_norm_kl", "output_norm"]
Eliminate = Literal["half", "one", "none"]


@dataclass(frozen=True)
class Policy:
    """How the routing samples from its logits, corrects their gradients and moves them.

    `Policy()` is the best policy known, `Policy.paper()` the paper's, and `Policy.literal()` the paper's formulas read
    literally.

    >>> import flexact
    >>> config = flexact.FlexConfig(policy=flexact.Policy(alpha=0.65))
    >>> config.policy.alpha
    0.65
    """

    forward: Literal["soft", "hard"] = "soft"
    """In training, "soft" blends the candidates; "hard" runs the likeliest one, with the gradient of the blend."""
    noise: float = 0.0
    """Scale of the Gumbel noise in training: 1 as in the paper, 0 for none. Eval mode has no noise."""
    temperature: float = 1.0
    """τ at the first step."""
    final_temperature: float = 1.0
    """τ at the commitment. Between the two, τ changes exponentially."""
    correction: Correction = "grad_norm_kl"
    """The correction of the routing gradient's bias; see `flexact.routing.corrections`."""
    alpha: float = 1.3
    """The weight of a KL correction."""
    alpha_kind: Literal["absolute", "relative"] = "relative"
    """"absolute" adds α·KL(p̃ ‖ q) to the loss. "relative" adds α·s/n·(q − p̃) to the logit gradient, where s is the
    running root-mean-square of the site's task gradient, and n the number of elements per sample at the site. p̃ is the
    target of the KL (see `lam`), and q the distribution that the KL acts on (see `kl_on`)."""
    alpha_schedule: Literal["constant", "falling"] = "constant"
    """Whether α is constant until the commitment, or falls linearly to 0 there."""
    lam: float | Literal["temperature"] = 0.3
    """λ of the KL's target p̃ = softmax(−ḡ/λ), where ḡ_k is the mean |σ_k′(h)|; "temperature" sets λ to τ."""
    kl_on: Literal["pi", "p"] = "pi"
    """Whether the KL acts on the noise-free π or on the sampled p."""
    clip: float = 1.0
    """The upper bound of "clip_logit_gradient" (on the norm of each row's logit gradient) and of "clipped_norm_kl" (on
    each ḡ_k)."""
    logit_step: Literal["schedule", "optimizer"] = "schedule"
    """Whether the Schedule moves the logits (see `flexact.policy.logit_updates`) or your optimizer does."""
    logit_step_size: float = 10.0
    """How far the Schedule moves a logit with a perfectly consistent gradient in one round. In the first round, which
    has no settling phase, it is 1/(1 − settle) times as far."""
    settle: float = 0.5
    """The initial fraction of each round after the first in which the Schedule does not move the logits, so that the
    weights can adapt to the last drop."""

    @classmethod
    def paper(cls, **changes: Any) -> Policy:
        """The paper's policy: Gumbel noise, annealed τ, and α = 0.3 on the KL of π as a term of the loss.

        >>> import flexact
        >>> flexact.Policy.paper(alpha=0.1).noise
        1.0
        """
        fields: dict[str, Any] = {"noise": 1.0, "final_temperature": 0.1, "alpha": 0.3, "alpha_kind": "absolute"}
        return cls(**(fields | {"logit_step": "optimizer"} | changes))

    @classmethod
    def literal(cls, **changes: Any) -> Policy:
        """The paper's formulas read literally: the KL acts on the sampled p, and λ is τ."""
        return cls.paper(**({"kl_on": "p", "lam": "temperature"} | changes))

    def __post_init__(self) -> None:
        _check_choices(self)
        bounds: dict[str, dict[str, float]] = {
            "temperature": {"at_least": SMALLEST_TEMPERATURE},
            "final_temperature": {"at_least": SMALLEST_TEMPERATURE},
            "noise": {"at_least": 0},
            "alpha": {"at_least": 0},
            "clip": {"above": 0},
            "logit_step_size": {"above": 0},
            "settle": {"at_least": 0, "below": 1},
        }
        if self.lam != "temperature":
            bounds["lam"] = {"above": 0}
        _check_numbers(self, bounds)

    @property
    def uses_kl(self) -> bool:
        """Whether the correction is a KL, which needs the sensitivities of all calls."""
        return self.correction in ("grad_norm_kl", "clipped_norm_kl") and self.alpha > 0

    @property
    def adds_to_loss(self) -> bool:
        """Whether the KL is a term of the loss; see `flexact.penalty`."""
        return self.uses_kl and self.alpha_kind == "absolute"

    @property
    def pulls_logits(self) -> bool:
        """Whether the KL acts on the logit gradients before a step, in units of the task gradient."""
        return self.uses_kl and self.alpha_kind == "relative"

    @property
    def acts_before_steps(self) -> bool:
        """Whether the policy changes logits or their gradients between the backward pass and the optimizer step."""
        return self.moves_logits or self.correction == "clip_logit_gradient" or self.pulls_logits

    @property
    def moves_logits(self) -> bool:
        """Whether the Schedule moves the logits, and not the optimizer."""
        return self.logit_step == "schedule"


@dataclass(frozen=True)
class FlexConfig:
    """The settings of a run. `FlexConfig()` is the best configuration known, `FlexConfig.paper()` the paper's.

    >>> import flexact
    >>> config = flexact.FlexConfig(candidates=("relu", "gelu", "silu"), seed=3)
    >>> flexact.FlexConfig.from_dict(config.to_dict()) == config
    True
    """

    candidates: tuple[str, ...] = DEFAULT_CANDIDATES
    """The functions that a site can pick. "original" is the function that the site replaced; a FlexAct that was not
    created by `convert` has none."""
    eval: Literal["blend", "pick"] = "blend"
    """What eval mode runs before the commitment: the blend with π, or the likeliest candidate ("pick")."""
    pick_by: Literal["auto", "blend", "trial"] = "auto"
    """"blend": sites blend their candidates, and drop the least likely ones. "trial": each candidate is trained
    alone from the same initial weights, and they are compared by their loss; this needs `share="model"` and
    `schedule.step(loss)`. "auto": a trial in a network without normalisation layers or with
    `held_out`, if the other settings and the length of the run allow one; otherwise a blend."""
    share: Literal["model", "site"] = "model"
    """"model": sites with the same candidates pick together, with their combined evidence. "site": each picks alone."""
    trial_steps: int = 420
    """The number of steps after which the last two candidates of a trial are compared; fewer in a short run."""
    eliminate: Literal[Eliminate, None] = None
    """What a blend drops at the end of a round: the weaker "half" of the candidates, the weakest "one", or "none" until
    the commitment. None: "half" if sites pick together, else "one"; without a commitment, "none"."""
    warmup: float = 0.0
    """The fraction of the run before elimination and annealing start. With init="original" and logits that the Schedule
    moves, every site runs only its original function until then."""
    round_steps: int | Literal["fill"] | None = None
    """Maximum steps per elimination round. The remaining steps of the run train the picks. None: 350 if sites pick
    together, otherwise 400. "fill": the rounds fill the time until `commit_at`."""
    commit_at: float | None = 0.7
    """The latest commitment, as a fraction of the run. After it, each site runs only its pick. None: never commit."""
    rewind: bool | None = None
    """Whether the commitment restores the initial weights and optimizer state, so that the rest of the run trains the
    picks from the start. A copy of the initial weights is kept in host memory until then. None: rewind if at least half
    of the run remains, and always if the Schedule is given network_steps."""
    granularity: Literal["layer", "channel"] = "layer"
    """One pick per site ("layer"), or one per channel of each site."""
    channel_dim: int = 1
    """The dimension of a site's input that holds the channels, for granularity="channel"."""
    init: Literal["uniform", "original"] = "uniform"
    """The initial probabilities: uniform, or almost all on the original function, which is added to the candidates."""
    init_probability: float = 0.999
    """The initial π of the original function, with init="original"."""
    seed: int = 0
    """Seed of the noise and of the candidates' own initialisations."""
    policy: Policy = field(default_factory=Policy)
    """How the routing samples from its logits, corrects their gradients and moves them."""

    def __new__(cls, *args: Any, **given: Any) -> FlexConfig:
        """Raise a FlexActError for fields of Policy, for which a dataclass would raise a TypeError."""
        for name in given.keys() & Policy.__dataclass_fields__.keys():
            raise FlexActError(f"{name} is a field of Policy; give policy=Policy({name}={given[name]!r:.80}).")
        return super().__new__(cls)

    @classmethod
    def paper(cls, **changes: Any) -> FlexConfig:
        """The paper's configuration: its five candidates and policy, a commitment halfway, no elimination.

        Where the paper is ambiguous, this is the reading whose results are closest to its tables;
        benchmarks/readings.py compares the readings, and results/paper_readings.csv has the results.

        >>> import flexact
        >>> flexact.FlexConfig.paper(seed=1).policy.noise
        1.0
        """
        fields: dict[str, Any] = {"candidates": PAPER_CANDIDATES, "pick_by": "blend", "share": "site"}
        fields |= {"eliminate": "none", "commit_at": 0.5, "rewind": False, "policy": Policy.paper()}
        return cls(**(fields | changes))

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", _checked_candidates(self.candidates))
        _check_choices(self)
        bounds: dict[str, dict[str, float]] = {
            "init_probability": {"above": 0, "below": 1},
            "warmup": {"at_least": 0, "below": 1},
        }
        if self.commit_at is not None:
            bounds["commit_at"] = {"above": 0, "at_most": 1}
        _check_numbers(self, bounds)
        steps = (1, value_checks.MAX_STEPS)
        ranges: dict[str, tuple[Any, ...]] = {"seed": (), "channel_dim": (), "trial_steps": steps}
        if self.round_steps not in (None, "fill"):
            ranges["round_steps"] = (*steps, ", 'fill' or None")
        for name, own in ranges.items():
            object.__setattr__(self, name, value_checks.integer(name, getattr(self, name), *own))
        if not isinstance(self.rewind, bool | None):
            raise FlexActError(f"rewind must be True, False or None; got {self.rewind!r:.80}.")
        if not isinstance(self.policy, Policy):
            raise FlexActError(f"policy must be a Policy, such as Policy(alpha=1.0); got {self.policy!r:.80}.")
        self._check_agreement()

    def _check_agreement(self) -> None:
        """Raise if settings contradict each other."""
        if self.commit_at is not None and self.warmup >= self.commit_at:
            raise FlexActError(f"warmup={self.warmup} must end before commit_at={self.commit_at}.")
        if self.commit_at is None and self.eliminate not in (None, "none"):
            raise FlexActError(f"eliminate={self.eliminate!r} needs a commitment. Give commit_at, or eliminate='none'.")
        if self.commit_at is None and self.rewind:
            raise FlexActError("rewind=True needs a commitment, but commit_at=None. Give commit_at, or rewind=False.")
        rewinds = self.rewind is not False and self.commit_at is not None
        if self.pick_by == "trial" and not (self.picks_together and rewinds and self.warmup == 0):
            raise FlexActError(
                "pick_by='trial' needs share='model', granularity='layer', a rewind, a commitment and no warm-up; got "
                f"share={self.share!r}, granularity={self.granularity!r}, rewind={self.rewind!r}, "
                f"commit_at={self.commit_at!r} and warmup={self.warmup!r}. Change these, or use pick_by='blend'."
            )

    def with_policy(self, **changes: Any) -> FlexConfig:
        """Return a copy of the config with these fields of its policy changed.

        >>> import flexact
        >>> flexact.FlexConfig.paper().with_policy(alpha=0.1).policy.alpha
        0.1
        """
        return dataclasses.replace(self, policy=dataclasses.replace(self.policy, **changes))

    @property
    def elimination(self) -> Eliminate:
        """As `eliminate`, with None resolved."""
        if self.eliminate is not None:
            return self.eliminate
        if self.commit_at is None:
            return "none"
        return "half" if self.picks_together else "one"

    @property
    def round_length(self) -> int | None:
        """Maximum steps per round; None if the rounds fill the time until `commit_at`. See `round_steps`."""
        if self.round_steps == "fill":
            return None
        return self.round_steps if self.round_steps is not None else 350 if self.picks_together else 400

    @property
    def picks_together(self) -> bool:
        """Whether sites with the same candidates make one pick."""
        return self.share == "model" and self.granularity == "layer"

    def to_dict(self) -> dict[str, Any]:
        """Return the config in plain JSON types, with the version of the format."""
        return {"flexact_config": VERSION, **dataclasses.asdict(self), "candidates": list(self.candidates)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FlexConfig:
        """Return the config that `to_dict` described; missing fields have their defaults."""
        if not isinstance(data, dict) or "flexact_config" not in data:
            raise FlexActError(
                "FlexConfig.from_dict needs a dictionary that FlexConfig.to_dict returned, with the key "
                f"'flexact_config'; got {data!r:.60}."
            )
        version = data["flexact_config"]
        if isinstance(version, bool) or version != VERSION:
            raise FlexActError(
                f"this config has version {version!r:.80}; this flexact only reads version {VERSION}. Create it again."
            )
        fields = {key: value for key, value in data.items() if key != "flexact_config"}
        _check_fields(cls, fields)
        if isinstance(policy := fields.get("policy"), dict):
            _check_fields(Policy, policy)
            fields["policy"] = Policy(**policy)
        return cls(**fields)

    def to_json(self) -> str:
        """Return `to_dict` as JSON text.

        >>> import flexact
        >>> flexact.FlexConfig.from_json(flexact.FlexConfig(seed=4).to_json()).seed
        4
        """
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> FlexConfig:
        """Return the config that `to_json` described."""
        try:
            data = parsed_json(text)
        except (TypeError, ValueError) as error:
            raise FlexActError(f"not the JSON text that FlexConfig.to_json writes: {error}.") from None
        return cls.from_dict(data)


def _check_fields(kind: Any, given: dict[str, Any]) -> None:
    """Raise if a dataclass does not have one of the given fields."""
    for name in given:
        value_checks.check_known(f"field of {kind.__name__}", name, sorted(kind.__dataclass_fields__))


def _check_choices(config: Any) -> None:
    """Raise if a field that is annotated as a Literal has another value."""
    for name, hint in _type_hints(config.__class__).items():
        if get_origin(hint) is Literal and (value := getattr(config, name)) not in get_args(hint):
            value_checks.check_known(name, value, [word for word in get_args(hint) if word is not None])


def _check_numbers(config: Any, bounds: dict[str, dict[str, float]]) -> None:
    for name, limits in bounds.items():
        object.__setattr__(config, name, value_checks.number(name, getattr(config, name), **limits))


def _checked_candidates(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise FlexActError(
            f"candidates must be a sequence of names such as ('relu', 'tanh'); got {names!r:.60}. Register a function "
            "of your own with flexact.register_candidate first."
        )
    found = tuple(name if name == ORIGINAL else lookup(name).name for name in names)  # aliases resolved
    if repeated := {name for name in found if found.count(name) > 1}:
        given = [name if name == own else f"{name} (= {own})" for name, own in zip(names, found, strict=True)]
        raise FlexActError(
            f"each candidate may be given once; got {', '.join(given)}. Repeated: {', '.join(sorted(repeated))}."
        )
    if len(found) < 2:
        raise FlexActError(
            f"a pick needs at least two candidates; got {len(found)}: {found}. Use a single activation directly."
        )
    return found
