"""FlexAct: the module that picks its activation function while it trains."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from flexact.candidates.registry import lookup
from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.ops import activated
from flexact.ops.blending import Blending
from flexact.ops.differentiable import is_wrapped, transforming
from flexact.routing.corrections import normalised_blend
from flexact.routing.router import Router, recomputing
from flexact.routing.site import Site


class FlexAct(Site):
    """An activation that blends K candidates with trainable probabilities, and commits to one of them.

    candidates: names of the candidates; by default those of the config.
    config: all other settings; `FlexConfig()` by default.
    original: the activation that the site replaces; an elementwise module without parameters or buffers.
    channels: the number of channels, for granularity="channel".
    inplace: ignored; accepted for compatibility with torch's activations. A site that is not committed never overwrites
    its input.

    A site that is used alone draws its noise from the config's seed at each forward, so two sites with the same seed
    draw the same noise. The sites of a converted model, or of a model with a Schedule, share a router and draw
    different noise.

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

    router: Router

    def __init__(
        self,
        candidates: Sequence[str] | None = None,
        config: FlexConfig | None = None,
        *,
        original: nn.Module | None = None,
        channels: int | None = None,
        inplace: bool = False,
    ) -> None:
        super().__init__(candidates, config, original, channels)
        Router([self], standalone=True)  # kept alive by self.router
        self.update_alive()

    def forward(self, input: Tensor) -> Tensor:
        h = input  # the parameter has the name that torch's activations use
        if not torch.compiler.is_compiling() and (repeated := self.repeated(h)) is not None:
            return repeated
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
        if self.config.policy.correction == "output_norm" and (self.training or not hard):  # no norm for a pick
            noise = self._own(self.router.noise) if self.training else torch.zeros_like(p)
            alive = self.dropped_at < 0
            return normalised_blend(h, self.logits, alive, noise, temperature, keys, hard, channel_dim)
        x, sensitivity = activated(h, self.logits, routing, self.router.known_calls[self.index])
        self.gather(routing, sensitivity)
        return x

    def repeated(
        self, h: Tensor, kind: Hashable = None, with_gradients: Sequence[Tensor] = (), running: Sequence[Tensor] = ()
    ) -> Tensor | None:
        """Return the result of a training call like an earlier one that ran in the extension, which then checks all
        that `forward` does, in less time; None if the call is not like one.

        kind, with_gradients, running: of a fused site, those of `flexact.ops.batch_norm.inputs_of`.
        """
        state = self.__dict__  # faster than attributes of a module
        router: Router = state["router"]
        index = state["index"]
        known = router.known_calls[index]
        if (
            known.repeat is None
            or not (router.current and state["training"] and known.are_valid())
            or router.standalone
            or router.warming_up
            or router.trying is not None
        ):
            return None
        logits, buffers, first_row = state["_parameters"].get("logits"), state["_buffers"], state["table_rows"].start
        found = known.repeat(
            known.chains, kind, h, logits, state["picked"] is not None, router.read[index], buffers["dropped_at"],
            state["_alive_version"], router.p, first_row, buffers["temperature"], with_gradients, running,
        )  # fmt: skip
        if found is None:
            return None
        x: Tensor
        x, sensitivity, width = found
        if state["width"] != width:
            self.width = width
        if sensitivity is not None:
            router.call_statistics.add(first_row, sensitivity)
        return x

    def check_input(self, h: Tensor) -> None:
        """Raise if the site does not support an input."""
        if not isinstance(h, Tensor) or not h.is_floating_point():
            got = f"a tensor of {h.dtype}" if isinstance(h, Tensor) else f"a {type(h).__name__}"
            raise FlexActError(
                f"{self.label} got {got}; activations need a real floating-point tensor "
                "(float64, float32, bfloat16 or float16). Convert it first, for example with h.float()."
            )
        if h.device != self._buffers["temperature"].device:  # type: ignore[union-attr]  # faster than an attribute
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

    def routing(self, h: Tensor) -> Blending:
        """Return the inputs of this forward's blend, which asks for statistics only if the policy needs them.

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
            hard, statistics = policy.forward == "hard", policy.uses_kl
            temperature: Tensor = self._buffers["temperature"]  # type: ignore[assignment]  # faster than an attribute
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
        if torch.compiler.is_compiling():
            # Rows at multiples of 16 bytes: Inductor takes the results of an operator with a misaligned input to be
            # misaligned, too, and gives up vectorised access to them.
            table = nn.functional.pad(table, (0, -table.shape[1] % 4))
        elif self.k == table.shape[1]:
            return table.narrow(0, self.table_rows.start, self.rows)  # faster than an index
        return table[self.table_rows, : self.k]

    def _is_batched(self) -> bool:
        """Return whether vmap runs several models at once, each with its own remaining candidates."""
        return is_wrapped(self.dropped_at)

    def gather(self, routing: Blending, sensitivity: Tensor) -> None:
        """Keep the sensitivities of a call if the policy needs them, unless activation checkpointing recomputes it."""
        if routing.statistics and (torch.compiler.is_compiling() or not recomputing()):
            self.router.call_statistics.add(self.table_rows.start, sensitivity)

    def notice_writes(self) -> None:
        """Update the site and its router if the site's buffers or logits were written to. Every call checks this,
        because the router checks all sites only at the start of the model's forward, and a site may be called
        outside of it."""
        if not torch.compiler.is_compiling():
            self.notice_copied_buffers()
            if self.picked is None:
                self.router.notice(self.index)
