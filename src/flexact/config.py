"""FlexConfig: every choice there is, in one frozen dataclass that saves as versioned JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from flexact.candidates import ORIGINAL, lookup
from flexact.errors import FlexActError, suggestion
from flexact.io.json_input import parsed_json

VERSION = 1

SMALLEST_TEMPERATURE = 1e-6
"""Below it nothing changes any more: the likeliest candidate has all of the probability."""

MOST_STEPS = 2**53
"""Of a run: up to here a float, in which fractions of it are taken, tells every step."""

PAPER_CANDIDATES = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")
DEFAULT_CANDIDATES = (ORIGINAL, "relu", "gelu", "silu", "elu", "tanh")

Forward = Literal["soft", "hard"]
Eval = Literal["blend", "pick"]
Anneal = Literal["exponential", "linear", "cosine", "constant"]
Correction = Literal["none", "grad_norm_kl", "clip_logit_gradient", "clipped_norm_kl", "output_norm"]
Advantage = Literal["raw", "normalized"]
AlphaKind = Literal["absolute", "relative"]
AlphaSchedule = Literal["constant", "falling"]
KlOn = Literal["pi", "p"]
DrawPer = Literal["step", "forward"]
NoiseAcrossRanks = Literal["shared", "per_rank"]
LogitStep = Literal["paced", "optimizer"]
Granularity = Literal["layer", "channel"]
Init = Literal["uniform", "original"]
Eliminate = Literal["half", "one", "none"]
Share = Literal["model", "site"]
PickBy = Literal["auto", "blend", "trial"]


@dataclass(frozen=True)
class FlexConfig:
    """Every choice of the method. `FlexConfig()` is the best policy we know, `FlexConfig.paper()` the paper's.

    >>> import flexact
    >>> config = flexact.FlexConfig(candidates=("relu", "gelu", "silu"), seed=3)
    >>> flexact.FlexConfig.from_dict(config.to_dict()) == config
    True
    """

    candidates: tuple[str, ...] = DEFAULT_CANDIDATES
    """What a site can pick; "original" stands for what it had before (for nothing, where a FlexAct is built alone)."""
    forward: Forward = "soft"
    """In training: "soft" blends the candidates, "hard" uses the likeliest and passes the soft gradient through."""
    eval: Eval = "blend"
    """In eval mode before the commitment: the blend of π, or the current argmax ("pick")."""
    noise: float = 0.0
    """Scale of the Gumbel noise in training; 1 is the paper's, 0 is none. Eval mode never has any."""
    draw_per: DrawPer = "step"
    """Under a Schedule: one draw of the noise an optimizer step, which its micro-batches share, or one each training
    forward. Without a Schedule a step is a forward."""
    noise_across_ranks: NoiseAcrossRanks = "shared"
    """With several ranks: one draw for all of them, as one process with the whole batch has it, or one each."""
    temperature: float = 1.0
    """τ at the first step."""
    final_temperature: float = 1.0
    """τ at the commitment."""
    anneal: Anneal = "exponential"
    """How τ goes from the first to the last."""
    correction: Correction = "grad_norm_kl"
    """What pulls the routing straight; see `flexact.routing.corrections`."""
    advantage: Advantage = "raw"
    """"normalized" divides each candidate's advantage by the root-mean-square of a_k − x."""
    alpha: float = 1.3
    """The weight of a KL correction."""
    alpha_kind: AlphaKind = "relative"
    """"absolute": α·KL is added to the loss. "relative": its gradient is in units of the site's own task gradient,
    and divided by the elements of a sample there."""
    alpha_schedule: AlphaSchedule = "constant"
    """Constant until the commitment, or falling linearly to 0 there."""
    lam: float | Literal["temperature"] = 0.3
    """λ of the target softmax(−ḡ/λ): a constant, or "temperature" to tie it to τ."""
    kl_on: KlOn = "pi"
    """Whether the KL acts on the noise-free π or on the sampled p."""
    clip: float = 1.0
    """The bound of "clip_logit_gradient" (norm of a site's logit gradient) and "clipped_norm_kl" (each ḡ)."""
    logit_step: LogitStep = "paced"
    """"paced": the Schedule moves the logits itself (`policy.running_gradient`); "optimizer": your optimizer does."""
    pace: float = 10.0
    """How far a logit can go in an elimination round once the weights have settled, when paced."""
    settle: float = 0.5
    """The fraction of each round but the first for which paced logits hold still: the weights first have to get used to
    the candidate that was dropped."""
    pick_by: PickBy = "auto"
    """"blend": sites blend their candidates, and drop those that the loss asks for least. "trial": candidates are
    trained alone, one after another from the same start, and compared by their loss; this needs `share="model"` and
    `schedule.step(loss)`. "auto": a trial in a network without normalisation layers, a blend in others."""
    share: Share = "model"
    """"model": sites with the same candidates pick together, by the evidence of all. "site": each for itself."""
    trial_steps: int = 420
    """For how many steps each of the last two candidates of a trial is trained."""
    eliminate: Eliminate | None = None
    """What a blend drops at the end of a round, until one candidate is left at the commitment: the weaker "half" of the
    candidates, the weakest "one", or "none" before the commitment. None: half where sites pick together, else one."""
    warmup: float = 0.0
    """The fraction of the run before elimination and annealing begin. With init="original" and paced logits every site
    runs its original function alone until then."""
    round_steps: int | Literal["fill"] | None = None
    """Maximum steps per elimination round. The remaining steps of the run train the picks. None: 350 where sites pick
    together, 400 where each picks for itself. "fill" lets the rounds fill the time until `commit_at`."""
    commit_at: float | None = 0.7
    """The fraction of the run after which each site runs its pick alone, at the latest; None never commits."""
    rewind: bool | None = None
    """At the commitment, put the weights back to where the run began and clear the optimizer's state, so that the rest
    of the run trains the picks as if they had been there from the start. It keeps a copy of the weights in host memory
    until then. None: where at least half of the run is left to train the picks."""
    granularity: Granularity = "layer"
    """One pick a site, or one a channel of it."""
    channel_dim: int = 1
    """Which dimension of a site's input holds the channels (for granularity="channel")."""
    init: Init = "uniform"
    """Where routing starts: undecided, or at what the site had before (added to the candidates if missing)."""
    init_probability: float = 0.999
    """π of the original function at the start, with init="original"."""
    seed: int = 0
    """Of the noise; the same seed repeats a run."""

    @classmethod
    def paper(cls, **changes: Any) -> FlexConfig:
        """The paper's rule: Gumbel noise, annealed τ, α = 0.3 on the KL of π, a commitment half-way and no elimination.

        What the paper leaves open is read as comes nearest its tables; benchmarks/readings.py tries the readings, and
        results/paper_readings.csv has what they give.

        >>> import flexact
        >>> flexact.FlexConfig.paper(seed=1).noise
        1.0
        """
        return dataclasses.replace(
            cls(
                candidates=PAPER_CANDIDATES,
                noise=1.0,
                temperature=1.0,
                final_temperature=0.1,
                anneal="exponential",
                alpha=0.3,
                alpha_kind="absolute",
                alpha_schedule="constant",
                lam=0.3,
                kl_on="pi",
                logit_step="optimizer",
                pick_by="blend",
                share="site",
                eliminate="none",
                commit_at=0.5,
                rewind=False,
            ),
            **changes,
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", _checked_candidates(self.candidates))
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed and not (name == "eliminate" and value is None):
                raise FlexActError(
                    f"{name}={value!r} is not a choice{suggestion(str(value), allowed)} "
                    f"Expected one of: {', '.join(allowed)}."
                )
        self._check_number("temperature", at_least=SMALLEST_TEMPERATURE)
        self._check_number("final_temperature", at_least=SMALLEST_TEMPERATURE)
        self._check_number("noise", at_least=0)
        self._check_number("alpha", at_least=0)
        self._check_number("pace", above=0)
        self._check_number("settle", at_least=0, below=1)
        self._check_number("clip", above=0)
        if self.lam != "temperature":
            self._check_number("lam", above=0)
        self._check_number("init_probability", above=0, below=1)
        self._check_number("warmup", at_least=0, below=1)
        if self.commit_at is not None:
            self._check_number("commit_at", above=0, at_most=1)
            if self.warmup >= self.commit_at:
                raise FlexActError(
                    f"warmup={self.warmup} must end before commit_at={self.commit_at}; both are fractions of the run."
                )
        elif self.eliminate not in (None, "none"):
            raise FlexActError(
                f"eliminate={self.eliminate!r} ends in a commitment, and commit_at is None. Give commit_at, or set "
                "eliminate='none'."
            )
        if not isinstance(self.rewind, bool | None):
            raise FlexActError(f"rewind must be True, False or None; got {self.rewind!r}.")
        if self.rewind and self.commit_at is None:
            raise FlexActError(
                "rewind=True happens at the commitment, and commit_at=None never commits. Give commit_at, or set "
                "rewind=False."
            )
        if self.round_steps not in (None, "fill"):
            self._check_steps("round_steps", ", 'fill' or None")
        self._check_steps("trial_steps")
        alone = self.share == "site" or self.granularity == "channel"
        if self.pick_by == "trial" and (alone or self.rewind is False or self.commit_at is None):
            raise FlexActError(
                f"pick_by='trial' trains the whole network with one candidate after another and commits to the best, "
                f"and this config has share={self.share!r}, granularity={self.granularity!r}, rewind={self.rewind!r}, "
                f"commit_at={self.commit_at!r}. Use share='model', granularity='layer', leave rewind out and give "
                "commit_at, or use pick_by='blend'."
            )
        for name in ("seed", "channel_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise FlexActError(f"{name} must be an integer; got {value!r}.")
            object.__setattr__(self, name, int(value))

    @property
    def elimination(self) -> Eliminate:
        """What a blend drops at the end of a round; see `eliminate`."""
        if self.eliminate is not None:
            return self.eliminate
        if self.commit_at is None:
            return "none"
        return "half" if self._picks_together else "one"

    @property
    def round_length(self) -> int | None:
        """The most steps of a round; None where rounds fill the time until `commit_at`. See `round_steps`."""
        if self.round_steps == "fill":
            return None
        return self.round_steps if self.round_steps is not None else 350 if self._picks_together else 400

    @property
    def _picks_together(self) -> bool:
        return self.share == "model" and self.granularity == "layer"

    def _check_steps(self, name: str, otherwise: str = "") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= MOST_STEPS:
            raise FlexActError(f"{name} must be a number of steps, at least 1{otherwise}; got {value!r:.80}.")

    def _check_number(
        self,
        name: str,
        above: float = -math.inf,
        at_least: float = -math.inf,
        below: float = math.inf,
        at_most: float = math.inf,
    ) -> None:
        value = getattr(self, name)
        real = isinstance(value, Real) and not isinstance(value, bool)
        if real and not isinstance(value, int):  # of numpy, say
            value = _as_float(value)
            object.__setattr__(self, name, value)
        number = real and abs(value) <= sys.float_info.max
        if not (number and above < value < below and at_least <= value <= at_most):
            low = f"above {above:g}" if above > -math.inf else f"at least {at_least:g}"
            high = (
                f" and below {below:g}"
                if below < math.inf
                else f" and at most {at_most:g}"
                if at_most < math.inf
                else ""
            )
            raise FlexActError(f"{name} must be a finite number {low}{high}; got {value!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the format's version."""
        fields = dataclasses.asdict(self)
        fields["candidates"] = list(self.candidates)
        return {"flexact_config": VERSION, **fields}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FlexConfig:
        """The inverse of `to_dict`; fields it does not name keep their defaults."""
        if not isinstance(data, dict) or "flexact_config" not in data:
            raise FlexActError(
                f"not a FlexConfig: expected a dictionary with the key 'flexact_config'; got {_shown(data)}."
            )
        version = data["flexact_config"]
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise FlexActError(f"'flexact_config' must be a version number from 1 to {VERSION}; got {version!r}.")
        if version > VERSION:
            raise FlexActError(
                f"this config has version {version}, and this flexact reads up to {VERSION}; update flexact to read it."
            )
        known = [field.name for field in dataclasses.fields(cls)]
        fields = {key: value for key, value in data.items() if key != "flexact_config"}
        for key in fields:
            if key not in known:
                raise FlexActError(
                    f"unknown config field {key!r}{suggestion(str(key), known)} Known: {', '.join(known)}."
                )
        return cls(**fields)

    def to_json(self) -> str:
        """`to_dict` as text.

        >>> import flexact
        >>> flexact.FlexConfig.from_json(flexact.FlexConfig(seed=4).to_json()).seed
        4
        """
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> FlexConfig:
        """The inverse of `to_json`."""
        try:
            data = parsed_json(text)
        except json.JSONDecodeError as error:
            raise FlexActError(
                f"not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}); "
                "the file may be cut off or hand-edited: write it again with FlexConfig.to_json."
            ) from None
        except (TypeError, ValueError) as error:
            raise FlexActError(f"not the text of a config: {error}.") from None
        return cls.from_dict(data)


_CHOICES: dict[str, tuple[str, ...]] = {
    "forward": get_args(Forward),
    "eval": get_args(Eval),
    "anneal": get_args(Anneal),
    "correction": get_args(Correction),
    "advantage": get_args(Advantage),
    "alpha_kind": get_args(AlphaKind),
    "alpha_schedule": get_args(AlphaSchedule),
    "kl_on": get_args(KlOn),
    "draw_per": get_args(DrawPer),
    "noise_across_ranks": get_args(NoiseAcrossRanks),
    "logit_step": get_args(LogitStep),
    "granularity": get_args(Granularity),
    "init": get_args(Init),
    "eliminate": get_args(Eliminate),
    "share": get_args(Share),
    "pick_by": get_args(PickBy),
}


def _checked_candidates(names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, (list, tuple)):
        raise FlexActError(f"candidates must be a sequence of names such as ('relu', 'tanh'); got {_shown(names)}.")
    for name in names:
        if not isinstance(name, str):
            raise FlexActError(
                f"a candidate is given by its name; got {_shown(name)}. Register a function with "
                "flexact.register_candidate and name it here."
            )
        if name != ORIGINAL:
            lookup(name)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise FlexActError(f"each candidate may be named once; repeated: {', '.join(repeated)}.")
    if len(names) < 2:
        raise FlexActError(
            f"a pick needs at least two candidates; got {len(names)}: {list(names)}. With one there is nothing to "
            "choose: use that activation itself."
        )
    return tuple(names)


def _as_float(value: Any) -> float:
    """A real number of another type; infinity, which no choice is, where it is too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
