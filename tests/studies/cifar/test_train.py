"""Tests of the trainer of the image study: its training, its files, and that a resumed run is bit-identical."""

from __future__ import annotations

import csv
import errno
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flexact import FlexActError, Recorder, commit, extract
from flexact.candidates.registry import lookup
from flexact.routing.sites import sites_of
from flexact.studies import cuda_graph
from flexact.studies.cifar.methods import METHODS, build
from flexact.studies.cifar.protocol import Cell, Protocol, Result
from flexact.studies.cifar.train import Stopped, train_cell
from flexact.studies.cifar.training import Training, epoch_order
from flexact.studies.cifar_data import data
from flexact.studies.cifar_data.augment import augmented, epoch_draws, normalised
from flexact.studies.cifar_data.data import Images
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.grid.study import picked

CPU = torch.device("cpu")
SMALL = {"resnet18": (1, 1)}
SHORT_ROUNDS = {"round_steps": 4}
"""Picking from four candidates takes two rounds, so the weights are rewound after step 8, in the second epoch."""
PROTOCOL = Protocol(epochs=4, batch=8, lr=0.02, width=4, evaluate_every=2, checkpoint_minutes=0, changes=SHORT_ROUNDS)
PICKS = Cell("cifar10", "resnet18", "flexact-all", 0)
RELU = Cell("cifar10", "resnet18", "relu", 0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Uses one thread: rounding depends on the number of threads, and a busy machine is slow with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_cifar: Callable[..., Path]) -> Path:
    """A small part of a data set in the official layout: 45 images, so an epoch with batches of 8 drops 5."""
    return write_cifar(tmp_path_factory.mktemp("data"), "cifar10", train=45, test=30)


@pytest.fixture(scope="module")
def images(folder: Path) -> Images:
    return data.load("cifar10", folder, partial=True)


@mock.patch.dict(BLOCKS, SMALL)
def trained(cell: Cell, images: Images, folder: Path, protocol: Protocol = PROTOCOL, **keywords: Any) -> Result:
    return train_cell(cell, protocol, images, folder, CPU, **keywords)


@mock.patch.dict(BLOCKS, SMALL)
def training_of(method: str, images: Images, protocol: Protocol = PROTOCOL) -> Training:
    torch.manual_seed(0)
    network = build("resnet18", method, images.classes, protocol.config(0), protocol.width)
    return Training(network, images, protocol, 0, CPU)


