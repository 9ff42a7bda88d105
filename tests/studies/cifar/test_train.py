"""The trainer of the image study: what it trains, what it leaves behind, and that a stopped run goes on bit for bit."""

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flexact import FlexActError, Recorder, commit, extract
from flexact.candidates import lookup
from flexact.config import PAPER_CANDIDATES
from flexact.routing.sites import sites_of
from flexact.studies.cifar import checkpoint, step, train
from flexact.studies.cifar.methods import METHODS, build
from flexact.studies.cifar.protocol import Cell, Protocol
from flexact.studies.cifar.ranks import Ranks
from flexact.studies.cifar.step import Training, epoch_order
from flexact.studies.cifar.study import figures
from flexact.studies.cifar.train import NanLoss, Outcome, Stopped, train_cell
from flexact.studies.cifar_data import data
from flexact.studies.cifar_data.augment import augmented, normalised
from flexact.studies.cifar_data.data import Images
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.grid.cell_task import LOCK, is_locked, locked

CPU = torch.device("cpu")
SMALL = {"resnet18": (1, 1)}
SHORT_ROUNDS = {"round_steps": 4}
"""Four candidates are picked from in two rounds, so the weights are rewound after step 8, in the second epoch."""
BY_SITE = {"share": "site", "rewind": False}
PROTOCOL = Protocol(epochs=4, batch=8, lr=0.02, width=4, evaluate_every=2, checkpoint_minutes=0, changes=SHORT_ROUNDS)
PICKS = Cell("cifar10", "resnet18", "flexact-all", 0)
RELU = Cell("cifar10", "resnet18", "relu", 0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rounding depends on the number of threads, and a busy machine is slow with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_cifar: Callable[..., Path]) -> Path:
    """A small part of a set in the official layout: 45 images, of which an epoch of batches of 8 leaves out 5."""
    return write_cifar(tmp_path_factory.mktemp("data"), "cifar10", train=45, test=30)


@pytest.fixture(scope="module")
def images(folder: Path) -> Images:
    return data.load("cifar10", folder, complete=False)


@mock.patch.dict(BLOCKS, SMALL)
def trained(cell: Cell, images: Images, folder: Path, protocol: Protocol = PROTOCOL, **keywords: Any) -> Outcome:
    return train_cell(cell, protocol, images, folder, CPU, **keywords)


@mock.patch.dict(BLOCKS, SMALL)
def training_of(method: str, images: Images, protocol: Protocol = PROTOCOL) -> Training:
    torch.manual_seed(0)
    network = build("resnet18", method, images.classes, protocol.config(0), protocol.width)
    return Training(network, images, protocol, 0, CPU, Ranks())


