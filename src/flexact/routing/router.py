"""From logits to probabilities: noise, temperature, who is still in.

A `Router` serves all sites of one model. It draws their noise once a step, in one go and from a generator of its own,
and turns all logits into probabilities in a constant number of operations, whatever the depth. Sites with different
numbers of candidates share one padded table of (rows, K); a site has one row, or one a channel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.ops import dispatch
from flexact.ops.differentiable import is_wrapped, transforming
from flexact.routing.call_statistics import Gathered, own_rank
from flexact.routing.sharding import is_sharded, whole

if TYPE_CHECKING:
    from flexact.routing.layer import FlexAct


def gumbel_noise(rows: int, k: int, seed: int, step: int) -> Tensor:
    """(rows, k) Gumbel(0, 1) numbers that depend on the seed and the step alone.

    Drawn on the CPU in float64: the same on every device, and −log(−log u) stays finite because u is kept off 0 and 1.
    """
    generator = torch.Generator("cpu").manual_seed(_mixed(seed, step))
    u = torch.rand(rows, k, generator=generator, dtype=torch.float64, device="cpu").clamp_(1e-12, 1 - 1e-12)
    return -(-u.log()).log()


def _mixed(seed: int, step: int) -> int:
    """One 63-bit number for the two (the finaliser of splitmix64), so that neighbouring runs share no noise."""
    z = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) >> 1


def _seed(seed: int, rank: int, again: int) -> int:
    """The seed itself, or another for each rank and each further draw of a step. Steps are never negative."""
    if rank:
        seed = _mixed(seed, -2 * rank)
    return _mixed(seed, -2 * again - 1) if again else seed


def log_pi(logits: Tensor, alive: Tensor) -> Tensor:
    """log π over the candidates still in; −∞ for the others."""
    return torch.log_softmax(logits.masked_fill(~alive, -torch.inf), dim=-1)


def probabilities(log_pi: Tensor, noise: Tensor | None, temperature: Tensor) -> Tensor:
    """p = softmax((log π + g)/τ)."""
    return torch.softmax((log_pi if noise is None else log_pi + noise) / temperature, dim=-1)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, which one made in inference mode does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _state_of(site: FlexAct) -> tuple[int, int] | None:
    """Which tensor a site's logits are, and how often it was written to; None of a sharded one, in whose place FSDP
    puts another during a forward. Asked of the module's own table, which is many times as quick as the module."""
    logits = site._parameters.get("logits")
    if type(logits) is nn.Parameter and not logits.is_inference():
        return id(logits), logits._version
    return None if logits is None or is_sharded(logits) else (id(logits), version_of(logits))


def _outside_of_transforms() -> AbstractContextManager[Any]:
    """Where tensors are made as torch makes them, whatever torch.func looks at."""
    return torch._C._DisableFuncTorch() if transforming() else nullcontext()


