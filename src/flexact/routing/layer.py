"""FlexAct: the module that picks its activation function while it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexact.activations import key_of
from flexact.candidates import lookup
from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.ops import routed_activation
from flexact.ops.blending import Blending
from flexact.ops.differentiable import is_wrapped, transforming
from flexact.routing.channel_picks import ChannelPicks
from flexact.routing.corrections import normalised_blend
from flexact.routing.gumbel import log_pi
from flexact.routing.router import Router, recomputing, version_of
from flexact.routing.saved_state import check_state, signature
from flexact.routing.sharding import is_sharded, local, own_part, whole
from flexact.routing.site_arguments import check_original, config_of, keys_of, rows_of

ALIVE = -1
"""The value of `dropped_at` for a candidate that is not dropped."""


class FlexAct(nn.Module):
    """An activation that blends K candidates with trainable probabilities, and commits to one of them.

    candidates: names of the candidates; by default those of the config.
    config: all other choices; `FlexConfig()` by default.
    original: the activation that the site replaces; an elementwise module without tensors.
    channels: the number of channels, for granularity="channel".
    inplace: ignored; accepted for compatibility with torch's activations. A site that is not committed never overwrites
    its input.

    router: draws for this site alone, or for all sites of its model. A site that is used alone draws its noise from the config's seed at each forward, so two sites with the same seed
    draw the same noise. The sites of a converted model, or of a model with a Schedule, draw different noise.

    State: `logits` (rows·K,), with one row for the layer or one per channel; `dropped_at` (rows, K), the step at which
    a candidate was dropped, or −1; `evidence` (rows, K, 3), the candidate's margin behind the leader when it was
    dropped, the standard error of the margin, and the number of steps; `temperature`, τ; `signature` (K,), which
    identifies the candidates.

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
    layer_before: nn.Module | None
    router: Router[FlexAct]
    index: int
    table_rows: slice

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
        self.group: Any = None  # sites with the same group pick together
        # How conversion inserted the site, for extraction to undo.
        self.function: Callable[..., Tensor] | None = None
        self.added = self.rewritten = False
        self._set_aside("original", original)
        self._set_aside("layer_before", None)  # the layer whose output the site receives, if conversion found it
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
        Router([self], config, standalone=True)  # kept alive by self.router
        self.update_alive()
        self.register_load_state_dict_pre_hook(FlexAct.check_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(FlexAct.note_loaded)  # type: ignore[no-untyped-call]

    @property
    def label(self) -> str:
        """The site's name in messages."""
        return self.name or "FlexAct"

    def forward(self, input: Tensor) -> Tensor:
        h = input  # the parameter has the name that torch's activations use
        self.notice_writes()
        if self.picked is not None and not (transforming() and self._is_batched()):
            picked: Tensor = self.picked.forward(h)  # not __call__: the original shares the site's hooks
            return picked
        self.check_input(h)
        if (only := self.only_candidate) is not None:
            return lookup(self.keys[only]).function(h)
        routing = self.routing(h)
        weights, p, temperature, keys, _, channel_dim, _ = routing
        hard = weights is not p
        if self.config.policy.correction == "output_norm" and (self.training or not hard):  # a pick is plain
            noise = self._own(self.router.noise) if self.training else torch.zeros_like(p)
            alive = self.dropped_at < 0
            return normalised_blend(h, self.logits, alive, noise, temperature, keys, hard, channel_dim)
        x, sensitivity = routed_activation(h, self.logits, *routing)
        self.gather(routing, sensitivity)
        return x

    def routing(self, h: Tensor) -> Blending:
        """Return the blending of this forward. It asks for statistics only if the policy needs them.

        h: the input, or any tensor of its shape.
        """
        router = self.router
        if router.standalone or not router.current:
            router.refresh(self.training)
        p = self._own(router.p if self.training else router.pi)
        if self.training:
            width = max(h.numel() // (max(h.shape[0], 1) * self.rows), 1) if h.dim() else 1
            # Setting an attribute of a module is slow, so it is skipped if nothing changes. A compiler always sets it,
            # because it would turn the comparison into a guard on a constant size.
            if torch.compiler.is_compiling() or self.width != width:
                self.width = width
            policy = self.config.policy
            hard, temperature, statistics = policy.forward == "hard", self.temperature, policy.uses_kl
        else:
            hard, temperature, statistics = self.config.eval == "pick", torch.ones_like(self.temperature), False
        if self.committed:
            hard, statistics = False, False
        alive = self.alive
        if transforming():
            statistics = False  # a tensor of torch.func must not outlive its transform
            alive = tuple(range(self.k)) if self._is_batched() else alive
        weights = nn.functional.one_hot(p.argmax(-1), self.k).to(p.dtype) if hard else p
        return Blending(weights, p, temperature, self.keys, alive, self.config.channel_dim, statistics)

    def _own(self, table: Tensor) -> Tensor:
        """Return the site's part of a table of its router."""
        return table[self.table_rows, : self.k]

    def _is_batched(self) -> bool:
        """Return whether vmap runs several models at once, each with its own remaining candidates."""
        return is_wrapped(self.dropped_at)

    def gather(self, routing: Blending, sensitivity: Tensor) -> None:
        """Keep the sensitivities of a call if the policy needs them, unless activation checkpointing recomputes it."""
        if routing.statistics and (torch.compiler.is_compiling() or not recomputing()):
            self.router.gathered.add(self.table_rows.start, sensitivity)

    @property
    def committed(self) -> bool:
        """Whether one candidate is left and the site runs it directly."""
        return self.picked is not None

    @property
    def only_candidate(self) -> int | None:
        """The only candidate that the site runs at the moment: the one being tried in a trial, or the original during a
        warm-up unless it was dropped; otherwise None."""
        if self.router.trying is not None:
            return self.router.trying
        # `alive` is read last: a compiled draw must not depend on it, or every drop would recompile it.
        return self._start if self.router.warming_up and self._start in self.alive else None

    @property
    def kept_original(self) -> bool:
        """Whether the site is committed to its original."""
        return self.picked is not None and self.picked is self.original

    @property
    def picks(self) -> tuple[str, ...]:
        """The likeliest candidate of each row: one name for the layer, or one per channel."""
        return tuple(self.candidates[k] for k in self.likeliest().tolist())

    def pi(self) -> Tensor:
        """Return the noise-free probabilities of the candidates, (rows, K); 0 for dropped ones."""
        with torch.no_grad():
            return log_pi(whole(self.logits).view(self.rows, self.k), self.dropped_at < 0).exp()

    @torch.no_grad()
    def restore_original(self, step: int) -> None:
        """Reset the logits and commit to the original, even if it was dropped."""
        self.logits.copy_(self._initial_logits())
        self.dropped_at[:, self.original_index] = ALIVE
        self.evidence[:, self.original_index] = math.nan
        self.commit(step, self.original_index)

    @torch.no_grad()
    def _reset(self) -> None:
        """Give logits and buffers their initial values. It is not called `reset_parameters`, because users
        call that method on every module to retrain a network, and would lose the picks."""
        device = self.dropped_at.device
        local(self.logits).copy_(own_part(self._initial_logits().to(device), self.logits))
        self.dropped_at.fill_(ALIVE)
        self.evidence.fill_(math.nan)
        self.temperature.fill_(self.config.policy.temperature)
        self.signature.copy_(torch.tensor([signature(key) for key in self.keys]))
        self.update_alive()

    def at_start(self) -> bool:
        """Return whether the logits have their initial values."""
        logits = whole(self.logits.detach())
        return torch.equal(logits, self._initial_logits().to(logits))

    def has_finite_logits(self) -> bool:
        """Return whether the logits of the candidates that are not dropped are finite."""
        logits = whole(self.logits.detach()).view(self.rows, self.k)
        return bool(logits.masked_fill(self.dropped_at >= 0, 0.0).isfinite().all())

    def likeliest(self) -> Tensor:
        """Return the index of each row's likeliest candidate that is not dropped, (rows,), even if logits are NaN."""
        return self.pi().nan_to_num(nan=0.0).masked_fill(self.dropped_at >= 0, -1.0).argmax(-1)

    def drop(self, dropped: Tensor, step: int, evidence: Tensor | None = None) -> None:
        """Drop candidates. Each row must keep at least one; the last one is its pick.

        dropped: (rows, K), a mask. evidence: (rows, K, 3), kept for the dropped candidates.
        """
        alive = self.dropped_at < 0
        dropped = dropped.to(alive.device) & alive
        if not bool((alive & ~dropped).any(-1).all()):
            raise FlexActError(f"{self.label} must keep at least one candidate of {self.candidates}.")
        if evidence is not None:
            self.evidence.copy_(torch.where(dropped.unsqueeze(-1), evidence.to(self.evidence), self.evidence))
        self.dropped_at.masked_fill_(dropped, step)
        self.update_alive()

    def drop_weakest(self, step: int, evidence: Tensor | None = None, protected: Tensor | None = None) -> None:
        """Drop the least likely candidate of each row that has more than one left.

        protected: (rows,), a mask of the rows whose original must not be dropped.
        """
        alive = self.dropped_at < 0
        out = ~alive
        if protected is not None and self.original_index >= 0:
            out[:, self.original_index] |= protected.to(out.device)
        weakest = self.pi().nan_to_num(nan=0.0).masked_fill(out, torch.inf).argmin(-1)
        dropped = nn.functional.one_hot(weakest, self.k).bool() & (alive.sum(-1, keepdim=True) > 1)
        self.drop(dropped, step, evidence)

    def commit(self, step: int = 0, candidate: int | None = None) -> None:
        """Commit each row to its likeliest candidate, or to the given one."""
        likeliest = self.likeliest()
        self.keep(likeliest if candidate is None else torch.full_like(likeliest, candidate), step)

    def keep(self, candidates: Tensor, step: int, evidence: Tensor | None = None) -> None:
        """Drop all candidates but one per row. candidates: (rows,), its index. evidence: as for `drop`."""
        self.drop(~nn.functional.one_hot(candidates, self.k).bool(), step, evidence)

    @property
    def original_index(self) -> int:
        """The index of the original among the candidates; −1 if it is not one of them."""
        key = None if self.original is None else key_of(self.original)
        return self.keys.index(key) if key in self.keys else -1

    def note_loaded(self, *_: Any) -> None:
        """A hook that updates what is derived from the state after one was loaded."""
        self.update_alive()
        if not (self.logits.is_meta or is_sharded(self.logits)):
            self.router.resumes |= len(self.alive) < self.k or not self.at_start()

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
        """Update the site and its router if the site's buffers or logits were written to. Every call checks this,
        because the router checks all sites only at the start of the model's forward, and a site may be called
        outside of it."""
        if not torch.compiler.is_compiling():
            self.notice_copied_buffers()
            if self.picked is None:
                self.router.notice(self.index)

    def notice_copied_buffers(self) -> None:
        """Update the site if its buffers were written to, for example by weight averaging."""
        dropped_at = self._buffers["dropped_at"]
        assert dropped_at is not None
        if self._alive_version == version_of(dropped_at) or dropped_at.is_meta or is_wrapped(dropped_at):
            return
        self.check_buffers()
        self.update_alive()

    def check_buffers(self) -> None:
        """Raise if the buffers were averaged like weights: they hold decisions, which cannot be averaged."""
        if self.dropped_at.is_meta:
            return
        sound = self.signature.tolist() == [signature(key) for key in self.keys]
        if not sound or not bool((self.dropped_at < 0).any(-1).all()):
            raise FlexActError(
                f"the buffers of {self.label} have values that are invalid for a FlexAct. Weight averaging must copy "
                "buffers, not average them: use AveragedModel(model, use_buffers=False), or load the state of the "
                "model itself."
            )

    def check_state(self, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Raise if the entries of a state under this prefix do not fit this site. Also runs before loading a state."""
        names = ("signature", "dropped_at", "evidence", "logits", "temperature")
        check_state({name: getattr(self, name) for name in names}, self.candidates, self.keys, state_dict, prefix)

    def _plain(self, picks: list[int]) -> nn.Module:
        """Return the plain module that computes the same as this site with these picks, one per row."""
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
        """Store a module as an attribute without registering it as a child."""
        object.__setattr__(self, name, module)

    def _initial_logits(self) -> Tensor:
        logits = torch.zeros(self.rows, self.k)
        if self._start >= 0:
            start = self.config.init_probability
            logits[:, self._start] = math.log(start * (self.k - 1) / (1 - start))
        return logits.flatten()

    def check_input(self, h: Tensor) -> None:
        """Raise if the site does not support an input."""
        if not isinstance(h, Tensor) or not h.is_floating_point():
            got = f"a tensor of {h.dtype}" if isinstance(h, Tensor) else f"a {type(h).__name__}"
            raise FlexActError(
                f"{self.label} got {got}; activations need a real floating-point tensor "
                "(float64, float32, bfloat16 or float16). Convert it first, for example with h.float()."
            )
        if h.layout is not torch.strided or h.is_nested:
            raise FlexActError(
                f"{self.label} got {'a nested' if h.is_nested else 'a sparse'} tensor; activations need a dense one. "
                "Convert it first, for example with h.to_padded_tensor(0.0) or h.to_dense()."
            )
        if h.device != self.logits.device:
            raise FlexActError(
                f"{self.label} is on {self.logits.device} but got a tensor on {h.device}; move the model or the "
                "tensor, for example with model.to(h.device)."
            )
        dim = self.config.channel_dim
        by_channel = self.config.granularity == "channel"
        if by_channel and (not -h.dim() <= dim < h.dim() or h.shape[dim] != self.rows):
            raise FlexActError(
                f"{self.label} picks for {self.rows} channels in dimension {dim}, but its input has shape "
                f"{tuple(h.shape)}. Set FlexConfig(channel_dim=...) to the dimension of the channels, or convert with "
                "per_call=True if this activation is used with several numbers of channels."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FlexAct:
        """Move to the model's device, but stay in float32 if the model changes its precision.

        A site that leaves the meta device starts anew: `to_empty` gives it memory with arbitrary values.
        """
        was_meta = self.logits.is_meta

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        if was_meta and not self.logits.is_meta:
            self._reset()
        if self.picked is not None:
            self.picked._apply(fn)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.original is not None:
            key_of(self.original)  # registers the function, which a new process does not know yet

    def extra_repr(self) -> str:
        rows = f", channels={self.rows}" if self.config.granularity == "channel" else ""
        picked = f", picked={self.picks[0] if len(set(self.picks)) == 1 else 'by channel'}" if self.committed else ""
        return f"candidates={self.candidates}{rows}{picked}"
