"""Tests of the estimated hours: measured seconds per cell, scaled by a training step on the present device."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flexact.studies import estimates
from flexact.studies.cifar.protocol import Grid
from flexact.studies.estimates import hours, image_step_ms, slowdowns, text_step_ms


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Measurements on a device that is called "card"."""
    steps = [
        ("relu", "", 2.0),
        ("splash", "", 10.0),
        ("flexact-all", "picking", 50.0),
        ("flexact-all", "committed", 3.0),
    ]
    names = ("method", "stage", "step_ms")
    write(tmp_path / "cifar/steps.csv", [dict(zip(names, row, strict=True)) | {"device": "card"} for row in steps])
    network = {"placement": "relu", "way": "relu", "mode": "graph", "quantity": "train_ms"}
    times = [{"network": "resnet18", "value": 3.0, **network}, {"network": "resnet34", "value": 6.0, **network}]
    write(tmp_path / "overhead/overhead.csv", times)
    text = {"task": "rte", "method": "fixed", "seconds": 7.2, "step_ms": 20.0, "device": "card"}
    write(tmp_path / "glue/cost/results.csv", [text])
    return tmp_path


def test_hours_are_cells_times_steps_times_the_measured_seconds_per_step(results: Path) -> None:
    grid = Grid(("cifar100",), ("resnet18",), ("relu", "deu", "flexact-all"), seeds=2)
    found = hours("cifar", grid.cells, 30, results)
    assert found == pytest.approx(2 * 30 * 390 * (2 + 10 + 3) / 1000 / 3600)  # deu counts as the slowest
    for study in ("picks", "synthetic", "overhead"):
        assert math.isnan(hours(study, (), 1, results))


def test_a_deeper_network_takes_as_much_longer_as_its_measured_step(results: Path) -> None:
    small, large = (Grid(("cifar100",), (model,), ("relu",), seeds=1).cells for model in ("resnet18", "resnet34"))
    assert hours("cifar", large, 30, results) == pytest.approx(2 * hours("cifar", small, 30, results))


def test_on_the_measured_device_nothing_is_timed_or_scaled(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "device_name", lambda: "card")
    monkeypatch.setattr(estimates, "image_step_ms", lambda device: pytest.fail("timed"))
    assert slowdowns(results)["cifar"] == slowdowns(results)["glue"] == slowdowns(results)["synthetic"] == 1


def test_on_another_device_hours_are_scaled_by_a_training_step(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "image_step_ms", lambda device: 500.0)
    monkeypatch.setattr(estimates, "text_step_ms", lambda device: 400.0)
    found = slowdowns(results)
    assert (found["cifar"], found["glue"], found["synthetic"]) == (250, 20, 1)
    assert "picks" not in found  # nothing was measured


def test_steps_are_timed_and_leave_the_random_numbers_as_they_were() -> None:
    device = torch.device("cpu")
    before = torch.get_rng_state()
    assert 1 < image_step_ms(device) < 1e6
    assert 1 < text_step_ms(device) < 1e6
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_faster_than_on_a_cpu() -> None:
    for timed in (image_step_ms, text_step_ms):
        assert timed(torch.device("cuda")) < timed(torch.device("cpu"))