def _is_real(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers, and not what torch.export puts in its place."""
    return type(tensor) is Tensor


class Router:
    """Draws and probabilities for all sites of one model, and the statistics that they gather.

    `refresh` runs at the start of each forward of the model and leaves plain tensors that the sites read by their rows;
    `advance` makes the next step's draw. A step is a forward in training mode, or, once a Schedule runs, a call of its
    `step()`: then every micro-batch and every recomputed forward of a step sees the same draw. With
    `FlexConfig(draw_per="forward")` each micro-batch has one of its own, and a recomputed forward still that of its
    micro-batch.
    """

    def __init__(self, sites: list[FlexAct], config: FlexConfig, standalone: bool) -> None:
        self.sites = sites
        self.config = config
        self.standalone = standalone
        self.scheduled = False
        self.waiting = False  # in a warm-up: every site is what it was before, and nothing is routed
        self.trying: int | None = None  # in a trial: the candidate that every site runs alone
        self.ready = False  # whether there are probabilities and statistics at all
        self.current = False  # whether they are this step's; a site called outside of the model's forward asks
        self.begun = False  # whether this step had a forward in training mode
        self.step = 0
        self._again = 0  # draws of this step after the first
        self._left_out_draw = False  # since nobody would have read it
        self._decided = False  # whether the tables are those of picks, which stay as they are
        self.rows = sum(site.rows for site in sites)
        self.k = max(site.k for site in sites)
        start = 0
        for place, site in enumerate(sites):
            site.router, site.place, site.first_row = self, place, start
            start += site.rows
        self.gathered = Gathered(self.rows, self.k)
        self._device: torch.device | None = None
        self._read: list[tuple[int, int] | None] = [None] * len(sites)
        self._widths: tuple[int, ...] = ()
        self._alive: Tensor | None = None
        self._alive_is_old = True

    @property
    def device(self) -> torch.device:
        return self.sites[0].logits.device

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
        if training and not (self.scheduled and self.config.draw_per == "step") and not recomputing():
            if not self.scheduled:
                self.advance()
            elif self.begun:
                self._draw(self._again + 1)
        if not (self._decided and self.committed) or transforming():
            self._make_tables()
        self.begun = self.begun or training
        self.ready = self.current = True

    def notice(self, site: FlexAct) -> None:
        """Make the tables anew at the next call where something wrote to a site's logits since: an optimizer or an
        average of weights, and the forward is not the model's own, which would refresh them anyway."""
        if (read := self._read[site.place]) is not None and read != _state_of(site):
            self.current = False

    def _make_tables(self) -> None:
        self._decided = self.committed and not transforming()
        # Not as inference tensors, which a later training step could not use.
        with torch.inference_mode(False), torch.no_grad():
            if self._decided:
                self.pi = self.p = self.alive().float()
                return
            if self._left_out_draw:
                self._draw(self._again)
            self.pi, self.p = self._fused_probabilities() if self.runs_fused() else self._probabilities()

    @property
    def committed(self) -> bool:
        """Whether every site is: then nothing is drawn, and the tables are made once."""
        return all(site.committed for site in self.sites)

    def advance(self) -> None:
        """Go on to the next step's draw."""
        self.go_to(self.step + 1)

    def go_to(self, step: int) -> None:
        """Make the draw of any step, and start its statistics afresh; its micro-batches share them."""
        self.place()
        self.gathered.clear()
        self.step, self.current, self.begun = step, False, False
        self._draw(0)
        self.alive()  # here, and not in a forward that the compiler looks at
        if self.committed and not self._decided and not transforming():
            self._make_tables()  # likewise

    def _draw(self, again: int) -> None:
        """Make the first draw of this step, or a further one."""
        self._again = again
        self._left_out_draw = self.committed
        if self.config.noise == 0 or self.committed:
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

    def logits(self) -> Tensor:
        """All sites' logits as (rows, K), padded; differentiable."""
        return self.table(self.flat_logits())

    def flat_logits(self) -> list[Tensor]:
        """Each site's logits, whole."""
        every = [site.logits for site in self.sites]
        for site, logits in zip(self.sites, every, strict=True):
            if logits.dtype in (torch.float16, torch.bfloat16):
                raise FlexActError(
                    f"the logits of {site.name or 'FlexAct'} are in {logits.dtype}, and must stay in float32. "
                    "Where fully_shard has a mixed-precision policy, shard each FlexAct site by itself first, without "
                    "one: fully_shard(site)."
                )
        return [whole(logits) for logits in every]

    def alive(self) -> Tensor:
        """Who is still in, as (rows, K); padding is not. Kept until a site says that it changed."""
        if transforming():  # whose tensors must not outlive it
            return self.table([site.dropped_at.flatten() for site in self.sites]) < 0
        if self._alive is None or self._alive_is_old:
            alive = self.table([site.dropped_at.flatten() for site in self.sites]) < 0
            if not _is_real(alive):
                return alive
            self._alive = alive if self._alive is None else self._alive.copy_(alive)  # a captured CUDA graph reads it
            self._alive_is_old = False
        return self._alive

    def alive_changed(self) -> None:
        """A candidate was dropped, or a state was loaded."""
        self._alive_is_old, self._decided, self.current = True, False, False

    def temperature(self) -> Tensor:
        """τ of each row, (rows, 1)."""
        by_site = torch.stack([site.temperature for site in self.sites])
        return (by_site if self.rows == len(self.sites) else by_site[self._site_of_row]).unsqueeze(1)

    def temperatures(self) -> list[Tensor]:
        """τ of each site, (1,): these can be concatenated."""
        return [site.temperature.view(1) for site in self.sites]

    def width(self) -> Tensor:
        """Elements of a sample behind each row, (rows, 1)."""
        widths = tuple(site.width for site in self.sites)
        if self._widths != widths:
            self._widths = widths
            self._width = torch.tensor(widths, device=self.device)[self._site_of_row].unsqueeze(1)
        return self._width

    def called(self) -> Tensor:
        """Which rows were called in the last forward, (rows, 1)."""
        return self.gathered.called(self.device)

    def mean_statistics(self) -> Tensor:
        """Mean |σ_k′(h)| and mean (a_k − x)² over the calls of the last forward, (2, rows, K)."""
        return self.gathered.means(self.device)

    def split(self, table: Tensor) -> list[Tensor]:
        """A (rows, K) table back into the sites' own flat shapes."""
        parts = torch.split(table, [site.rows for site in self.sites])
        return [part[:, : site.k].flatten() for site, part in zip(self.sites, parts, strict=True)]

    def gradients(self) -> list[Tensor]:
        """The sites' own logit gradients; zeros that must not be written to where there is none."""
        gradients = [site.logits.grad for site in self.sites]
        return [
            self._zeros[: site.rows * site.k] if gradient is None else whole(gradient)
            for site, gradient in zip(self.sites, gradients, strict=True)
        ]

    @property
    def shares(self) -> bool:
        """Whether several sites pick together."""
        groups = [site.group for site in self.sites if site.group is not None]
        return len(set(groups)) < len(groups)

    @property
    def shares_all(self) -> bool:
        """Whether all sites pick together."""
        return len({site.group for site in self.sites}) == 1 and self.sites[0].group is not None

    def shared(self, table: Tensor) -> Tensor:
        """A (rows, K) table in which the rows of each group of sites have their mean."""
        if not self.shares:
            return table
        sums = torch.zeros_like(table).index_add_(0, self._group_of_row, table)
        return (sums / self._group_size)[self._group_of_row]

    def table(self, flat: list[Tensor]) -> Tensor:
        """The sites' own flat tensors as one (rows, K) table, padded with 0."""
        joined = torch.cat(flat)
        if self._index is None:
            return joined.view(self.rows, self.k)
        return torch.cat([joined, joined.new_zeros(1)])[self._index]

    def place(self) -> None:
        """Put what the tables are built with on the model's device (again, after the model moved)."""
        if self._device != self.device:
            with _outside_of_transforms():
                self._place()
            if not _is_real(self.sites[0].dropped_at):
                self._device = None  # what is made while torch.export looks on must not outlive it

    @torch.inference_mode(False)
    def _place(self) -> None:
        self._device, self._widths, self._alive = self.device, (), None
        self.gathered.clear()
        self.ready = self.current = self._decided = False
        sizes = [site.rows * site.k for site in self.sites]
        self.size = sum(sizes)
        self._zeros = torch.zeros(max(sizes), device=self.device)
        cpu = torch.device("cpu")  # said each time: a user's context may name another one
        rows = torch.tensor([site.rows for site in self.sites], device=cpu)
        site_of_row = torch.arange(len(self.sites), device=cpu).repeat_interleave(rows, output_size=self.rows)
        own = torch.tensor([site.k for site in self.sites], device=cpu)[site_of_row]
        start, column = own.cumsum(0) - own, torch.arange(self.k, device=cpu)
        self._site_of_row = site_of_row.to(self.device)
        self._place_groups(site_of_row)
        self._index: Tensor | None = None
        if any(site.k != self.k for site in self.sites):
            index = torch.where(column < own.unsqueeze(1), start.unsqueeze(1) + column, self.size)
            self._index = index.to(self.device)
        # For a kernel: where each row begins in all sites' flat tensors, how many candidates it has, and where behind
        # these its temperature is.
        self.layout = torch.stack([start, own, self.size + site_of_row], dim=1).to(self.device)
        self.noise = self._drawn().to(self.device)
        self.alpha = torch.tensor(self.config.alpha, device=self.device)

    def _place_groups(self, site_of_row: Tensor) -> None:
        """Number the groups of sites that pick together; a site without one is a group of its own."""
        names = [("site", i) if site.group is None else ("group", site.group) for i, site in enumerate(self.sites)]
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        of_site = torch.tensor([number[name] for name in names], device=site_of_row.device)
        rows = [0] * len(number)
        for name, site in zip(names, self.sites, strict=True):
            rows[number[name]] += site.rows
        # As long as the table that `shared` sums in, and not counted by torch.bincount, which torch.export cannot run.
        size = torch.tensor(rows + [1] * (self.rows - len(rows)), device=site_of_row.device).unsqueeze(1)
        self._group_of_row, self._group_size = of_site[site_of_row].to(self.device), size.to(self.device)

    def _probabilities(self) -> tuple[Tensor, Tensor]:
        """π and p, each (rows, K)."""
        of_pi = log_pi(self.logits(), self.alive())
        return of_pi.exp(), probabilities(of_pi, self.noise if self.config.noise else None, self.temperature())

    def _fused_probabilities(self) -> tuple[Tensor, Tensor]:
        """The same by one kernel."""
        from flexact.ops.triton import fallback  # needs Triton
        from flexact.ops.triton import policy as policy_kernels

        values = torch.cat([*self.flat_logits(), *self.temperatures()])
        tables = (self.layout, self.alive(), self.noise)
        return fallback.run(policy_kernels.draw, lambda *_: self._probabilities(), values, *tables)

    def _drawn(self) -> Tensor:
        if self.config.noise == 0:
            return torch.zeros(self.rows, self.k, device="cpu")
        rank = own_rank() if self.config.noise_across_ranks == "per_rank" else 0
        seed = _seed(self.config.seed, rank, self._again)
        # vmap allows no random numbers; these are one draw for all that it looks at.
        with _outside_of_transforms():
            return (self.config.noise * gumbel_noise(self.rows, self.k, seed, self.step)).float()

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self) | {"waiting": False, "trying": None}  # no schedule would tell a copy that these have ended
        if self.ready and is_wrapped(self.p):  # what torch.func leaves behind cannot be copied
            del state["pi"], state["p"]
            state["ready"] = state["current"] = False
        return state

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """As a forward pre-hook of the model."""
        self.refresh(module.training)


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as activation checkpointing has it."""
    return torch._C._current_graph_task_id() != -1
