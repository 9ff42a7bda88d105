"""Tests of the trainer on a GPU: the step is one CUDA graph with unchanged results, and a resumed run is
bit-identical.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from flexact.studies.cifar.methods import METHODS, build
from flexact.studies.cifar.protocol import Cell, Protocol
from flexact.studies.cifar.train import Stopped, train_cell
from flexact.studies.cifar.training import Training
from flexact.studies.cifar_data import data
from flexact.studies.cifar_data.data import Images
from flexact.studies.cuda_graph import study_stream
from flexact.studies.grid.study import picked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA = torch.device("cuda")
PROTOCOL = Protocol(
    epochs=4, batch=32, lr=0.02, width=16, evaluate_every=2, checkpoint_minutes=0, changes={"round_steps": 10}
)
"""An epoch has 15 steps, and the weights are rewound after step 20, in the second epoch of picking."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, write_cifar: Callable[..., Path]) -> Images:
    folder = write_cifar(tmp_path_factory.mktemp("data"), "cifar10", train=500, test=100)
    return data.load("cifar10", folder, partial=True)


@pytest.mark.parametrize("method", [*METHODS, "flexact-all after a warm-up", "flexact-all of the paper"])
def test_a_replayed_step_equals_the_step_that_was_captured(method: str, images: Images) -> None:
    states, losses = [], []
    method, _, waits = method.partition(" ")
    protocol = PROTOCOL
    if waits == "after a warm-up":
        protocol = dataclasses.replace(PROTOCOL, changes={"init": "original", "warmup": 0.3})
    elif waits:
        protocol = dataclasses.replace(PROTOCOL, policy="paper", candidates=None, changes={})
    for captures in (False, True):
        with study_stream(CUDA):
            torch.manual_seed(0)
            network = build("resnet18", method, 10, protocol.config(0), protocol.width)
            network = network.to(CUDA, memory_format=torch.channels_last)
            training = Training(network, images.to(CUDA), protocol, 0, CUDA)
            training._captures = captures
            replays = 0
            while not training.is_done:
                replays += training.graph is not None
                training.step()
            assert training.steps_done == training.total_steps
            assert (replays > training.total_steps // 2) == captures
            losses.append(training.totals())
            states.append(training.network.state_dict())
    assert losses[0] == losses[1]
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("method", ["relu", "flexact-all"])
def test_a_resumed_run_is_bit_identical(method: str, images: Images, tmp_path: Path) -> None:
    cell = Cell("cifar10", "resnet18", method, 0)
    train_cell(cell, PROTOCOL, images, tmp_path / "straight", CUDA)
    for steps in (12, 8, 20):  # in the middle of a round, at the rewind, and after it
        left = iter([False] * steps + [True])
        with pytest.raises(Stopped):
            train_cell(cell, PROTOCOL, images, tmp_path / "stopped", CUDA, stop=lambda left=left: next(left))
    train_cell(cell, PROTOCOL, images, tmp_path / "stopped", CUDA)
    names = [tmp_path / run / "network.safetensors" for run in ("stopped", "straight")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_the_final_network_equals_that_of_the_cell_with_the_picked_activation(images: Images, tmp_path: Path) -> None:
    protocol = dataclasses.replace(PROTOCOL, precision="float32", lr=0.002)
    ours = train_cell(Cell("cifar10", "resnet18", "flexact-all", 0), protocol, images, tmp_path / "picked", CUDA)
    (pick,) = set(picked(ours.picks).values())
    fixed = train_cell(Cell("cifar10", "resnet18", pick, 0), protocol, images, tmp_path / "fixed", CUDA)
    assert ours.loss == fixed.loss


def test_cells_in_threads_have_the_results_of_cells_one_after_another(images: Images, tmp_path: Path) -> None:
    """Each thread trains on its own stream, and only one at a time captures or allocates."""
    cells = [Cell("cifar10", "resnet18", method, seed) for method in ("relu", "flexact-all") for seed in (0, 1, 2)]
    for cell in cells:
        train_cell(cell, PROTOCOL, images, tmp_path / "alone" / cell.name, CUDA)
    with ThreadPoolExecutor(len(cells)) as threads:
        for future in [
            threads.submit(train_cell, cell, PROTOCOL, images, tmp_path / "threads" / cell.name, CUDA) for cell in cells
        ]:
            future.result()
    for cell in cells:
        alone, shared = (tmp_path / run / cell.name / "network.safetensors" for run in ("alone", "threads"))
        assert alone.read_bytes() == shared.read_bytes(), cell.name