def lines(folder: Path) -> list[dict[str, str]]:
    """Returns a curve.csv without its times."""
    with (folder / "curve.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in ("seconds", "step_ms")} for row in csv.DictReader(file)]


def assert_same_run(folder: Path, other: Path) -> None:
    assert (folder / "network.safetensors").read_bytes() == (other / "network.safetensors").read_bytes()
    assert lines(folder) == lines(other)
    if (other / "history.jsonl").exists():
        assert Recorder.load(folder / "history.jsonl") == Recorder.load(other / "history.jsonl")


class After:
    """Returns a `stop` callback that returns True after this many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, images: Images) -> tuple[Path, Result]:
    """The folder and the outcome of an uninterrupted run."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("straight")
    return folder, trained(PICKS, images, folder)


# Training


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str, images: Images) -> None:
    training = training_of(method, images)
    before = {name: parameter.clone() for name, parameter in training.network.named_parameters()}
    training.step()
    loss, right = training.totals()
    assert math.isfinite(loss)
    assert 0 <= right <= 1
    moved = {
        name for name, parameter in training.network.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert "conv1.weight" in moved
    assert any("relu" in name for name in moved) or method == "relu"


@mock.patch.dict(BLOCKS, SMALL)
def test_the_first_step_equals_that_of_a_loop_written_by_hand(images: Images) -> None:
    training = training_of("relu", images)
    torch.manual_seed(0)
    network = extract(build("resnet18", "relu", images.classes, None, PROTOCOL.width))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    order = epoch_order(45, seed=0, epoch=0)
    draws = epoch_draws(40, seed=0, epoch=0)
    losses = []
    for number in range(3):
        chosen = order[8 * number : 8 * number + 8]
        x = augmented(images.train_x[chosen], images.mean, images.std, draws[8 * number : 8 * number + 8])
        optimizer.param_groups[0]["lr"] = 0.02 * (1 + math.cos(math.pi * number / 20)) / 2
        loss = nn.functional.cross_entropy(network(x), images.train_y[chosen])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        training.step()
        assert training.totals()[0] == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    for name, parameter in network.named_parameters():
        assert torch.allclose(training.network.get_parameter(name), parameter, atol=1e-6)


def test_the_order_differs_by_epoch_and_seed_and_the_incomplete_batch_is_dropped(images: Images) -> None:
    orders = [epoch_order(45, seed, epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert all(sorted(order) == list(range(45)) for order in orders)
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2]
    assert training_of("relu", images).steps_per_epoch == 5


@mock.patch.dict(BLOCKS, SMALL)
def test_the_accuracy_equals_that_of_the_plain_network(straight: tuple[Path, Result], images: Images) -> None:
    folder, outcome = straight
    plain = extract(build("resnet18", "relu", images.classes, None, PROTOCOL.width)).eval()
    for site, pick in picked(outcome.picks).items():
        parent, _, name = site.rpartition(".")
        setattr(plain.get_submodule(parent), name, lookup(pick).module())
    plain.load_state_dict(load_file(folder / "network.safetensors"))
    with torch.no_grad():
        answers = plain(normalised(images.test_x, images.mean, images.std)).argmax(1)
    assert outcome.accuracy == pytest.approx(100 * (answers == images.test_y).float().mean().item())
    assert list(picked(outcome.picks)) == ["layer1.0.relu", "layer2.0.relu"]


def test_a_run_writes_a_curve_and_the_history_of_its_picks(straight: tuple[Path, Result]) -> None:
    folder, _ = straight
    curve = lines(folder)
    assert [line["epoch"] for line in curve] == ["1", "2", "3", "4"]
    assert [bool(line["test_accuracy"]) for line in curve] == [False, True, False, True]
    assert float(curve[1]["lr"]) == pytest.approx(0.02 * (1 + math.cos(math.pi * 9 / 20)) / 2)
    history = Recorder.load(folder / "history.jsonl")
    assert [record["step"] for record in history] == [0, 5, 8, 13, 18, 23, 28]  # the weights are rewound at 8
    assert [record["epoch"] for record in history] == pytest.approx([0, 1, 1.6, 2.6, 3.6, 4.6, 5.6])
    assert sorted(path.name for path in folder.iterdir()) == ["curve.csv", "history.jsonl", "network.safetensors"]


def test_a_graph_is_captured_again_when_candidates_are_dropped(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[int] = []

    def captured(work: Callable[[], None], *_: Any) -> tuple[Callable[[], None], list[Any]]:
        captures.append(graphed.steps_done)
        return work, []

    protocol = _changed({"changes": {"round_steps": 9}})
    eager, graphed = (training_of("flexact-all", images, protocol) for _ in range(2))
    monkeypatch.setattr(cuda_graph, "captured_by_thread", captured)
    graphed._captures = True
    while not eager.is_done:
        eager.step()
        graphed.step()
    assert captures == [3, 12, 21]  # rounds end at 9 and 18 of 38 steps; three uncaptured steps follow each
    ours, theirs = graphed.network.state_dict(), eager.network.state_dict()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


# Picking, then training as with picks that were known from the start


@pytest.mark.parametrize("candidates", [("relu", "leaky_relu", "gelu", "silu"), ("silu", "gelu")])
def test_the_final_network_equals_that_of_the_cell_with_the_picked_activation(
    candidates: tuple[str, ...], images: Images, tmp_path: Path
) -> None:
    protocol = _changed({"candidates": candidates})
    outcome = trained(Cell("cifar10", "resnet18", "flexact-all", 1), images, tmp_path / "picked", protocol)
    (pick,) = set(picked(outcome.picks).values())  # one for all sites
    assert pick in candidates
    fixed = trained(Cell("cifar10", "resnet18", pick, 1), images, tmp_path / "fixed", protocol)
    assert_same_run(tmp_path / "picked", tmp_path / "fixed")
    assert (outcome.accuracy, outcome.loss) == (fixed.accuracy, fixed.loss)


def test_a_penultimate_pick_is_trained_as_if_it_had_been_known_from_the_start(images: Images) -> None:
    protocol = _changed({"candidates": ("silu", "gelu")})
    picking, known = (training_of("flexact-penultimate", images, protocol) for _ in range(2))
    while not picking.is_done:
        picking.step()
    (picked,), (site,) = sites_of(picking.network), sites_of(known.network)
    site.drop(torch.tensor([[name not in picked.picks for name in site.candidates]]), step=0)
    known.network, known.schedule = commit(known.network), None
    while not known.is_done:
        known.step()
    ours, theirs = (extract(one.network).state_dict() for one in (picking, known))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_picking_is_added_to_the_epochs_and_counted(images: Images, tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="after step 27 of 28"):
        trained(PICKS, images, tmp_path, stop=After(27))
    picking_ms = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["picking_ms"]
    outcome = trained(PICKS, images, tmp_path)
    assert outcome.epochs == 4
    assert len(picking_ms) == 2  # the first epoch, and the steps until the rewind
    with (tmp_path / "curve.csv").open(newline="") as file:
        median = sorted(float(row["step_ms"]) for row in csv.DictReader(file))
    assert outcome.step_ms == pytest.approx((median[1] + median[2]) / 2 + min(picking_ms) * 8 / 20)


def test_picking_longer_than_the_epochs_repeats_them(images: Images, tmp_path: Path) -> None:
    protocol = _changed({"epochs": 1, "evaluate_every": 1, "changes": {"round_steps": 4, "commit_at": 0.9}})
    outcome = trained(PICKS, images, tmp_path / "picked", protocol)
    assert Recorder.load(tmp_path / "picked" / "history.jsonl")[-1]["step"] == 8 + 5
    trained(
        Cell("cifar10", "resnet18", picked(outcome.picks)["layer1.0.relu"], 0), images, tmp_path / "fixed", protocol
    )
    assert_same_run(tmp_path / "picked", tmp_path / "fixed")


def test_a_blend_that_diverges_keeps_relu_and_restarts(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def broken_once(answers: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return cross_entropy(answers, y) * (torch.nan if len(calls) == 3 else 1)

    cross_entropy = nn.functional.cross_entropy
    with monkeypatch.context() as patched:
        patched.setattr(nn.functional, "cross_entropy", broken_once)
        with pytest.warns(UserWarning, match="every site keeps its original function"):
            outcome = trained(PICKS, images, tmp_path / "picked")
    assert set(picked(outcome.picks).values()) == {"relu"}
    assert len(calls) == 3 + 20
    trained(RELU, images, tmp_path / "fixed")
    assert_same_run(tmp_path / "picked", tmp_path / "fixed")


# Resuming


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("relu", {}),
        ("flexact-all", {}),
        ("flexact-all", {"policy": "paper", "changes": {}}),
        ("flexact-all", {"changes": {**SHORT_ROUNDS, "granularity": "channel"}}),
    ],
)
def test_a_run_resumed_in_the_middle_of_epochs_is_bit_identical(
    method: str, changes: dict[str, Any], images: Images, tmp_path: Path
) -> None:
    cell, protocol = Cell("cifar10", "resnet18", method, 3), _changed(changes)
    trained(cell, images, tmp_path / "straight", protocol)
    for steps in (3, 4, 1, 1, 4):  # also right before and right after the rewind
        with pytest.raises(Stopped, match=r"start it again to resume from .*checkpoint\.pt"):
            trained(cell, images, tmp_path / "stopped", protocol, stop=After(steps))
    trained(cell, images, tmp_path / "stopped", protocol)
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")


def _changed(changes: dict[str, Any]) -> Protocol:
    return Protocol.from_dict({**PROTOCOL.to_dict(), **changes})


# Errors


@pytest.mark.parametrize("file", ["checkpoint.pt", "curve.csv"])
def test_a_full_disk_stops_the_run_and_damages_no_file(
    file: str, straight: tuple[Path, Result], images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [3]

    def no_room(source: Path, target: Path) -> None:
        left[0] -= Path(target).name == file
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        replace(source, target)

    replace = os.replace
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", no_room)
        with pytest.raises(OSError, match="No space left on device"):
            trained(PICKS, images, tmp_path)
    trained(PICKS, images, tmp_path)
    assert_same_run(tmp_path, straight[0])


def test_a_damaged_checkpoint_is_refused_by_name(images: Images, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        trained(RELU, images, tmp_path, stop=After(2))
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    for content in (b"", b"{}", b"\x80\x04\x95", whole[:-100], whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(FlexActError, match=r"checkpoint\.pt is damaged, or does not fit this run"):
            trained(RELU, images, tmp_path)
    path.write_bytes(whole)
    trained(RELU, images, tmp_path)


def test_a_run_resumed_on_another_device_names_both_and_reports_no_time(images: Images, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        trained(RELU, images, tmp_path, stop=After(2))
    path = tmp_path / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    assert state["devices"] == ["cpu"]
    torch.save(state | {"devices": ["NVIDIA H200"]}, path)
    found = trained(RELU, images, tmp_path)
    assert found.device == "NVIDIA H200 + cpu"
    assert math.isnan(found.step_ms)


def test_a_nan_loss_stops_the_cell_and_keeps_the_last_good_checkpoint(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        trained(RELU, images, tmp_path, stop=After(7))
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def broken(answers: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return answers.mean() * torch.nan

    with monkeypatch.context() as patched:
        patched.setattr(nn.functional, "cross_entropy", broken)
        with pytest.raises(
            FlexActError, match=r"^the loss of epoch 2 is nan.*is kept\. Try a smaller --lr, with another --out\."
        ):
            trained(RELU, images, tmp_path)
        with pytest.raises(
            FlexActError, match="a weight after step 8"
        ):  # also where a checkpoint is due before the epoch's end
            trained(RELU, images, tmp_path, stop=After(1))
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    trained(RELU, images, tmp_path)
