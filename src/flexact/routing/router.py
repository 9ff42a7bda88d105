"""From logits to probabilities: noise, temperature, and which candidates are alive.

A `Router` serves all sites of one model. It draws their noise once per step from its own generator, and turns all
logits into probabilities in a number of operations that does not depend on the depth. Sites with different numbers of
candidates share one padded table of (rows, K); a site has one row, or one per channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flexact.ops import fallback, policy_kernels
from flexact.ops.differentiable import is_wrapped, transforming
from flexact.ops.known_calls import KnownCalls
from flexact.ops.policy_tables import PolicyKernels
from flexact.routing.call_statistics import CallStatistics
from flexact.routing.gumbel import gumbel_noise, log_pi, probabilities
from flexact.routing.sharding import is_sharded
from flexact.routing.site import Site, version_of, versions_of
from flexact.routing.site_tables import SiteTables


def _state_of(site: Site) -> tuple[int, int] | None:
    """Return the id of a site's logits and how often they were written to; None if they are sharded, because FSDP
    replaces the tensor during a forward. Reading `_parameters` is many times faster than an attribute of the module."""
    logits = site._parameters.get("logits")
    return None if logits is None or is_sharded(logits) else (id(logits), version_of(logits))


def _outside_of_transforms() -> AbstractContextManager[Any]:
    """Return a context without torch.func transforms, in which tensors are ordinary ones."""
    return torch._C._DisableFuncTorch() if transforming() else nullcontext()


class Router(SiteTables):
    """The noise, the probabilities and the call statistics of all sites of a model.

    `refresh` runs at the start of each forward of the model and computes the tables of probabilities that the sites
    read. `go_to` draws the noise of a step. A step is a forward in training mode or, with a Schedule, a call
    of its `step()`; every micro-batch and every recomputed forward of a step then uses the same noise.
    """

    def __init__(self, sites: Sequence[Site], standalone: bool) -> None:
        super().__init__(sites)
        self.config = sites[0].config
        self.standalone = standalone
        self.scheduled = False
        self.acting: int | None = None  # the id of the newest Schedule whose policy acts before steps
        self.resumes = False  # whether picking has begun in an earlier run, whose state was loaded or kept
        self.penalized = False  # whether `penalty` was called
        self.warming_up = False  # in a warm-up: every site runs its original, and nothing is routed
        self.trying: int | None = None  # in a trial: the candidate that every site runs alone
        self.loss: Tensor | float | None = None  # the loss of the last step, for a Recorder
        self.tried: int | None = None  # in a trial: the candidate of that loss
        self.ready = False  # whether the tables have been computed
        self.current = False  # whether the tables are up to date; checked by sites called outside the model's forward
        self.step = 0
        self._skipped_draw = False  # whether this step's noise was not drawn, since all sites were committed
        self._decided = False  # whether the tables are those of committed sites, which do not change
        start = 0
        for index, site in enumerate(sites):
            site.router, site.index, site.table_rows = self, index, slice(start, start + site.rows)
            start += site.rows
        self.call_statistics = CallStatistics(self.rows, self.k, start=sum(site.rows * site.k for site in sites))
        self._device: torch.device | None = None
        self.read: list[tuple[int, int] | None] = [None] * len(sites)
        """Of each site the state of the logits from which the tables were computed; see `_state_of`."""
        self.known_calls = [KnownCalls() for _ in sites]
        self._alive: Tensor | None = None
        self._alive_is_old = True
        self.committed = all(site.committed for site in sites)
        """Whether every site is committed. Then no noise is drawn, and the tables are computed only once."""

    @property
    def at_rest(self) -> bool:
        """Whether nothing is routed, as in a warm-up or a trial."""
        return self.warming_up or self.trying is not None

    def refresh(self, training: bool) -> None:
        """Compute the probabilities of this forward. Without a Schedule, a training forward also starts a step."""
        self.move_to_device()
        if not torch.compiler.is_compiling():
            self._notice_writes()
        if self.at_rest and all(site.only_candidate is not None for site in self.sites):
            return
        if training and not self.scheduled and not recomputing():
            self.go_to(self.step + 1)
        if not (self._decided and self.committed) or transforming():
            self._make_tables()
        self.ready = self.current = True

    def _notice_writes(self) -> None:
        """Update the sites whose buffers were written to, and note the state of all logits. Few calls per site, since
        this runs in every step."""
        dropped_at: list[Any] = [site._buffers["dropped_at"] for site in self.sites]
        if versions_of(dropped_at) != [site._alive_version for site in self.sites]:
            for site in self.sites:
                site.notice_copied_buffers()
        logits: list[Any] = [site._parameters.get("logits") for site in self.sites]
        if {type(one) for one in logits} == {nn.Parameter}:
            self.read = list(zip(map(id, logits), versions_of(logits), strict=True))
        else:
            self.read = [_state_of(site) for site in self.sites]

    def notice(self, index: int) -> None:
        """Mark the tables as outdated if a site's logits were written to since the last refresh, for example by an
        optimizer or by weight averaging before a call outside the model's forward."""
        if self.current and (read := self.read[index]) is not None and read != _state_of(self.sites[index]):
            self.current = False

    def _make_tables(self) -> None:
        self._decided = self.committed and not transforming()
        if self._skipped_draw and not self._decided:
            self._draw()
        kernels = None if self._decided else self.kernels()
        if kernels is not None and not torch.is_inference_mode_enabled():
            self.pi, self.p = self._fused_probabilities(kernels)  # the contexts below take longer than the launch
            return
        # Outside inference mode, because a later training step could not use inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            if self._decided:
                self.pi = self.p = self.alive().float()
            else:
                self.pi, self.p = self._probabilities() if kernels is None else self._fused_probabilities(kernels)

    def go_to(self, step: int) -> None:
        """Start a given step: draw its noise and clear the statistics, which its micro-batches share."""
        self.move_to_device()
        self.call_statistics.clear()
        self.step, self.current = step, False
        self._draw()
        if self._alive_is_old:
            self.alive()  # updated here, because a forward may be traced by a compiler
        if self.committed and not self._decided and not transforming():
            self._make_tables()  # for the same reason

    def _draw(self) -> None:
        """Draw the noise of this step."""
        self._skipped_draw = self.committed
        if self.config.policy.noise == 0 or self.committed:
            return
        drawn = self._drawn()
        # Pinned memory makes the copy asynchronous; during a capture, the CUDA graph would hold on to that memory.
        pinned = self.noise.is_cuda and not torch.cuda.is_current_stream_capturing()
        with _outside_of_transforms():
            # In place: a captured CUDA graph reads this memory.
            self.noise.copy_(drawn.pin_memory() if pinned else drawn, non_blocking=pinned)

    def kernels(self) -> PolicyKernels | None:
        """Return the kernels that compute the probabilities and the policy; None for plain torch, as under
        torch.compile, which fuses the plain operations, and under torch.func and torch.jit.trace, whose tensors kernels
        cannot read."""
        kernels = policy_kernels.chosen(self.parameters()[0], self.k)
        return None if kernels is None or torch._C._functorch.peek_interpreter_stack() is not None else kernels

    def alive(self) -> Tensor:
        """Return a mask of the candidates that are not dropped, (rows, K); False for padding. Cached until a drop."""
        # A tensor of torch.func must not outlive its transform.
        return self._alive_now() if transforming() else self.kept_alive()

    def kept_alive(self) -> Tensor:
        """Return `alive` outside of torch.func transforms, as where kernels run."""
        if self._alive is None or self._alive_is_old:
            alive = self._alive_now()
            if type(alive) is not Tensor:  # a fake tensor of torch.export
                return alive
            self._alive = alive if self._alive is None else self._alive.copy_(alive)  # a captured CUDA graph reads it
            self._alive_is_old = False
        return self._alive

    def _alive_now(self) -> Tensor:
        return self.table([site.dropped_at.flatten() for site in self.sites]) < 0

    def alive_changed(self) -> None:
        """Mark the tables as outdated after a drop or after a state was loaded."""
        self._alive_is_old, self._decided, self.current = True, False, False
        self.committed = all(site.committed for site in self.sites)
        self.known_calls = [KnownCalls() for _ in self.sites]

    def called(self) -> Tensor:
        """Return a mask of the rows that were called in this step, (rows, 1)."""
        return self.call_statistics.called(self.device)

    def sensitivity(self) -> Tensor:
        """Return the mean |σ_k′(h)| over the calls of this step, (rows, K)."""
        return self.call_statistics.means(self.device)

    def move_to_device(self) -> None:
        """Create the router's tensors on the model's device, if the model has moved or this is the first call."""
        if self._device != self.device:
            with _outside_of_transforms():
                self._create_tensors()
            if type(self.sites[0].dropped_at) is not Tensor:
                self._device = None  # tensors made during torch.export must not outlive it

    @torch.inference_mode(False)
    def _create_tensors(self) -> None:
        self._device, self._alive, self._alive_is_old = self.device, None, True
        self.call_statistics.clear()
        self.ready = self.current = self._decided = False
        self.lay_out()
        self.noise = self._drawn().to(self.device)
        self.alpha = torch.tensor(self.config.policy.alpha, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def _probabilities(self) -> tuple[Tensor, Tensor]:
        """Return π and p, (rows, K) each."""
        of_pi = log_pi(self.logits(), self.alive())
        return of_pi.exp(), probabilities(of_pi, self.noise if self.config.policy.noise else None, self.temperature())

    def _fused_probabilities(self, kernels: PolicyKernels) -> tuple[Tensor, Tensor]:
        """Return the result of `_probabilities`, computed by one kernel."""
        values = [*self.flat_logits(), *self.temperatures()]
        tables = (self.layout, self.kept_alive(), self.noise)
        return fallback.run(lambda _: kernels.draw(values, *tables), lambda _: self._probabilities(), values[0])

    def _drawn(self) -> Tensor:
        """Return the noise of this step, (rows, K)."""
        scale = self.config.policy.noise
        if scale == 0:
            return torch.zeros(self.rows, self.k, dtype=torch.float32, device="cpu")
        with _outside_of_transforms():  # vmap forbids random numbers; all of its models share this noise
            return (scale * gumbel_noise(self.rows, self.k, self.config.seed, self.step)).float()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no schedule that would end a warm-up. In a trial its weights are those of one candidate, which it
        # keeps running.
        state = vars(self) | {"warming_up": False, "tried": None, "loss": None}
        state["known_calls"] = [KnownCalls() for _ in self.sites]
        if self.ready and is_wrapped(self.p):  # tensors of torch.func cannot be copied
            del state["pi"], state["p"]
            state["ready"] = state["current"] = False
        return state

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Refresh the tables. The router is a forward pre-hook of the model."""
        self.refresh(module.training)


def recomputing() -> bool:
    """Return whether this forward runs inside a backward pass, as in activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
