"""How long the cells of a study take: times measured in `results/`, scaled to the present device."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from flexact.studies.cifar.methods import BASELINE, build
from flexact.studies.cifar.protocol import Protocol
from flexact.studies.cifar.training import Training
from flexact.studies.cifar_data.data import random_images
from flexact.studies.cuda_graph import EAGER_STEPS, study_stream, wait
from flexact.studies.glue.protocol import BASELINE as TEXT_BASELINE
from flexact.studies.synthetic.studies import STUDIES

Lines = list[dict[str, str]]

_TIMES: dict[str, tuple[str, str, Callable[[dict[str, str]], float]]] = {
    "cifar": ("cifar/steps.csv", "method", lambda row: float(row["step_ms"]) / 1000 * (50_000 // 128)),
    "glue": ("glue/cost/results.csv", "task", lambda row: float(row["seconds"])),
    "picks": ("picks/times.csv", "task", lambda row: float(row["seconds"])),
    **dict.fromkeys(STUDIES, ("replicas.csv", "model", lambda row: float(row["together_s"]) / float(row["epochs"]))),
}
"""The file with a study's times, the column that tells its cells apart, and the seconds of an epoch or a cell."""


def hours(study: str, cells: Sequence[Any], epochs: int, results: Path) -> float:
    """The estimated hours of cells that run one after the other, on the device that `results` was measured on; NaN if
    no such cells were measured.

    Cells of a kind that was not measured are assumed to be as slow as the slowest measured kind.
    """
    rows = _measured(study, results)
    if not rows:
        return math.nan
    _, column, seconds = _TIMES[study]
    kinds = {row[column] for row in rows}
    found = {kind: fmean(seconds(row) for row in rows if row[column] == kind) for kind in kinds}
    slowest = max(found.values())

    def of(cell: Any) -> float:
        kind = cell if isinstance(cell, str) else getattr(cell, column)
        return found.get(kind, slowest) * _relative_cost(getattr(cell, "model", ""), results)

    return math.fsum(map(of, cells)) * epochs / 3600


def _measured(study: str, results: Path) -> Lines:
    """The rows with a study's times, without those of picking: most steps are trained with the pick."""
    if study not in _TIMES:
        return []
    return [row for row in _rows(results / _TIMES[study][0]) if row.get("stage") != "picking"]


def _rows(path: Path) -> Lines:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _relative_cost(model: str, results: Path) -> float:
    """The time of a step of an image network relative to ResNet-18, whose steps were measured with every method."""
    steps = {
        row["network"]: float(row["value"])
        for row in _rows(results / "overhead" / "overhead.csv")
        if (row["placement"], row["mode"], row["quantity"]) == (BASELINE, "graph", "train_ms")
        and row["way"] == BASELINE
    }
    return steps[model] / steps["resnet18"] if {model, "resnet18"} <= steps.keys() else 1.0


def device_name() -> str:
    """The name of the device that cells of a grid run on by default."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def slowdowns(results: Path) -> dict[str, float]:
    """How many times longer a training step takes on this device than on the one that `results` was measured on, by
    study. It is 1 without a measurement if both are of the same kind; the synthetic studies always run on a CPU.

    A step of ResNet-18 stands for the image study and for the benchmark of picks, and one of an encoder for GLUE.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = {study: {row["device"] for row in _measured(study, results)} for study in ("cifar", "glue", "picks")}
    away = {study for study, devices in known.items() if devices and devices != {device_name()}}
    found = dict.fromkeys(STUDIES, 1.0) | {study: 1.0 for study, devices in known.items() if devices}
    if away & {"cifar", "picks"}:
        there = [float(row["step_ms"]) for row in _measured("cifar", results) if row["method"] == BASELINE]
        ratio = image_step_ms(device) / fmean(there) if there else math.nan
        found |= dict.fromkeys(away & {"cifar", "picks"}, ratio)
    if "glue" in away:
        there = [float(row["step_ms"]) for row in _measured("glue", results) if row["method"] == TEXT_BASELINE]
        found["glue"] = text_step_ms(device) / fmean(there)
    return found


def image_step_ms(device: torch.device) -> float:
    """Milliseconds of a training step of ResNet-18 with ReLU and batches of 128, as the image study runs it.

    On a CPU, a smaller batch is timed, to which the time is proportional.
    """
    on_gpu = device.type == "cuda"
    protocol = Protocol(batch=128 if on_gpu else 16)
    images = random_images(10 * protocol.batch).to(device)
    with torch.random.fork_rng(), study_stream(device):
        network = build("resnet18", BASELINE, images.classes, protocol.config(0))
        layout = torch.channels_last if on_gpu else torch.preserve_format
        network.to(device=device, memory_format=layout)  # type: ignore[call-overload]
        training = Training(network, images, protocol, 0, device)
        return _milliseconds(training.step, device, 2 * EAGER_STEPS, 50) * 128 / protocol.batch


def text_step_ms(device: torch.device) -> float:
    """Milliseconds of a training step of an encoder with the sizes of all-MiniLM-L6-v2: 32 rows of 48 tokens."""
    with torch.random.fork_rng():  # dropout draws, too
        layer = nn.TransformerEncoderLayer(384, 12, 1536, activation="gelu", batch_first=True)
        network = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(device)
        x = torch.randn(32, 48, 384, device=device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.0)

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.mse_loss(network(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return _milliseconds(step, device, 3, 20)


def _milliseconds(step: Callable[[], object], device: torch.device, warm_up: int, steps: int) -> float:
    """The mean time of a step; on a CPU from one step after another."""
    warm_up, steps = (warm_up, steps) if device.type == "cuda" else (1, 1)
    for _ in range(warm_up):
        step()
    wait(device)
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return 1000 * (time.perf_counter() - begun) / steps
