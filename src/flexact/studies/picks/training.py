"""Trains one network of a task. On a GPU a step is a CUDA graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flexact import param_groups
from flexact.errors import FlexActError
from flexact.routing.sites import sites_of
from flexact.studies.cuda_graph import Graph, GraphedTraining, wait
from flexact.studies.grid.cell_task import Stopped
from flexact.studies.named_seeds import seed_of
from flexact.studies.picks.task import Problem, Task

WARM_UP_STEPS = 100
"""Warm-up steps of AdamW's learning rate; a quarter of the run if that is shorter."""
REPLAYS_AT_ONCE = 50
"""Replays of a captured step between two synchronizations."""
PICKING_STEPS_AT_ONCE = 10
"""Steps between two releases of the device lock, for a network that picks."""


class Diverged(FlexActError):
    """A loss or a score is not finite."""


def never() -> bool:
    """Return False: the default of a run that is never stopped."""
    return False


class Training(GraphedTraining):
    """A network in training.

    steps: the length of a run, over which the learning rate falls to 0. A longer run starts over.
    """

    seconds = 0.0
    """Time spent in `run`."""

    def __init__(
        self, task: Task, problem: Problem, network: nn.Module, seed: int, device: torch.device, steps: int
    ) -> None:
        order = problem.order(steps, torch.Generator().manual_seed(seed_for("order", seed)))
        super().__init__(network.to(device), device, order, [_rate(task, step, steps) for step in range(steps)])
        self.task, self.problem = task, problem
        self.optimizer = task.make_optimizer(param_groups(network, weight_decay=task.weight_decay), self._lr, device)
        logits = {id(site.logits) for site in sites_of(network)}
        self._weights = [one for one in network.parameters() if id(one) not in logits]
        self._tried: dict[int, Graph] = {}
        """The captured steps of the candidates of a trial, which trains each of them several times."""

    def run(self, steps: int, stop: Callable[[], bool] = never) -> None:
        """Train for a number of steps and synchronize. Raises `Stopped` if `stop()` returns True between steps."""
        wait(self.device)
        start = time.perf_counter()
        done = 0
        while done < steps:
            if stop():
                raise Stopped(f"stopped after {done} of {steps} steps.")
            if self.graph is not None and (self.schedule is None or self.schedule.committed):
                done += self._replayed(self.graph, min(steps - done, REPLAYS_AT_ONCE))
            else:
                self.step()
                done += 1
                if done % PICKING_STEPS_AT_ONCE == 0:
                    wait(self.device)
        wait(self.device)
        self.seconds += time.perf_counter() - start

    def _replayed(self, graph: Graph, steps: int) -> int:
        """Replay a number of steps, then let other threads use the device. The lock is held during the launches,
        because torch's generator refuses a replay while any thread captures."""
        for _ in range(steps):
            graph.replay()
        if self.schedule is not None:  # counted on the host while the device works
            for _ in range(steps):
                self.schedule.step(self.loss)
        wait(self.device)
        return steps

    @torch.no_grad()
    def evaluate(self, what: Callable[[nn.Module], Any]) -> float:
        """Return a measurement of the network in eval mode. Raises `Diverged` if it or the last loss is not finite."""
        self.network.eval()
        with self.task.matrix_products(self.device), self.task.autocast(self.device):
            value = float(what(self.network))
        self.network.train()
        loss = float(self.loss)
        if not (math.isfinite(loss) and math.isfinite(value)):
            raise Diverged(
                f"a network of {self.task.name} diverged: its training loss is {loss}, its evaluation {value}. Give "
                "the task a smaller learning rate, or leave the candidate out."
            )
        return value

    def _forget_graph(self, tried: int | None = None) -> None:
        """Store the graph of a candidate of a trial for its next rung, and restore the graph of the next candidate."""
        if tried is not None and self.graph is not None:
            self._tried[tried] = self.graph
        super()._forget_graph(tried)
        if tried is None or self.schedule is None:
            return
        router = self.schedule.router
        candidate = int(router.sites[0].likeliest()[0]) if router.committed else router.trying
        if candidate not in self._tried:
            return
        self.graph = self._tried[candidate]
        self.loss = self.graph.loss
        for one in self._weights:
            own = self.graph.states[one]
            for key, value in self.optimizer.state[one].items():
                own[key].copy_(value)
            self.optimizer.state[one] = own

    def _work(self) -> None:
        rows = self._next_row()
        with self.task.matrix_products(self.device):
            with self.task.autocast(self.device):
                loss = self.problem.loss(self.network, rows)
            loss.backward()
        if self.task.clip is not None:
            nn.utils.clip_grad_norm_(self._weights, self.task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()


def _rate(task: Task, step: int, steps: int) -> float:
    """Return the learning rate of a step: a cosine to 0, for AdamW after a warm-up."""
    rise = min(1.0, (step + 1) / min(WARM_UP_STEPS, max(steps // 4, 1))) if task.optimizer == "adamw" else 1.0
    return task.lr * rise * 0.5 * (1 + math.cos(math.pi * step / steps))


def seed_for(kind: str, seed: int) -> int:
    """Return the seed of one kind of random numbers for a seed of the grid."""
    return seed_of(f"picks, {kind}, seed {seed}")
