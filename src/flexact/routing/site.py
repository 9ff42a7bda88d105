"""Site: the state of a FlexAct, that is, its logits and which of its candidates are left, and how it changes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexact.candidates.recognition import key_of
from flexact.candidates.registry import known_names, lookup
from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.ops.differentiable import is_wrapped
from flexact.routing.channel_picks import ChannelPicks
from flexact.routing.gumbel import log_pi
from flexact.routing.sharding import is_sharded, local, own_part, whole
from flexact.routing.site_arguments import check_original, config_of, keys_of, rows_of

ALIVE = -1
"""The value of `dropped_at` for a candidate that is not dropped."""


def signature(key: str) -> int:
    """Return a number that identifies a candidate in a `state_dict`, which can only hold tensors."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; −1 for an inference tensor, which does not count writes."""
    return -1 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return `version_of` each tensor."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # of an inference tensor; asking each one whether it is one takes longer
        return [version_of(tensor) for tensor in tensors]


class Site(nn.Module):
    """The logits of K candidates, and which of them were dropped. See `flexact.FlexAct`, which adds the forward."""

    dropped_at: Tensor
    evidence: Tensor
    temperature: Tensor
    signature: Tensor
    original: nn.Module | None
    picked: nn.Module | None
    layer_before: nn.Module | None
    router: Any
    """The site's `flexact.routing.router.Router`, which also sets the following two."""
    index: int
    table_rows: slice
    """The site's rows in the tables of the router."""

    def __init__(
        self,
        candidates: Sequence[str] | None,
        config: FlexConfig | None,
        original: nn.Module | None,
        channels: int | None,
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
        self._set_aside("picked", None)
        self._set_aside("layer_before", None)  # the layer whose output the site receives, if conversion found it
        self.keys = keys_of(config, original)
        self.candidates = tuple(lookup(key).name for key in self.keys)
        self.k = len(self.keys)
        self._start = self.original_index if config.init == "original" else -1
        self.rows = rows_of(config, channels)
        self.logits = nn.Parameter(self._initial_logits())
        self.register_buffer("dropped_at", torch.full((self.rows, self.k), ALIVE))
        self.register_buffer("evidence", torch.full((self.rows, self.k, 3), math.nan, dtype=torch.float32))
        self.register_buffer("temperature", torch.tensor(config.policy.temperature, dtype=torch.float32))
        self.register_buffer("signature", torch.tensor(self._signature()))
        self.width = 1  # elements per sample and row in the last training forward
        self.register_load_state_dict_pre_hook(Site.check_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(Site.note_loaded)  # type: ignore[no-untyped-call]

    @property
    def label(self) -> str:
        """The site's name in messages."""
        return self.name or "FlexAct"

    @property
    def committed(self) -> bool:
        """Whether one candidate is left and the site runs it directly."""
        return self.picked is not None

    @property
    def only_candidate(self) -> int | None:
        """The only candidate that the site runs at the moment: the one being tried in a trial, or the original during a
        warm-up unless it was dropped; otherwise None."""
        tried: int | None = self.router.trying
        if tried is not None:
            return tried
        # `alive` is read last: if a compiled draw depended on it, every drop would trigger a recompilation.
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
        self._reset_logits()
        self.dropped_at[:, self.original_index] = ALIVE
        self.evidence[:, self.original_index] = math.nan
        self.commit(step, self.original_index)

    @torch.no_grad()
    def _reset(self) -> None:
        """Give logits and buffers their initial values. It is not called `reset_parameters`, because users
        call that method on every module to retrain a network, and would lose the picks."""
        self._reset_logits()
        self.dropped_at.fill_(ALIVE)
        self.evidence.fill_(math.nan)
        self.temperature.fill_(self.config.policy.temperature)
        self.signature.copy_(torch.tensor(self._signature()))
        self.update_alive()

    def _reset_logits(self) -> None:
        local(self.logits).copy_(own_part(self._initial_logits().to(self.dropped_at.device), self.logits))

    def at_start(self) -> bool:
        """Return whether the logits have their initial values."""
        logits = self._logits_on_cpu()
        return torch.equal(logits, self._initial_logits().view_as(logits).to(logits))

    def has_finite_logits(self) -> bool:
        """Return whether the logits of the candidates that are not dropped are finite."""
        return bool(self._logits_on_cpu().masked_fill(self.dropped_at.cpu() >= 0, 0.0).isfinite().all())

    def scores(self) -> Tensor:
        """Return the logits on the CPU, (rows, K), with NaN as the lowest number and −∞ for dropped candidates."""
        logits = self._logits_on_cpu()
        return logits.nan_to_num(nan=torch.finfo(logits.dtype).min).masked_fill(self.dropped_at.cpu() >= 0, -torch.inf)

    def likeliest(self) -> Tensor:
        """Return the index of each row's likeliest candidate that is not dropped, (rows,), on the CPU."""
        return self.scores().argmax(-1)

    def _logits_on_cpu(self) -> Tensor:
        """Return the logits, (rows, K). Decisions are made on the CPU, because a GPU loads each of torch's kernels at
        its first launch, so that the first drop would wait for dozens of them."""
        return whole(self.logits.detach()).cpu().view(self.rows, self.k)

    def drop(self, dropped: Tensor, step: int, evidence: Tensor | None = None) -> None:
        """Drop candidates. Each row must keep at least one; the last one is its pick.

        dropped: (rows, K), a mask. evidence: (rows, K, 3), kept for the dropped candidates.
        """
        dropped_at = self.dropped_at.cpu()
        alive = dropped_at < 0
        dropped = dropped.cpu() & alive
        if not bool((alive & ~dropped).any(-1).all()):
            raise FlexActError(f"{self.label} must keep at least one candidate of {self.candidates}.")
        if not bool(dropped.any()):
            return
        if evidence is not None:
            kept = self.evidence.cpu()
            self.evidence.copy_(torch.where(dropped.unsqueeze(-1), evidence.to(kept), kept))
        self.dropped_at.copy_(dropped_at.masked_fill(dropped, step))
        self.update_alive()

    def keep(self, count: int, step: int, evidence: Tensor | None = None, protected: Tensor | None = None) -> None:
        """Drop all but the likeliest candidates of each row.

        count: how many each row keeps. evidence: as for `drop`. protected: (rows,), a mask of the rows that keep their
        original in any case.
        """
        scores = self.scores()
        if protected is not None and self.original_index >= 0:
            alive = self.dropped_at.cpu()[:, self.original_index] < 0
            scores[:, self.original_index].masked_fill_(protected.cpu() & alive, torch.inf)
        kept = scores.argsort(descending=True, stable=True)[:, :count]  # of equal ones the first, as `likeliest`
        self.drop(torch.ones_like(scores, dtype=torch.bool).scatter(1, kept, False), step, evidence)

    def commit(self, step: int = 0, candidate: int | None = None) -> None:
        """Commit all rows to one candidate, by index, or each to its likeliest one."""
        picks = self.likeliest() if candidate is None else torch.tensor(candidate, device="cpu").expand(self.rows)
        self.drop(~nn.functional.one_hot(picks, self.k).bool(), step)

    @property
    def has_dropped(self) -> bool:
        """Whether a step of training dropped a candidate. Committing before training (step 0) does not count."""
        return not self.dropped_at.is_meta and bool((self.dropped_at > 0).any())

    @property
    def original_index(self) -> int:
        """The index of the original among the candidates; −1 if it is not one of them."""
        key = None if self.original is None else key_of(self.original)
        return self.keys.index(key) if key in self.keys else -1

    def note_loaded(self, *_: Any) -> None:
        """Update what is derived from the state. A hook that runs after a state was loaded."""
        self.update_alive()
        if not (self.logits.is_meta or is_sharded(self.logits)):
            self.router.resumes |= len(self.alive) < self.k or not self.at_start()

    def update_alive(self) -> None:
        """Update what is derived from `dropped_at`. Raise if the buffers were averaged like weights: they hold
        decisions, which cannot be averaged."""
        if self.dropped_at.is_meta:
            alive = torch.ones(self.rows, self.k, dtype=torch.bool, device="cpu")
        else:
            alive = self.dropped_at.cpu() < 0
            if self.signature.tolist() != self._signature() or not bool(alive.any(-1).all()):
                raise FlexActError(
                    f"the buffers of {self.label} have values that are invalid for a FlexAct. Weight averaging must "
                    "copy buffers, not average them: use AveragedModel(model, use_buffers=False), or load the state of "
                    "the model itself."
                )
        self._alive_version = version_of(self.dropped_at)
        self.alive = tuple(torch.nonzero(alive.any(0)).flatten().tolist())
        committed = bool((alive.sum(-1) == 1).all())
        self._set_aside("picked", self._plain(alive.long().argmax(-1).tolist()) if committed else None)
        self.router.alive_changed()

    def notice_copied_buffers(self) -> None:
        """Update the site if its buffers were written to, for example by weight averaging."""
        dropped_at = self._buffers["dropped_at"]
        assert dropped_at is not None
        if self._alive_version != version_of(dropped_at) and not (dropped_at.is_meta or is_wrapped(dropped_at)):
            self.update_alive()

    def check_state(self, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Raise if the entries of a state under this prefix do not fit this site. Also runs before loading a state."""
        state = f"the state of site {prefix[:-1] or 'FlexAct'!r}"
        own = self._parameters | self._buffers
        found = {name: state_dict[prefix + name] for name in own if prefix + name in state_dict}
        if not all(isinstance(value, Tensor) for value in found.values()):
            raise FlexActError(f"{state} has values that are not tensors: it is damaged.")
        if not {"signature", "dropped_at"} <= found.keys():
            return  # torch reports missing keys itself
        if (saved := found["signature"].flatten().tolist()) != self._signature():
            names = {signature(name): name for name in known_names()}
            had = ", ".join(names.get(number, "an unregistered function") for number in saved)
            raise FlexActError(
                f"{state} was saved with the candidates {had}; this model has {', '.join(self.candidates)}. Build it "
                "with the same candidates, in the same order."
            )
        for name, value in found.items():
            if value.shape != (shape := getattr(self, name).shape):
                raise FlexActError(
                    f"{state} has {name} of shape {tuple(value.shape)}; this model has {tuple(shape)}. Convert the "
                    "model in the same way, with the same granularity and channels."
                )
        if bool((found["dropped_at"] >= 0).all(-1).any()) or not found.get("temperature", 1) > 0:
            raise FlexActError(
                f"{state} has every candidate dropped, or a temperature that is not above 0: it is damaged, or was "
                "saved by a run that diverged."
            )

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

    def _signature(self) -> list[int]:
        return [signature(key) for key in self.keys]

    def _initial_logits(self) -> Tensor:
        logits = torch.zeros(self.rows, self.k, dtype=torch.float32)
        if self._start >= 0:
            start = self.config.init_probability
            logits[:, self._start] = math.log(start * (self.k - 1) / (1 - start))
        return logits.flatten()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Site:
        """Move to the model's device, but stay in float32 if the model changes its precision.

        A site that leaves the meta device is reset, because `to_empty` gives it memory with arbitrary values.
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
