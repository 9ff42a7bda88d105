"""From logits to probabilities: noise, temperature, and which candidates are still in.

A `Router` serves all sites of one model. It draws their noise once per step from a generator of its own, and turns all
logits into probabilities in a constant number of operations, whatever the depth. Sites with different numbers of
candidates share one padded table of (rows, K); a site has one row, or one per channel. Each site reads its own part
through a `View`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flexact.config import FlexConfig
from flexact.ops import dispatch
from flexact.ops.differentiable import is_wrapped, transforming
from flexact.routing.call_statistics import Gathered
from flexact.routing.gumbel import gumbel_noise, log_pi, probabilities
from flexact.routing.sharding import is_sharded
from flexact.routing.site_tables import AnySite, Site, SiteTables


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; −1 for an inference tensor, which does not count its writes."""
    return -1 if tensor.is_inference() else tensor._version


def _state_of(site: Site) -> tuple[int, int] | None:
    """Which tensor a site's logits are, and how often it was written to; None for a sharded one, which FSDP replaces
    during a forward. The module's own table is many times as fast to read as the module."""
    logits = site._parameters.get("logits")
    if type(logits) is nn.Parameter and not logits.is_inference():
        return id(logits), logits._version
    return None if logits is None or is_sharded(logits) else (id(logits), version_of(logits))


def _outside_of_transforms() -> AbstractContextManager[Any]:
    """A context in which tensors are ordinary ones, also under a transform of torch.func."""
    return torch._C._DisableFuncTorch() if transforming() else nullcontext()