def lines(folder: Path) -> list[dict[str, str]]:
    """A curve.csv without its times."""
    with (folder / "curve.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in ("seconds", "step_ms")} for row in csv.DictReader(file)]


def assert_same_run(folder: Path, other: Path) -> None:
    assert (folder / "network.safetensors").read_bytes() == (other / "network.safetensors").read_bytes()
    assert lines(folder) == lines(other)
    if (other / "history.jsonl").exists():
        assert Recorder.load(folder / "history.jsonl") == Recorder.load(other / "history.jsonl")


class After:
    """A `stop` that says so after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, images: Images) -> Path:
    """The folder of a run that nothing interrupted."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("straight")
    trained(PICKS, images, folder)
    return folder


# What is trained


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
def test_the_first_step_is_that_of_a_loop_written_by_hand(images: Images) -> None:
    training = training_of("relu", images)
    torch.manual_seed(0)
    network = extract(build("resnet18", "relu", images.classes, None, PROTOCOL.width))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    order = epoch_order(45, seed=0, epoch=0)
    draws = step.epoch_draws(40, seed=0, epoch=0)
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


def test_the_order_is_another_one_each_epoch_and_seed_and_the_incomplete_batch_is_dropped(images: Images) -> None:
    orders = [epoch_order(45, seed, epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert all(sorted(order) == list(range(45)) for order in orders)
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2]
    assert training_of("relu", images).steps_per_epoch == 5


@mock.patch.dict(BLOCKS, SMALL)
def test_the_accuracy_is_that_of_the_plain_network(straight: Path, images: Images) -> None:
    about = json.loads((straight / "checkpoint.json").read_text())
    plain = extract(build("resnet18", "relu", images.classes, None, PROTOCOL.width)).eval()
    for site, pick in about["outcome"]["picks"].items():
        parent, _, name = site.rpartition(".")
        setattr(plain.get_submodule(parent), name, lookup(pick).module())
    plain.load_state_dict(load_file(straight / "network.safetensors"))
    with torch.no_grad():
        answers = plain(normalised(images.test_x, images.mean, images.std)).argmax(1)
    assert about["outcome"]["accuracy"] == pytest.approx(100 * (answers == images.test_y).float().mean().item())
    assert list(about["outcome"]["picks"]) == ["layer1.0.relu", "layer2.0.relu"]


def test_a_run_leaves_a_curve_and_the_history_of_its_picks(straight: Path) -> None:
    curve = lines(straight)
    assert [line["epoch"] for line in curve] == ["1", "2", "3", "4"]
    assert [bool(line["test_accuracy"]) for line in curve] == [False, True, False, True]
    assert float(curve[1]["lr"]) == pytest.approx(0.02 * (1 + math.cos(math.pi * 9 / 20)) / 2)
    history = Recorder.load(straight / "history.jsonl")
    assert [record["step"] for record in history] == [0, 5, 8, 13, 18, 23, 28]  # the weights are rewound at 8
    assert [record["epoch"] for record in history] == pytest.approx([0, 1, 1.6, 2.6, 3.6, 4.6, 5.6])
    assert sorted(path.name for path in straight.iterdir()) == [
        "checkpoint.json",
        "curve.csv",
        "history.jsonl",
        "network.safetensors",
    ]


def test_a_finished_cell_is_not_trained_again(straight: Path, images: Images) -> None:
    heard: list[Any] = []
    before = (straight / "checkpoint.json").stat().st_mtime_ns
    outcome = trained(PICKS, images, straight, report=heard.append)
    assert outcome.epochs == 4
    assert len(outcome.losses) == 4
    assert not heard
    assert (straight / "checkpoint.json").stat().st_mtime_ns == before


def test_a_graph_is_captured_anew_when_candidates_are_dropped(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[int] = []

    def captured(work: Callable[[], None], *_: Any) -> tuple[Callable[[], None], list[Any]]:
        captures.append(graphed.steps_done)
        return work, []

    protocol = _changed({"changes": {"round_steps": 9}})
    eager, graphed = (training_of("flexact-all", images, protocol) for _ in range(2))
    monkeypatch.setattr(step, "captured_by_thread", captured)
    graphed._captures = True
    while not eager.is_done:
        eager.step()
        graphed.step()
    assert captures == [3, 12, 21]  # rounds end at 9 and 18 of 38 steps; three direct steps come after each
    torch.testing.assert_close(graphed.state(), eager.state(), rtol=0, atol=0, equal_nan=True)


# Picking, then training as if the picks had been known


@pytest.mark.parametrize("candidates", [("relu", "leaky_relu", "gelu", "silu"), ("silu", "gelu")])
def test_the_final_network_is_that_of_the_cell_with_the_picked_activation(
    candidates: tuple[str, ...], images: Images, tmp_path: Path
) -> None:
    protocol = _changed({"candidates": candidates})
    outcome = trained(Cell("cifar10", "resnet18", "flexact-all", 1), images, tmp_path / "picked", protocol)
    (pick,) = set(outcome.picks.values())  # one for all sites
    assert pick in candidates
    fixed = trained(Cell("cifar10", "resnet18", pick, 1), images, tmp_path / "fixed", protocol)
    assert_same_run(tmp_path / "picked", tmp_path / "fixed")
    assert (outcome.accuracy, outcome.losses) == (fixed.accuracy, fixed.losses)


def test_a_penultimate_pick_is_trained_as_if_it_had_been_known(images: Images) -> None:
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


def test_picking_comes_on_top_of_the_epochs_and_is_counted(straight: Path) -> None:
    about = json.loads((straight / "checkpoint.json").read_text())
    assert (about["step"], about["outcome"]["epochs"]) == (28, 4)
    assert len(about["picking_ms"]) == 2  # the first epoch, and the steps until the rewind
    median = sorted(line["step_ms"] for line in about["curve"])
    expected = (median[1] + median[2]) / 2 + min(about["picking_ms"]) * 8 / 20
    assert about["outcome"]["step_ms"] == pytest.approx(expected)


def test_picking_longer_than_the_epochs_repeats_them(images: Images, tmp_path: Path) -> None:
    protocol = _changed({"epochs": 1, "evaluate_every": 1, "changes": {"round_steps": 4, "commit_at": 0.9}})
    outcome = trained(PICKS, images, tmp_path / "picked", protocol)
    assert json.loads((tmp_path / "picked" / "checkpoint.json").read_text())["step"] == 8 + 5
    trained(Cell("cifar10", "resnet18", outcome.picks["layer1.0.relu"], 0), images, tmp_path / "fixed", protocol)
    assert_same_run(tmp_path / "picked", tmp_path / "fixed")


def test_a_blend_that_diverges_keeps_relu_and_starts_again(
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
    assert set(outcome.picks.values()) == {"relu"}
    assert len(calls) == 3 + 20
    trained(RELU, images, tmp_path / "fixed")
    assert_same_run(tmp_path / "picked", tmp_path / "fixed")


# Going on


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("relu", {}),
        ("flexact-all", {}),
        ("flexact-all", {"policy": "paper", "changes": {}}),
        ("flexact-all", {"changes": BY_SITE}),
        ("flexact-all", {"changes": {**SHORT_ROUNDS, "granularity": "channel"}}),
    ],
)
def test_a_run_stopped_in_the_middle_of_epochs_goes_on_bit_for_bit(
    method: str, changes: dict[str, Any], images: Images, tmp_path: Path
) -> None:
    cell, protocol = Cell("cifar10", "resnet18", method, 3), _changed(changes)
    trained(cell, images, tmp_path / "straight", protocol)
    for steps in (0, 3, 4, 1, 0, 1, 4, 3):  # also right before and right after the rewind
        with pytest.raises(Stopped, match=r"start it again to resume from .*checkpoint\.json"):
            trained(cell, images, tmp_path / "stopped", protocol, stop=After(steps))
    trained(cell, images, tmp_path / "stopped", protocol)
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")


def _changed(changes: dict[str, Any]) -> Protocol:
    return Protocol.from_dict({**PROTOCOL.to_dict(), **changes})


def test_a_run_that_is_terminated_and_then_killed_goes_on_bit_for_bit(
    folder: Path, images: Images, tmp_path: Path
) -> None:
    out, protocol = tmp_path / "killed", Protocol(epochs=4, batch=8, lr=0.02, width=4, changes=SHORT_ROUNDS)
    train_cell(PICKS, protocol, images, tmp_path / "straight", CPU)
    options = "--dataset cifar10 --model resnet18 --method flexact-all --epochs 4 --batch 8 --lr 0.02 --width 4"
    # A checkpoint about every step: the moment of the kill is then often that of a writing.
    command = [*options.split(), "--checkpoint-minutes", "0.0001", "--partial", "--data", folder, "--out", out]
    command += ["--changes", json.dumps(SHORT_ROUNDS)]

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "flexact.studies.cifar.train", *map(str, command), "--device", "cpu"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = started()
    step_reached(first, out, 2)
    first.send_signal(signal.SIGTERM)
    _, told = first.communicate(timeout=60)
    assert first.returncode == 143, told
    assert "start it again to resume from" in told
    stood = step_of(out)
    second = started()
    step_reached(second, out, stood + 1)
    time.sleep(random.random() / 5)
    second.kill()
    second.communicate(timeout=60)
    train_cell(PICKS, protocol, images, out, CPU)
    assert_same_run(out, tmp_path / "straight")


def step_of(folder: Path) -> int:
    path = folder / "checkpoint.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else -1


def step_reached(process: subprocess.Popen[str], folder: Path, wanted: int) -> None:
    until = time.monotonic() + 60
    while step_of(folder) < wanted:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


# What goes wrong


@pytest.mark.parametrize("file", ["checkpoint-18.safetensors", "checkpoint.json", "curve.csv", "history.jsonl"])
def test_a_full_disk_stops_the_run_and_spoils_nothing(
    file: str, straight: Path, images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(error_at: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(error_at))

    replace = os.replace

    def no_room(source: Path, target: Path) -> None:
        if Path(target).name == file and step_of(tmp_path) == 13:
            full(target)
        replace(source, target)

    def no_line(self: Recorder, step: int, **values: float) -> None:
        if file == "history.jsonl" and step == 18:
            full(tmp_path / file)
        record(self, step, **values)

    record = Recorder.record
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", no_room)
        patched.setattr(Recorder, "record", no_line)
        with pytest.raises(FlexActError, match=rf"{file}: No space left on device"):
            trained(PICKS, images, tmp_path)
    assert step_of(tmp_path) == 13
    assert checkpoint.load(tmp_path) is not None
    trained(PICKS, images, tmp_path)
    assert_same_run(tmp_path, straight)


def test_a_damaged_checkpoint_is_refused_by_name(images: Images, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        trained(PICKS, images, tmp_path, stop=After(7))
    about, tensors = tmp_path / "checkpoint.json", tmp_path / "checkpoint-7.safetensors"
    text, whole = about.read_text(), tensors.read_bytes()
    assert json.loads(text)["tensors"]["file"] == tensors.name

    def refused(told: str) -> None:
        with pytest.raises(FlexActError, match=told):
            trained(PICKS, images, tmp_path)
        tensors.write_bytes(whole)
        about.write_text(text)

    tensors.write_bytes(whole[:-100])
    refused(r"checkpoint-7\.safetensors is missing or damaged")
    tensors.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(r"checkpoint-7\.safetensors is missing or damaged")
    tensors.unlink()
    refused(r"checkpoint-7\.safetensors is missing or damaged")
    about.write_text(text[: len(text) // 2])
    refused(r"checkpoint\.json is not a complete checkpoint")
    about.write_bytes(b"\x80\x04\x95")
    refused(r"checkpoint\.json is not a complete checkpoint")
    about.write_text("{}")
    refused(r"checkpoint\.json is not a complete checkpoint")
    about.write_text(text.replace("checkpoint-7.safetensors", "../checkpoint-7.safetensors"))
    refused("does not name a file of tensors")
    about.write_text(json.dumps({**json.loads(text), "flexact_checkpoint": 2}))
    refused("version 2")
    about.write_text(json.dumps({**json.loads(text), "curve": [{"epoch": 1}]}))
    refused("does not fit this run")
    trained(PICKS, images, tmp_path)


def test_a_checkpoint_of_another_run_is_refused(images: Images, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        trained(RELU, images, tmp_path, stop=After(2))
    with pytest.raises(FlexActError, match="seed: 0 → 1"):
        trained(Cell("cifar10", "resnet18", "relu", 1), images, tmp_path)
    with pytest.raises(FlexActError, match="epochs: 4 → 5"):
        trained(RELU, images, tmp_path, _changed({"epochs": 5}))
    trained(RELU, images, tmp_path, _changed({"checkpoint_minutes": 3.0}))


def test_a_checkpoint_of_other_images_is_refused(images: Images, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        trained(RELU, images, tmp_path, stop=After(2))
    with pytest.raises(FlexActError, match=rf"sha256: {images.sha256} → 0"):
        trained(RELU, dataclasses.replace(images, sha256="0"), tmp_path)
    path = tmp_path / "checkpoint.json"
    about = json.loads(path.read_text())
    del about["sha256"]
    path.write_text(json.dumps(about))
    with pytest.raises(FlexActError, match=r"another configuration \(sha256: None → "):
        trained(RELU, images, tmp_path)


def test_a_run_gone_on_with_on_another_device_names_both_and_no_time(images: Images, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        trained(RELU, images, tmp_path, stop=After(2))
    path = tmp_path / "checkpoint.json"
    about = json.loads(path.read_text())
    assert about.pop("devices") == ["cpu"]
    path.write_text(json.dumps(about | {"devices": ["NVIDIA H200"]}))
    for _ in range(2):  # the second finds it finished
        found = figures(trained(RELU, images, tmp_path))
        assert found["device"] == "NVIDIA H200 + cpu"
        assert math.isnan(found["step_ms"])


def test_a_loss_that_is_no_number_stops_the_cell_and_keeps_the_last_good_checkpoint(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        trained(RELU, images, tmp_path, stop=After(7))
    before = (tmp_path / "checkpoint.json").read_bytes()

    def broken(answers: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return answers.mean() * torch.nan

    with monkeypatch.context() as patched:
        patched.setattr(nn.functional, "cross_entropy", broken)
        with pytest.raises(
            NanLoss, match=r"^the loss of epoch 2 is nan.*of step 7 is kept\. Try a smaller lr, in another --out\."
        ):
            trained(RELU, images, tmp_path)
        with pytest.raises(NanLoss, match="step 7"):  # also where a checkpoint is due before the epoch's end
            trained(RELU, images, tmp_path, stop=After(1))
    assert (tmp_path / "checkpoint.json").read_bytes() == before
    trained(RELU, images, tmp_path)


def test_what_cannot_be_trained_is_refused(images: Images, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FlexActError, match="cifar10"):
        trained(Cell("cifar100", "resnet18", "relu", 0), images, tmp_path)
    with pytest.raises(FlexActError, match="batch of 64"):
        trained(RELU, images, tmp_path, _changed({"batch": 64}))
    command = ["--dataset", "cifar10", "--data", "x", "--out", str(tmp_path)]
    assert train.main([*command, "--method", "rulu"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("flexact: error: ")
    assert "did you mean 'relu'" in told
    assert train.main([*command, "--method", "relu", "--device", "foo"]) == 2
    assert "unknown device 'foo'" in capsys.readouterr().err
    assert train.main([*command, "--method", "relu", "--device", "cuda:99"]) == 2
    assert "there is no cuda:99 here" in capsys.readouterr().err
    assert train.main([*command, "--method", "relu", "--changes", "[2]"]) == 2
    assert "changes must be a dictionary" in capsys.readouterr().err


def test_a_second_run_in_one_folder_is_refused_with_the_process_of_the_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--dataset cifar10 --method relu --epochs 1 --batch 8 --width 4 --partial --device cpu"
    command = [*options.split(), "--data", str(folder), "--out", str(tmp_path)]
    with locked(tmp_path / LOCK, ""):
        assert train.main(command) == 2
    assert f"process {os.getpid()} on " in (told := capsys.readouterr().err)
    assert "give --out another folder, or wait" in told
    assert not (tmp_path / "checkpoint.json").exists()
    assert train.main(command) == 0
    assert not is_locked(tmp_path / LOCK)
    assert train.main([*command[:-1], str(folder / "test_batch.bin")]) == 2
    assert "cannot write" in capsys.readouterr().err


# Several ranks

SCRIPT = """
import os
import sys
import torch
from flexact.routing.sites import sites_of
from flexact.studies.cifar import cell_run, step, train

out, precision = sys.argv[1], getattr(torch, sys.argv[2])
build, augmented, normalised, one_step = cell_run.build, step.augmented, cell_run.normalised, step.Training.step
logits = []

def noted(self):
    one_step(self)
    logits.append(torch.stack([site.logits.detach().clone() for site in sites_of(self.network)]))

cell_run.build = lambda *given: build(*given).to(precision)
step.augmented = lambda *given: augmented(*given, dtype=precision)
cell_run.normalised = lambda *given: normalised(*given, dtype=precision)
step.Training.step = noted
code = train.main([*sys.argv[3:], "--out", out])
torch.save(torch.stack(logits), f"{out}/logits-{os.environ.get('RANK', 0)}.pt")
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("precision", "lr", "tolerance"),
    [
        ("float64", Protocol().lr, 1e-5),
        ("float32", 0.002, 1e-4),  # rounding grows in training: at the protocol's lr to the fourth digit in two steps
    ],
)
def test_two_ranks_train_as_one_process_does(
    precision: str, lr: float, tolerance: float, folder: Path, tmp_path: Path
) -> None:
    # Ten steps are a short run: with the usual step size a logit goes ten up or down in one of them, and where
    # probabilities are 0 or 1 their gradients are rounding. The weight of the KL counts in layers of this width.
    # The rewind comes after three rounds.
    changes = {"round_steps": 3, "policy": {"logit_step_size": 0.2, "alpha": 1000.0}}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = f"--dataset cifar10 --method flexact-all --epochs 2 --batch 8 --lr {lr} --width 4 --norm synced --partial"
    command = [*options.split(), "--evaluate-every", "1", "--device", "cpu", "--data", folder]
    command += ["--candidates", ",".join(PAPER_CANDIDATES), "--changes", json.dumps(changes)]

    def outcome_of(out: Path, *launched: str) -> tuple[dict[str, Any], str]:
        done = subprocess.run(
            [sys.executable, *launched, *map(str, (script, out, precision, *command))],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads((out / "checkpoint.json").read_text())["outcome"], done.stdout

    alone, _ = outcome_of(tmp_path / "alone")
    two, told = outcome_of(tmp_path / "two", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert two["losses"] == pytest.approx(alone["losses"], abs=tolerance)
    assert two["picks"] == alone["picks"]
    first, second = (torch.load(tmp_path / "two" / f"logits-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert torch.equal(first, second)
    assert first[-1].std(1).min() > 0.01
    assert told.count("epoch 1:") == 1  # only the first rank reports


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    assert Ranks(1, 4).part(128) == slice(32, 64)
    with pytest.raises(FlexActError, match="over 3 ranks"):
        Ranks(0, 3).part(128)
