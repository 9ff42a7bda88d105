"""FlexAct: the module that picks its activation function while it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexact.activations import key_of
from flexact.candidates import lookup
from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.ops import routed_activation
from flexact.ops.differentiable import is_wrapped, transforming
from flexact.routing.channel_picks import ChannelPicks
from flexact.routing.corrections import normalised_blend
from flexact.routing.gumbel import log_pi
from flexact.routing.router import Router, View, version_of
from flexact.routing.saved_state import check_state, signature
from flexact.routing.sharding import whole
from flexact.routing.site_arguments import check_original, config_of, keys_of, rows_of

ALIVE = -1
"""What `dropped_at` holds for a candidate that is still in."""


class Routing(NamedTuple):
    """What one forward of a site blends with."""

    weights: Tensor
    """(rows, K): p, or one-hot when hard."""
    probabilities: Tensor
    temperature: Tensor
    hard: bool
    statistics: bool
    """Whether the policy needs the sensitivities of this call."""


class FlexAct(nn.Module):
    """An activation that blends K candidates by trainable probabilities, and ends as one of them.

    candidates: names; by default the config's.
    config: every other choice; `FlexConfig()` when left out.
    original: what stood here before conversion; an elementwise module without tensors.
    channels: the number of channels, for granularity="channel".
    inplace: accepted, as activations are, and ignored: the input is never overwritten while the site is undecided.

    On its own a site draws its noise from the config's seed at each forward; two with one seed draw the same. Sites of
    a converted model, or of one under a Schedule, draw together and differ.

    State: `logits` (rows·K,), with one row for the layer or one per channel; `dropped_at` (rows, K), the step at which
    a candidate was dropped, −1 while it is in; `evidence` (rows, K, 3), its margin behind the leader when it was
    dropped, the margin's standard error, and the number of steps; `temperature`, τ; `signature` (K,), which candidates
    these are.

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
    view: View

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
        check_original(original)
        self.config = config = config_of(candidates, config)
        self.name = ""
        self.group: Any = None  # sites with the same one pick together
        # How conversion put the site here, which extraction undoes.
        self.function: Callable[..., Tensor] | None = None
        self.added = self.rewritten = False
        self._set_aside("original", original)
        self.keys = keys_of(config, original)
        self.candidates = tuple(lookup(key).name for key in self.keys)
        self.k = len(self.keys)
        self._start = self.original_index if config.init == "original" else -1
        self.rows = rows_of(config, channels)
        self.logits = nn.Parameter(self._initial_logits())
        self.register_buffer("dropped_at", torch.full((self.rows, self.k), ALIVE))
        self.register_buffer("evidence", torch.full((self.rows, self.k, 3), math.nan))
        self.register_buffer("temperature", torch.tensor(config.policy.temperature))
        self.register_buffer("signature", torch.tensor([signature(key) for key in self.keys]))
        self.width = 1
        Router([self], config, standalone=True)  # which the site's view of it keeps
        self.update_alive()
        self.register_load_state_dict_pre_hook(_check_before_loading)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_update_after_loading)  # type: ignore[no-untyped-call]

    @property
    def router(self) -> Router[FlexAct]:
        """The router that draws for this site, alone or with the others of its model."""
        return self.view.router

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
        weights, p, temperature, hard, statistics = routing
        channel_dim = self.config.channel_dim
        if self.config.policy.correction == "output_norm" and (self.training or not hard):  # a pick runs as it will be
            noise = self.view.noise() if self.training else torch.zeros_like(p)
            alive = self.dropped_at < 0
            return normalised_blend(h, self.logits, alive, noise, temperature, self.keys, hard, channel_dim)
        alive_anywhere = tuple(range(self.k)) if many else self.alive
        x, sensitivity = routed_activation(
            h, self.logits, weights, p, temperature, self.keys, alive_anywhere, channel_dim, statistics
        )
        self.gather(routing, sensitivity)
        return x

    def routing(self, h: Tensor) -> Routing:
        """What this forward blends with; h is the input, or anything of its shape."""
        p = self.view.probabilities(self.training)
        if self.training:
            width = max(h.numel() // (max(h.shape[0], 1) * self.rows), 1) if h.dim() else 1
            # A module's attributes are fast to read and slow to set; a compiler would then take the sizes as constant.
            if torch.compiler.is_compiling() or self.width != width:
                self.width = width
            policy = self.config.policy
            hard, temperature, statistics = policy.forward == "hard", self.temperature, policy.uses_kl
        else:
            hard, temperature, statistics = self.config.eval == "pick", torch.ones_like(self.temperature), False
        if self.committed:
            hard, statistics = False, False
        if transforming():  # a tensor of torch.func's must not outlive its transform
            statistics = False
        weights = nn.functional.one_hot(p.argmax(-1), self.k).to(p.dtype) if hard else p
        return Routing(weights, p, temperature, hard, statistics)

    def gather(self, routing: Routing, sensitivity: Tensor) -> None:
        """Keep the sensitivities of a call for the policy, where it needs them."""
        if routing.statistics:
            self.view.add(sensitivity)

    @property
    def committed(self) -> bool:
        """Whether one candidate is left and the site runs it directly."""
        return self.picked is not None

    @property
    def alone(self) -> int | None:
        """The candidate that the site runs alone for now: that of a trial, or during a warm-up its original, unless
        that was dropped."""
        if self.view.trying is not None:
            return self.view.trying
        # `alive` is read last: a compiled draw must not depend on it, or every drop would recompile it.
        return self._start if self.view.waiting and self._start in self.alive else None

    @property
    def kept_original(self) -> bool:
        """Whether the site is committed to what stood here before."""
        return self.picked is not None and self.picked is self.original

    @property
    def picks(self) -> tuple[str, ...]:
        """The likeliest candidate of each row: one name for the layer, or one per channel."""
        return tuple(self.candidates[k] for k in self.likeliest().tolist())

    def pi(self) -> Tensor:
        """The noise-free probabilities over what is still in, (rows, K)."""
        with torch.no_grad():
            return log_pi(whole(self.logits).view(self.rows, self.k), self.dropped_at < 0).exp()

    @torch.no_grad()
    def restore_original(self, step: int) -> None:
        """Commit to what stood here before, even if it was dropped, with the initial logits."""
        self.logits.copy_(self._initial_logits().to(self.logits.device))
        self.dropped_at[:, self.original_index] = ALIVE
        self.evidence[:, self.original_index] = math.nan
        self.commit(step, self.original_index)

    def at_start(self) -> bool:
        """Whether the logits have their initial values."""
        logits = whole(self.logits.detach())
        return torch.equal(logits, self._initial_logits().to(logits))

    def has_finite_logits(self) -> bool:
        """Whether the logits of what is still in are finite, which those of a diverged run are not."""
        logits = whole(self.logits.detach()).view(self.rows, self.k)
        return bool(logits.masked_fill(self.dropped_at >= 0, 0.0).isfinite().all())

    def likeliest(self) -> Tensor:
        """The index of each row's likeliest candidate still in, (rows,), also where a diverged run left NaN."""
        return self.pi().nan_to_num(nan=0.0).masked_fill(self.dropped_at >= 0, -1.0).argmax(-1)

    def drop(self, goes: Tensor, step: int, evidence: Tensor | None = None) -> None:
        """Take candidates out for good. Each row keeps at least one, and the last is its pick.

        goes: (rows, K). evidence: (rows, K, 3), of which the part of those that go is kept.
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

        protected: (rows,), where the original must not be dropped.
        """
        alive = self.dropped_at < 0
        out = ~alive
        if protected is not None and self.original_index >= 0:
            out[:, self.original_index] |= protected.to(out.device)
        weakest = self.pi().nan_to_num(nan=0.0).masked_fill(out, torch.inf).argmin(-1)
        goes = nn.functional.one_hot(weakest, self.k).bool() & (alive.sum(-1, keepdim=True) > 1)
        self.drop(goes, step, evidence)

    def commit(self, step: int = 0, candidate: int | None = None) -> None:
        """Keep each row's likeliest candidate alone, or this one."""
        likeliest = self.likeliest()
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
        """Update what is derived from `dropped_at`."""
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
        """Update site and router where something wrote to the site's buffers or logits. Every call does this: it need
        not be part of the model's own forward, at whose start the router looks at all sites."""
        if not torch.compiler.is_compiling():
            self.notice_copied_buffers()
            if self.picked is None:
                self.view.notice_logits()

    def notice_copied_buffers(self) -> None:
        """Update the site where something wrote to its buffers, as an average of weights does."""
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

    def check_state(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Refuse a state whose entries under this prefix are not of such a site, or were edited."""
        names = ("signature", "dropped_at", "evidence", "logits", "temperature")
        check_state({name: getattr(self, name) for name in names}, self.candidates, self.keys, state_dict, prefix)

    def _plain(self, picks: list[int]) -> nn.Module:
        """The ordinary module that does what this site does with these picks, one per row."""
        channels: dict[int, list[int]] = {}
        for channel, pick in enumerate(picks):
            channels.setdefault(pick, []).append(channel)
        if len(channels) == 1:
            return self._module(picks[0])
        functions = [self._module(k) for k in channels]
        return ChannelPicks(functions, list(channels.values()), self.config.channel_dim).to(self.logits.device)

    def _module(self, k: int) -> nn.Module:
        if self.original is not None and k == self.original_index:
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
        dim = self.config.channel_dim
        by_channel = self.config.granularity == "channel"
        if by_channel and (not -h.dim() <= dim < h.dim() or h.shape[dim] != self.rows):
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


def _check_before_loading(site: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(site, FlexAct)
    site.check_state(state_dict, prefix)


def _update_after_loading(site: nn.Module, _: Any) -> None:
    assert isinstance(site, FlexAct)
    site.update_alive()
