"""FlexAct: the module that picks its activation function while it trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexact.activations import key_of
from flexact.candidates import ORIGINAL, lookup
from flexact.config import DEFAULT_CANDIDATES, FlexConfig
from flexact.errors import FlexActError
from flexact.ops import routed_activation
from flexact.ops.differentiable import is_wrapped, transforming
from flexact.routing.channel_picks import ChannelPicks
from flexact.routing.corrections import normalised_blend, statistics_needed
from flexact.routing.router import Router, log_pi, recomputing, version_of
from flexact.routing.saved_state import check_state, signature
from flexact.routing.sharding import whole

ALIVE = -1
"""What `dropped_at` holds for a candidate that is still in."""


class Routing(NamedTuple):
    """What one forward of a site blends with."""

    weights: Tensor
    """(rows, K): p, or one-hot when hard."""
    probabilities: Tensor
    temperature: Tensor
    hard: bool
    statistics: int
    """Flags: what the policy needs."""


class FlexAct(nn.Module):
    """An activation that blends K candidates by trainable probabilities, and ends as one of them.

    candidates: names; by default the config's.
    config: every other choice; `FlexConfig()` when left out.
    original: what stood here before conversion; an elementwise module without tensors.
    channels: the number of channels, for granularity="channel".
    inplace: accepted, as activations are, and ignored: the input is never overwritten while the site is undecided.

    On its own a site draws its noise from the config's seed at each forward; two with one seed draw the same. Sites of
    a converted model, or of one under a Schedule, draw together and differ.

    State: `logits` (rows·K,), one row for the layer or one a channel; `dropped_at` (rows, K), the step at which a
    candidate was dropped, −1 while it is in; `evidence` (rows, K, 3), by how much it was behind then, the standard
    error of that, and over how many steps; `temperature`, τ; `signature` (K,), which candidates these are.

    >>> import torch, flexact
    >>> act = flexact.FlexAct(candidates=("relu", "tanh"))
    >>> act(torch.tensor([-1.0, 2.0]))
    tensor([-0.3808,  1.4820], grad_fn=...)
    >>> flexact.commit(act).picks
    ('relu',)
    """

    dropped_at: Tensor
    evidence: Tensor
    temperature: Tensor
    signature: Tensor
    original: nn.Module | None
    picked: nn.Module | None

    def __init__(
        self,
        candidates: Sequence[str] | None = None,
        config: FlexConfig | None = None,
        *,
        original: nn.Module | None = None,
        channels: int | None = None,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        config = FlexConfig() if config is None else config
        if not isinstance(config, FlexConfig):
            raise FlexActError(f"config must be a FlexConfig; got {type(config).__name__}. Try FlexConfig.from_dict.")
        if original is not None and not isinstance(original, nn.Module):
            raise FlexActError(f"original must be a torch.nn.Module; got {original!r:.80}.")
        if original is not None and original.state_dict():
            raise FlexActError(f"{type(original).__name__} has tensors of its own, so it cannot be a candidate.")
        if candidates is not None:
            config = dataclasses.replace(config, candidates=candidates)  # type: ignore[arg-type]  # checked there
        self.config = config
        self.name = ""
        self.group: Any = None  # sites with the same one pick together
        # How conversion put the site here, which extraction undoes.
        self.function: Callable[..., Tensor] | None = None
        self.added = self.rewritten = False
        self._set_aside("original", original)
        self.keys = _keys(self.config, original)
        self.candidates = tuple(lookup(key).name for key in self.keys)
        self.k = len(self.keys)
        self._start = self.keys.index(key_of(original)) if original is not None and config.init == "original" else -1
        self.rows = _rows(self.config, channels)
        self.logits = nn.Parameter(self._initial_logits())
        self.register_buffer("dropped_at", torch.full((self.rows, self.k), ALIVE))
        self.register_buffer("evidence", torch.full((self.rows, self.k, 3), math.nan))
        self.register_buffer("temperature", torch.tensor(self.config.temperature))
        self.register_buffer("signature", torch.tensor([signature(key) for key in self.keys]))
        self.place = self.first_row = 0
        self.width = 1
        self.router = Router([self], self.config, standalone=True)
        self.update_alive()
        self.register_load_state_dict_pre_hook(_check_before_loading)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_update_after_loading)  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        h = input  # which activations call it, too
        self.notice_writes()
        # With the buffers of several models at once, as vmap has them, each has its own candidates.
        many = transforming() and is_wrapped(self.dropped_at)
        if self.picked is not None and not many:
            picked: Tensor = self.picked(h)
            return picked
        self.check_input(h)
        if (alone := self.alone) is not None:
            return lookup(self.keys[alone]).function(h)
        routing = self.routing(h)
        if self.config.correction == "output_norm" and (self.training or not routing.hard):  # a pick runs as it will be
            noise = self._own(self.router.noise) if self.training else torch.zeros_like(routing.probabilities)
            return normalised_blend(
                h,
                self.logits,
                self.dropped_at < 0,
                noise,
                routing.temperature,
                self.keys,
                routing.hard,
                self.config.channel_dim,
            )
        x, gathered = routed_activation(
            h,
            self.logits,
            routing.weights,
            routing.probabilities,
            routing.temperature,
            self.keys,
            tuple(range(self.k)) if many else self.alive,
            self.config.channel_dim,
            routing.statistics,
        )
        self.gather(routing, gathered)
        return x

    def routing(self, h: Tensor) -> Routing:
        """What this forward blends with; h is the input, or anything of its shape."""
        router = self.router
        if router.standalone or not router.current:
            router.refresh(self.training)
        if self.training:
            width = max(h.numel() // (max(h.shape[0], 1) * self.rows), 1) if h.dim() else 1
            # A module's attributes are quick to read and slow to set; a compiler would then take the sizes as constant.
            if torch.compiler.is_compiling() or self.width != width:
                self.width = width
            hard, p = self.config.forward == "hard", self._own(router.p)
            temperature, statistics = self.temperature, statistics_needed(self.config)
        else:
            hard, p = self.config.eval == "pick", self._own(router.pi)
            temperature, statistics = torch.ones_like(self.temperature), 0
        if self.committed:
            hard, statistics = False, 0
        if transforming():  # a tensor of torch.func's must not outlive its transform
            statistics = 0
        return Routing(_one_hot(p) if hard else p, p, temperature, hard, statistics)

    def gather(self, routing: Routing, statistics: Tensor) -> None:
        """Keep the statistics of a call for the policy, where it asked for them; not again when it is recomputed."""
        if routing.statistics and (torch.compiler.is_compiling() or not recomputing()):
            self.router.gathered.add(self.first_row, statistics)

    def _own(self, table: Tensor) -> Tensor:
        """This site's part of one of the router's tables."""
        own = table[self.first_row : self.first_row + self.rows]
        return own if self.k == table.shape[1] else own[:, : self.k]

    @property
    def committed(self) -> bool:
        """Whether one candidate is left and the site runs it directly."""
        return self.picked is not None

    @property
    def alone(self) -> int | None:
        """The candidate that the site runs alone for the time being: that of a trial, or what it had before in a
        warm-up, unless that was dropped."""
        if self.router.trying is not None:
            return self.router.trying
        return self._start if self.router.waiting and self._start in self.alive else None

    @property
    def kept_original(self) -> bool:
        """Whether the site is committed to what stood here before."""
        return self.picked is not None and self.picked is self.original

    @property
    def policy(self) -> FlexConfig:
        """The config without the candidates: what all sites of a model must agree on."""
        return dataclasses.replace(self.config, candidates=DEFAULT_CANDIDATES)

    @property
    def picks(self) -> tuple[str, ...]:
        """The likeliest candidate of each row: one name for the layer, or one a channel."""
        return tuple(self.candidates[k] for k in self._likeliest().tolist())

    def pi(self) -> Tensor:
        """The noise-free probabilities over what is still in, (rows, K)."""
        with torch.no_grad():
            return log_pi(whole(self.logits).view(self.rows, self.k), self.dropped_at < 0).exp()

    @torch.no_grad()
    def restore_original(self, step: int) -> None:
        """Commit to what stood here before, also where it was dropped, with the logits that the site began with."""
        self.logits.copy_(self._initial_logits().to(self.logits.device))
        self.dropped_at[:, self.original_index] = ALIVE
        self.evidence[:, self.original_index] = math.nan
        self.keep(torch.full((self.rows,), self.original_index, device=self.dropped_at.device), step)

    def at_start(self) -> bool:
        """Whether the logits are still what they were when the site was made."""
        logits = whole(self.logits.detach())
        return torch.equal(logits, self._initial_logits().to(logits))

    def has_finite_logits(self) -> bool:
        """Whether the logits of what is still in are numbers, which those of a diverged run are not."""
        logits = whole(self.logits.detach()).view(self.rows, self.k)
        return bool(logits.masked_fill(self.dropped_at >= 0, 0.0).isfinite().all())

    def _likeliest(self) -> Tensor:
        """By row, of what is still in: also where a diverged run has left no numbers to compare."""
        return self.pi().nan_to_num(nan=0.0).masked_fill(self.dropped_at >= 0, -1.0).argmax(-1)

    def drop(self, goes: Tensor, step: int, evidence: Tensor | None = None) -> None:
        """Take candidates out for good. Each row keeps at least one, and the last is its pick.

        goes: (rows, K). evidence: (rows, K, 3), what is kept of those that go.
        """
        alive = self.dropped_at < 0
        goes = goes.to(alive.device) & alive
        if not bool((alive & ~goes).any(-1).all()):
            raise FlexActError(f"{self.name or 'FlexAct'} must keep at least one candidate of {self.candidates}.")
        if evidence is not None:
            self.evidence.copy_(torch.where(goes.unsqueeze(-1), evidence.to(self.evidence), self.evidence))
        self.dropped_at.masked_fill_(goes, step)
        self.update_alive()

    def drop_weakest(self, step: int, evidence: Tensor | None = None, protected: Tensor | None = None) -> None:
        """Take out each row's least likely candidate, where more than one is left.

        protected: (rows,), where the original is not to be dropped.
        """
        alive = self.dropped_at < 0
        out = ~alive
        if protected is not None and self.original_index >= 0:
            out = out.clone()
            out[:, self.original_index] |= protected.to(out.device)
        weakest = self.pi().nan_to_num(nan=0.0).masked_fill(out, torch.inf).argmin(-1)
        goes = nn.functional.one_hot(weakest, self.k).bool() & (alive.sum(-1, keepdim=True) > 1)
        self.drop(goes, step, evidence)

    def commit(self, step: int = 0, candidate: int | None = None) -> None:
        """Keep each row's likeliest candidate alone, or this one."""
        likeliest = self._likeliest()
        self.keep(likeliest if candidate is None else torch.full_like(likeliest, candidate), step)

    def keep(self, candidates: Tensor, step: int, evidence: Tensor | None = None) -> None:
        """Drop everything but one candidate per row, given by its index: (rows,). evidence: as for `drop`."""
        self.drop(~nn.functional.one_hot(candidates, self.k).bool(), step, evidence)

    @property
    def original_index(self) -> int:
        """The candidate that stood here before; −1 if it is none of them."""
        key = None if self.original is None else key_of(self.original)
        return self.keys.index(key) if key in self.keys else -1

    def update_alive(self) -> None:
        """Bring what is derived from `dropped_at` up to date with it."""
        self._alive_version = version_of(self.dropped_at)
        self.router.alive_changed()
        if self.dropped_at.is_meta:
            alive = torch.ones(self.rows, self.k, dtype=torch.bool, device="cpu")
        else:
            alive = (self.dropped_at < 0).cpu()
        self.alive = tuple(torch.nonzero(alive.any(0)).flatten().tolist())
        committed = bool((alive.sum(-1) == 1).all())
        self._set_aside("picked", self._plain(alive.long().argmax(-1).tolist()) if committed else None)

    def notice_writes(self) -> None:
        """Bring site and router up to date with what was written to the site's buffers or logits since they were read.
        Each call asks: it need not be one of the model's own forward, at whose start the router looks at all sites."""
        if not torch.compiler.is_compiling():
            self.notice_copied_buffers()
            if self.picked is None and self.router.current:
                self.router.notice(self)

    def notice_copied_buffers(self) -> None:
        """Bring the site up to date where something wrote into its buffers, as an average of weights does."""
        dropped_at = self._buffers["dropped_at"]
        assert dropped_at is not None
        if self._alive_version == version_of(dropped_at) or dropped_at.is_meta or is_wrapped(dropped_at):
            return
        self.check_buffers()
        self.update_alive()

    def check_buffers(self) -> None:
        """Refuse buffers that were averaged like weights: they hold choices, and half a choice is none."""
        if self.dropped_at.is_meta:
            return
        sound = self.signature.tolist() == [signature(key) for key in self.keys]
        if not sound or not bool((self.dropped_at < 0).any(-1).all()):
            raise FlexActError(
                f"the buffers of {self.name or 'FlexAct'} were overwritten with numbers that no FlexAct wrote. An "
                "average of models must copy buffers, not average them: use AveragedModel(model, use_buffers=False), "
                "or load the state of the model itself."
            )

    def _plain(self, picks: list[int]) -> nn.Module:
        """The ordinary module that does what this site does with these picks, one a row."""
        channels: dict[int, list[int]] = {}
        for channel, pick in enumerate(picks):
            channels.setdefault(pick, []).append(channel)
        if len(channels) == 1:
            return self._module(picks[0])
        functions = [self._module(k) for k in channels]
        return ChannelPicks(functions, list(channels.values()), self.config.channel_dim).to(self.logits.device)

    def _module(self, k: int) -> nn.Module:
        if self.original is not None and self.keys[k] == key_of(self.original):
            return self.original
        return lookup(self.keys[k]).module()

    def _set_aside(self, name: str, module: nn.Module | None) -> None:
        """Keep a module without making it part of the model's tree."""
        object.__setattr__(self, name, module)

    def _initial_logits(self) -> Tensor:
        logits = torch.zeros(self.rows, self.k)
        if self._start >= 0:
            start = self.config.init_probability
            logits[:, self._start] = math.log(start * (self.k - 1) / (1 - start))
        return logits.flatten()

    def check_input(self, h: Tensor) -> None:
        """Refuse what the site cannot take."""
        if not isinstance(h, Tensor) or not h.is_floating_point():
            got = f"a tensor of {h.dtype}" if isinstance(h, Tensor) else f"a {type(h).__name__}"
            raise FlexActError(
                f"{self.name or 'FlexAct'} got {got}; activations need a real floating-point one "
                "(float64, float32, bfloat16 or float16). Convert it first, for example with h.float()."
            )
        if h.device != self.logits.device:
            raise FlexActError(
                f"{self.name or 'FlexAct'} is on {self.logits.device} and got a tensor on {h.device}; move the model "
                "or the tensor, for example with model.to(h.device)."
            )
        if self.config.granularity == "channel":
            dim = self.config.channel_dim
            if not -h.dim() <= dim < h.dim() or h.shape[dim] != self.rows:
                raise FlexActError(
                    f"{self.name or 'FlexAct'} picks for {self.rows} channels in dimension {dim}, but its input has "
                    f"shape {tuple(h.shape)}. Set FlexConfig(channel_dim=...) to the dimension of the channels, or "
                    "convert with per_call=True if this activation is used with several numbers of channels."
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FlexAct:
        """Move with the model, but stay in float32 when it goes to half or double precision."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        if self.picked is not None:
            self.picked._apply(fn)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.original is not None:
            key_of(self.original)  # a new process has not met this function yet

    def extra_repr(self) -> str:
        rows = f", channels={self.rows}" if self.config.granularity == "channel" else ""
        picked = f", picked={self.picks[0] if len(set(self.picks)) == 1 else 'by channel'}" if self.committed else ""
        return f"candidates={self.candidates}{rows}{picked}"


def _keys(config: FlexConfig, original: nn.Module | None) -> tuple[str, ...]:
    """The registry keys of a site's candidates, with what it had before in the place of "original"."""
    wanted = list(config.candidates)
    if config.init == "original" and ORIGINAL not in wanted:
        wanted.append(ORIGINAL)
    if original is None and config.init == "original":
        raise FlexActError(
            "this FlexAct stands in the place of nothing, so routing cannot start at its 'original' function; use "
            "init='uniform', or let flexact.convert build it."
        )
    named = [name for name in wanted if name != ORIGINAL]
    own = None if original is None else key_of(original)
    if ORIGINAL in wanted and own is not None and own not in named:
        named.insert(wanted.index(ORIGINAL), own)
    keys = list(dict.fromkeys(named))
    if len(keys) < 2:
        raise FlexActError(
            f"a pick needs at least two candidates; with the original function counted once there is {keys[0]!r} alone."
        )
    return tuple(keys)


def _rows(config: FlexConfig, channels: int | None) -> int:
    if config.granularity == "layer":
        return 1
    if not isinstance(channels, int) or channels < 1:
        raise FlexActError(
            f"granularity='channel' needs the number of channels; got channels={channels!r}. Give FlexAct "
            "channels=..., or convert with example_inputs=... so that they are seen."
        )
    return channels


def _one_hot(p: Tensor) -> Tensor:
    return nn.functional.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype)


def _check_before_loading(site: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(site, FlexAct)
    check_state(site, state_dict, prefix)


def _update_after_loading(site: nn.Module, _: Any) -> None:
    assert isinstance(site, FlexAct)
    site.update_alive()
