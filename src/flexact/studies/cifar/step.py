"""One training step: augment, forward, loss, backward, the policy's work on the logits, and the optimizer's step.

On a GPU the whole step is one CUDA graph; on a CPU, and with several ranks, the same code runs eagerly. What changes
between steps (images, crops, learning rate, the values that the Schedule sets) is read from fixed memory. The
Schedule's own step runs on the host, outside of the graph; if it drops candidates, the kernels change, and the graph is
captured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexact import Schedule, penalty
from flexact.errors import FlexActError
from flexact.io.markdown_tables import counted
from flexact.routing.call_statistics import mean_over_ranks
from flexact.routing.sites import routers_of, sites_of
from flexact.studies.cifar.methods import optimizer_groups, picking_sites
from flexact.studies.cifar.protocol import Protocol
from flexact.studies.cifar.ranks import Ranks
from flexact.studies.cifar_data.augment import augmented, epoch_draws
from flexact.studies.cifar_data.data import Images
from flexact.studies.cuda_graph import autocast, captured
from flexact.studies.named_seeds import generator_of

WARM_UP = 3
"""Eager steps before a capture: they compile kernels and allocate memory that outlives a step."""
_MODEL, _MOMENTUM, _SCHEDULE, _TOTALS = "model.", "momentum.", "schedule.", "totals"


class Training:
    """The training of a network, step by step, from any step of the run.

    network: on the device already, and identical on every rank.
    """

    def __init__(
        self, network: nn.Module, images: Images, protocol: Protocol, seed: int, device: torch.device, ranks: Ranks
    ) -> None:
        self.network, self.images, self.protocol, self.seed, self.device = network, images, protocol, seed, device
        self.ranks, self._part = ranks, ranks.part(protocol.batch)
        self.steps_per_epoch = len(images.train_y) // protocol.batch
        """An incomplete last batch of an epoch is dropped."""
        if self.steps_per_epoch == 0:
            raise FlexActError(
                f"{counted(len(images.train_y), 'training image')}: less than one batch of {protocol.batch}."
            )
        self.total_steps = protocol.epochs * self.steps_per_epoch
        self.steps_done = 0
        self._forward = ranks.wrapped(network.train(), device)
        # A captured graph reads the learning rate from a tensor; only the fused SGD does so without synchronizing.
        self._lr = torch.full((), protocol.lr, device=device)
        self.optimizer = torch.optim.SGD(
            optimizer_groups(network, protocol.weight_decay),
            lr=self._lr,
            momentum=protocol.momentum,
            nesterov=protocol.nesterov,
            fused=True,
        )
        self._sites = sites_of(network)
        picks = bool(picking_sites(network))
        self.schedule = Schedule(network, self.total_steps, self.optimizer) if picks else None
        own = len(range(protocol.batch)[self._part])
        self._order = torch.zeros(self.steps_per_epoch, own, dtype=torch.int64, device=device)
        self._draws = torch.zeros_like(self._order)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._mean, self._std = (torch.tensor(values, device=device) for values in (images.mean, images.std))
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)
        self._captures = device.type == "cuda" and ranks.count == 1
        self._replay: Callable[[], None] | None = None
        self._read_by_graph: list[Any] = []
        self._directly = 0
        self._laid_out = -1

    @property
    def epochs_done(self) -> int:
        """The number of completed epochs."""
        return self.steps_done // self.steps_per_epoch

    def lr(self, step: int) -> float:
        """The learning rate of a step (from 0): a cosine from the protocol's rate to 0 at the end of the run."""
        return self.protocol.lr * 0.5 * (1 + math.cos(math.pi * step / self.total_steps))

    def step(self) -> None:
        """Take one step, without waiting for the device."""
        epoch, position = divmod(self.steps_done, self.steps_per_epoch)
        if position == 0:
            self._totals.zero_()
        if epoch != self._laid_out:
            self._load_epoch(epoch, position)
        self._lr.fill_(self.lr(self.steps_done))
        if self._replay is not None:
            self._replay()
        else:
            self._work()
            self._directly += 1
        if self.schedule is not None:
            before = self._routing()
            self.schedule.step()
            if self._routing() != before:
                self._forget_graph()
        self.steps_done += 1
        if self._captures and self._replay is None and self._directly >= WARM_UP:
            self._capture()

    def totals(self) -> tuple[float, float]:
        """The epoch's mean loss and accuracy so far, over all ranks. Waits for the device."""
        steps = (self.steps_done - 1) % self.steps_per_epoch + 1
        loss, right = mean_over_ranks(self._totals).tolist()
        return loss / steps, right / (steps * self._order.shape[1])

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, except seed and epoch. All ranks must call this."""
        state = {f"{_MODEL}{name}": tensor for name, tensor in self.network.state_dict().items()}
        for name, parameter in self.network.named_parameters():
            momentum = (
                self.optimizer.state[parameter].get("momentum_buffer") if parameter in self.optimizer.state else None
            )
            if momentum is not None:
                state[f"{_MOMENTUM}{name}"] = momentum
        if self.schedule is not None:
            running = self.schedule.state_dict()
            state |= {f"{_SCHEDULE}{name}": one for name, one in running.items() if isinstance(one, Tensor)}
        state[_TOTALS] = mean_over_ranks(self._totals)
        return state

    def load(self, steps_done: int, state: Mapping[str, Tensor]) -> None:
        """Resume from a `state` that was taken after `steps_done` steps."""
        self.network.load_state_dict(_named(state, _MODEL))
        momenta = _named(state, _MOMENTUM)
        for name, parameter in self.network.named_parameters():
            if name in momenta:
                own = torch.empty_like(parameter).copy_(momenta[name])  # in the parameter's memory order
                self.optimizer.state[parameter]["momentum_buffer"] = own
        if self.schedule is not None:
            at = {"step": steps_done}
            self.schedule.load_state_dict({**self.schedule.state_dict(), **at, **_named(state, _SCHEDULE)})
        self._totals.copy_(state[_TOTALS])
        self.steps_done, self._laid_out = steps_done, -1
        self._forget_graph()

    def autocast(self) -> torch.autocast:
        """bf16 on a GPU if the protocol has it."""
        return autocast(self.device, self.protocol.precision == "bf16")

    def _load_epoch(self, epoch: int, position: int) -> None:
        """Copy the order and the crops of an epoch's images to the device, and set the position to one of its steps."""
        order, draws = self._draw(epoch)
        self._order.copy_(order)
        self._draws.copy_(draws)
        self._position.fill_(position)
        self._laid_out = epoch

    def _draw(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The order and the crops of an epoch's images, this rank's part of each batch: (steps, own) on the CPU."""
        batch, used = self.protocol.batch, self.steps_per_epoch * self.protocol.batch
        order = epoch_order(len(self.images.train_y), self.seed, epoch)[:used].view(-1, batch)
        draws = epoch_draws(used, self.seed, epoch).view(-1, batch)
        return order[:, self._part], draws[:, self._part]

    def _work(self) -> None:
        images = self.images
        chosen = self._order.index_select(0, self._position).squeeze(0)
        drawn = self._draws.index_select(0, self._position).squeeze(0)
        x = augmented(images.train_x.index_select(0, chosen), self._mean, self._std, drawn)
        y = images.train_y.index_select(0, chosen)
        with self.autocast():
            answers = self._forward(x)
            loss = F.cross_entropy(answers, y)
            total = loss if self.schedule is None else loss + penalty(self.network)
        total.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            self._totals += torch.stack([loss.detach().double(), (answers.argmax(1) == y).sum().double()])
            self._position += 1

    def _capture(self) -> None:
        self._replay = captured(self._work, self.device)
        # A graph reads tables that the router and the sites replace at times, for example in an evaluation. The tables
        # that the graph reads must live as long as the graph.
        routers = routers_of(self._sites)
        self._read_by_graph = [dict(vars(part)) for router in routers for part in (router, router.gathered)]
        self._read_by_graph += [site.picked for site in self._sites]

    def _forget_graph(self) -> None:
        if self._replay is not None:
            torch.cuda.synchronize(self.device)  # the graph may still be running
        self._replay, self._read_by_graph, self._directly = None, [], 0

    def _routing(self) -> tuple[tuple[bool, int], ...]:
        """A tuple that changes when a warm-up ends or a candidate is dropped, also in a single channel."""
        return tuple((site.router.warming_up, site.dropped_at._version) for site in self._sites)


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of the images in an epoch, int64 (count,): the same on every device, rank and resumed run.

    >>> epoch_order(4, seed=0, epoch=1)
    tensor([1, 2, 3, 0])
    """
    return torch.randperm(count, generator=generator_of(f"order, seed {seed}, epoch {epoch}"))


def _named(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