def _is_real(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers, and is not one of torch.export's stand-ins."""
    return type(tensor) is Tensor


class Router(SiteTables[AnySite]):
    """Draws and probabilities for all sites of one model, and the statistics that they gather.

    `refresh` runs at the start of each forward of the model and leaves plain tensors that the sites read by their rows;
    `advance` makes the next step's draw. A step is a forward in training mode, or, once a Schedule runs, a call of its
    `step()`: then every micro-batch and every recomputed forward of a step sees the same draw.
    """

    def __init__(self, sites: list[AnySite], config: FlexConfig, standalone: bool) -> None:
        super().__init__(sites)
        self.config = config
        self.standalone = standalone
        self.scheduled = False
        self.waiting = False  # in a warm-up: every site is what it was before, and nothing is routed
        self.trying: int | None = None  # in a trial: the candidate that every site runs alone
        self.ready = False  # whether there are probabilities and statistics at all
        self.current = False  # whether they are this step's; a site called outside of the model's forward asks
        self.step = 0
        self._skipped_draw = False  # since nobody would have read it
        self._decided = False  # whether the tables are those of picks, which stay as they are
        start = 0
        for place, site in enumerate(sites):
            site.view = View(self, place, start, site.rows, site.k)
            start += site.rows
        self.gathered = Gathered(self.rows, self.k)
        self._device: torch.device | None = None
        self._read: list[tuple[int, int] | None] = [None] * len(sites)
        self._alive: Tensor | None = None
        self._alive_is_old = True

    @property
    def at_rest(self) -> bool:
        """Whether nothing is routed: in a warm-up, and in a trial."""
        return self.waiting or self.trying is not None

    def refresh(self, training: bool) -> None:
        """Turn the logits into this forward's probabilities; begin a step where a forward is one."""
        self.place()
        if not torch.compiler.is_compiling():
            for site in self.sites:
                site.notice_copied_buffers()
            self._read = [_state_of(site) for site in self.sites]
        if all(site.alone is not None for site in self.sites):
            return
        if training and not self.scheduled and not recomputing():
            self.advance()
        if not (self._decided and self.committed) or transforming():
            self._make_tables()
        self.ready = self.current = True

    def notice(self, place: int) -> None:
        """Refresh the tables at the next call where something wrote to a site's logits since: an optimizer, or an
        average of weights, before a call that is not part of the model's own forward."""
        if (read := self._read[place]) is not None and read != _state_of(self.sites[place]):
            self.current = False

    def _make_tables(self) -> None:
        self._decided = self.committed and not transforming()
        # Not as inference tensors, which a later training step could not use.
        with torch.inference_mode(False), torch.no_grad():
            if self._decided:
                self.pi = self.p = self.alive().float()
                return
            if self._skipped_draw:
                self._draw()
            self.pi, self.p = self._fused_probabilities() if self.runs_fused() else self._probabilities()

    @property
    def committed(self) -> bool:
        """Whether every site is: then nothing is drawn, and the tables are made once."""
        return all(site.committed for site in self.sites)

    def advance(self) -> None:
        """Make the next step's draw."""
        self.go_to(self.step + 1)

    def go_to(self, step: int) -> None:
        """Make the draw of any step, and clear the statistics; the micro-batches of a step share both."""
        self.place()
        self.gathered.clear()
        self.step, self.current = step, False
        self._draw()
        self.alive()  # here, and not in a forward that the compiler traces
        if self.committed and not self._decided and not transforming():
            self._make_tables()  # likewise

    def _draw(self) -> None:
        """Make this step's draw."""
        self._skipped_draw = self.committed
        if self.config.policy.noise == 0 or self.committed:
            return
        drawn = self._drawn()
        # Pinned, so that the host need not wait for the device; not while a graph is captured, which would keep it.
        pinned = self.noise.is_cuda and not torch.cuda.is_current_stream_capturing()
        with _outside_of_transforms():
            # In place: a captured CUDA graph reads this memory.
            self.noise.copy_(drawn.pin_memory() if pinned else drawn, non_blocking=pinned)

    def runs_fused(self) -> bool:
        """Whether draw and policy are one Triton kernel each. Not for torch.compile, which fuses the plain ones, nor
        for torch.func and torch.jit.trace, whose tensors are not what kernels take."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or transforming():
            return False
        if dispatch.active(self.device).name != "triton":
            return False
        from flexact.ops.triton import policy as policy_kernels  # needs Triton

        return policy_kernels.takes(self.sites[0].logits, self.k)

    def alive(self) -> Tensor:
        """Which candidates are still in, (rows, K); padding is not. Kept until a site reports a change."""
        if transforming():  # whose tensors must not outlive it
            return self._alive_now()
        if self._alive is None or self._alive_is_old:
            alive = self._alive_now()
            if not _is_real(alive):
                return alive
            self._alive = alive if self._alive is None else self._alive.copy_(alive)  # a captured CUDA graph reads it
            self._alive_is_old = False
        return self._alive

    def _alive_now(self) -> Tensor:
        return self.table([site.dropped_at.flatten() for site in self.sites]) < 0

    def alive_changed(self) -> None:
        """Note that a candidate was dropped, or a state was loaded."""
        self._alive_is_old, self._decided, self.current = True, False, False

    def called(self) -> Tensor:
        """Which rows were called in the last forward, (rows, 1)."""
        return self.gathered.called(self.device)

    def sensitivity(self) -> Tensor:
        """Mean |σ_k′(h)| over the calls of the last forward, (rows, K)."""
        return self.gathered.means(self.device)

    def place(self) -> None:
        """Put the router's own tensors on the model's device, and again after the model moved."""
        if self._device != self.device:
            with _outside_of_transforms():
                self._place()
            if not _is_real(self.sites[0].dropped_at):
                self._device = None  # tensors made during torch.export must not outlive it

    @torch.inference_mode(False)
    def _place(self) -> None:
        self._device, self._alive = self.device, None
        self.gathered.clear()
        self.ready = self.current = self._decided = False
        self.lay_out()
        self.noise = self._drawn().to(self.device)
        self.alpha = torch.tensor(self.config.policy.alpha, device=self.device)

    def _probabilities(self) -> tuple[Tensor, Tensor]:
        """π and p, each (rows, K)."""
        of_pi = log_pi(self.logits(), self.alive())
        return of_pi.exp(), probabilities(of_pi, self.noise if self.config.policy.noise else None, self.temperature())

    def _fused_probabilities(self) -> tuple[Tensor, Tensor]:
        """The same by one kernel."""
        from flexact.ops.triton import fallback  # needs Triton
        from flexact.ops.triton import policy as policy_kernels

        values = torch.cat([*self.flat_logits(), *self.temperatures()])
        tables = (self.layout, self.alive(), self.noise)
        return fallback.run(policy_kernels.draw, lambda *_: self._probabilities(), values, *tables)

    def _drawn(self) -> Tensor:
        """This step's noise, (rows, K)."""
        scale = self.config.policy.noise
        if scale == 0:
            return torch.zeros(self.rows, self.k, device="cpu")
        with _outside_of_transforms():  # vmap allows no random numbers; all of its models share this draw
            return (scale * gumbel_noise(self.rows, self.k, self.config.seed, self.step)).float()

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self) | {"waiting": False, "trying": None}  # no schedule would end these in a copy
        if self.ready and is_wrapped(self.p):  # tensors of torch.func cannot be copied
            del state["pi"], state["p"]
            state["ready"] = state["current"] = False
        return state

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Refresh, as a forward pre-hook of the model."""
        self.refresh(module.training)


class View:
    """A site's part of its router: its own rows of the tables, and what the site reports back."""

    def __init__(self, router: Router[Any], place: int, first_row: int, rows: int, k: int) -> None:
        self.router, self.place, self.first_row, self._k = router, place, first_row, k
        self.rows = slice(first_row, first_row + rows)

    def probabilities(self, training: bool) -> Tensor:
        """p in training and π otherwise, (rows, K), up to date with the logits."""
        router = self.router
        if router.standalone or not router.current:
            router.refresh(training)
        return self._own(router.p if training else router.pi)

    def noise(self) -> Tensor:
        """The noise of this step, (rows, K)."""
        return self._own(self.router.noise)

    @property
    def trying(self) -> int | None:
        """The candidate that every site runs alone in a trial; None outside of one."""
        return self.router.trying

    @property
    def waiting(self) -> bool:
        """Whether every site runs its original function, in a warm-up."""
        return self.router.waiting

    def add(self, sensitivity: Tensor) -> None:
        """Keep the sensitivities of a call for the policy; not again when the call is recomputed."""
        if torch.compiler.is_compiling() or not recomputing():
            self.router.gathered.add(self.first_row, sensitivity)

    def notice_logits(self) -> None:
        """Have the router look whether something wrote to the site's logits."""
        if self.router.current:
            self.router.notice(self.place)

    def _own(self, table: Tensor) -> Tensor:
        own = table[self.rows]
        return own if self._k == table.shape[1] else own[:, : self._k]


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as activation checkpointing has it."""
    return torch._C._current_graph_task_id() != -1
