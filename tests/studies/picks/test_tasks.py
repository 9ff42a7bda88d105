"""Tests of the tasks: each can be trained, plainly and with Flex-Act, and describes itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flexact import FlexConfig, Schedule, convert
from flexact.routing.sites import sites_of
from flexact.studies.cifar_data.data import Images, load
from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks import TASKS, cifar, gpt, parts, physics, regression
from flexact.studies.picks.train import RunContext
from flexact.studies.picks.training import Training

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, write_cifar: Callable[..., Path]) -> Images:
    """A small CIFAR-100."""
    folder = tmp_path_factory.mktemp("data")
    write_cifar(folder, "cifar100", train=100, test=20)
    return load("cifar100", folder, partial=True)


@pytest.fixture(params=list(TASKS))
def task(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Task:
    """Each task, with batches and scores that are feasible on a CPU."""
    monkeypatch.setattr(cifar.Classification, "batch", 2)
    monkeypatch.setattr(gpt, "BATCH", 2)
    monkeypatch.setattr(gpt, "WINDOWS", {"held_out": 2, "test": 3})
    return TASKS[request.param]


def context_of(task: Task, data: Images, seed: int = 0) -> RunContext:
    return RunContext(task, task.problem(0, CPU, data), seed, CPU, Path("unused"), task.name)


def test_a_task_trains_its_plain_and_its_converted_network(task: Task, data: Images) -> None:
    context = context_of(task, data)
    problem, names = context.problem, context.sites
    assert len(names) >= 3
    plain = context.plain(context.everywhere(task.candidates[1]), 2)
    plain.run(2)
    assert math.isfinite(plain.evaluate(problem.score))
    assert math.isfinite(plain.evaluate(problem.held_out_loss))

    flexible = convert(context.network(), config=FlexConfig(candidates=task.candidates))
    assert [site.name for site in sites_of(flexible)] == names
    training = Training(task, problem, flexible, 0, CPU, 2)
    training.schedule = Schedule(flexible, 2, training.optimizer)
    training.run(2)
    assert training.schedule.committed
    assert math.isfinite(training.evaluate(problem.score))


def test_the_first_candidate_is_the_networks_own_activation(task: Task, data: Images) -> None:
    context = context_of(task, data)
    network, replaced = context.network(), context.plain(context.everywhere(task.original), 1).network
    for name in context.sites:
        assert type(replaced.get_submodule(name)) is type(network.get_submodule(name))
    assert len(set(task.candidates)) == len(task.candidates) >= 4


def test_a_seed_decides_the_weights_and_the_order_of_the_data(task: Task, data: Images) -> None:
    problem = task.problem(0, CPU, data)
    first, again, other = (next(context_of(task, data, seed).network().parameters()) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    orders = [problem.order(5, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert all(len(order) == 5 for order in orders)


def test_names_match_the_tasks() -> None:
    assert all(name == task.name for name, task in TASKS.items())
    assert len(TASKS) == 10


def test_tasks_that_share_a_network_differ_in_their_candidates_only() -> None:
    shared: dict[str, list[Task]] = {}
    for task in TASKS.values():
        if task.network is not None:
            blank = dataclasses.replace(task, name="", title="", candidates=())
            shared.setdefault(task.network, []).append(blank)
    assert [len(tasks) for tasks in shared.values()] == [2]
    assert all(one == tasks[0] for tasks in shared.values() for one in tasks)


def test_scored_data_are_never_trained_on() -> None:
    pixels = regression.Pixels(0, CPU, None)
    places = [tuple(row) for part in pixels.x.values() for row in part[:, :2].tolist()]
    assert len(set(places)) == len(places)
    problem = gpt.Bytes(0, CPU, None)
    assert sum(map(len, problem.parts.values())) == len(gpt.text())


def test_the_solution_of_the_physics_task_satisfies_burgers_equation() -> None:
    x, t = torch.meshgrid(torch.linspace(-0.9, 0.9, 37).double(), torch.linspace(0.1, 0.95, 18).double(), indexing="ij")
    h = 1e-4

    def u(dx: float = 0.0, dt: float = 0.0) -> torch.Tensor:
        return physics.solution(x + dx, t + dt)

    u_t, u_x = (u(dt=h) - u(dt=-h)) / (2 * h), (u(dx=h) - u(dx=-h)) / (2 * h)
    u_xx = (u(dx=h) - 2 * u() + u(dx=-h)) / h**2
    residual = u_t + u() * u_x - physics.VISCOSITY * u_xx
    assert residual.abs().max() < 1e-3 * u_t.abs().max()
    start = torch.linspace(-1, 1, 21)
    assert torch.allclose(physics.solution(start, torch.zeros(21)), -torch.sin(math.pi * start).double(), atol=1e-6)
    edges = physics.solution(torch.tensor([-1.0, 1.0]), torch.tensor([0.5, 0.5]))
    assert edges.abs().max() < 1e-6


def test_epochs_see_every_item_once_before_any_twice() -> None:
    order = parts.epochs(10, 6, 5, torch.Generator().manual_seed(0))
    assert order.shape == (6, 5)
    for start in (0, 2, 4):
        assert sorted(order[start : start + 2].flatten().tolist()) == list(range(10))
