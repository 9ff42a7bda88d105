"""Folders with made-up data, as the studies and a Recorder write them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import flexact
from flexact.studies.paper_tables import CORRECTIONS

CANDIDATES: dict[str, Callable[[float], float]] = {
    "relu": lambda h: max(0.0, h),
    "leaky_relu": lambda h: max(0.01 * h, h),
    "sigmoid": lambda h: 1 / (1 + math.exp(-h)),
    "tanh": math.tanh,
    "identity": lambda h: h,
}
HOSTILE = "<script>alert(1)</script>"


def study_folder(folder: Path, study: str, models: list[str], truths: list[str], table: str, seeds: int = 2) -> Path:
    """A study in which every flexact model finds the truth, the more slowly the later its name."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "flexact_study": 1,
        "study": study,
        "options": {"seeds": seeds, "epochs": 20, "note": HOSTILE},
        "versions": {"torch": torch.__version__},
        "device": "cpu",
        "commit": "0123abc",
        "date": "2026-01-01",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "table.md").write_text(table, encoding="utf-8")
    results: list[tuple[object, ...]] = []
    history: list[tuple[object, ...]] = []
    curves: list[tuple[object, ...]] = []
    for number, model in enumerate(models):
        for truth in truths:
            picks = model not in CANDIDATES and model != "prelu"
            for seed in range(seeds):
                error = 0.006 * math.exp(-number) * (1 + 0.3 * seed)
                pick = truth if picks else model
                results.append((study, model, truth, seed, pick, 0.99 if picks else "", error, 0.001))
                for epoch in range(21) if picks else ():
                    lead = 1 - 0.8 * math.exp(-epoch / (3 + number + seed))
                    for name in CANDIDATES:
                        history.append((model, truth, seed, epoch, name, lead if name == truth else (1 - lead) / 4))
            for i in range(41):
                x = -1 + i / 20
                target = CANDIDATES[truth](5 * x)
                curves.append((model, truth, x, target + 0.03 * number * math.cos(3 * x), target))
    _write(folder / "results.csv", ("study", "model", "truth", "seed", "pick", "probability", "mse", "spread"), results)
    _write(folder / "history.csv", ("model", "truth", "seed", "epoch", "candidate", "probability"), history)
    _write(folder / "curves.csv", ("model", "truth", "x1", "prediction", "target"), curves)
    return folder


def synthetic_folder(folder: Path) -> Path:
    """The first study: models that pick, fixed ones and a baseline, two truths, two tables."""
    models = ["flexact-default", "flexact-a0.3", "flexact-a0", *CANDIDATES, "prelu"]
    cells = " | ".join(["0.0001 ± 0.0002 (paper 0.0059 ± 0.0073)"] * 2)
    rows = "\n".join(f"| {model} | {cells} |" for model in models)
    table = f"# Which\n\n| model | relu | sigmoid |\n| --- | --: | --: |\n{rows}\n"
    table += f"\n| a | b |\n|---|---|\n| {HOSTILE} | 1 |\n"
    return study_folder(folder, "synthetic", models, ["relu", "sigmoid"], table)


def alpha_folder(folder: Path) -> Path:
    """The sweep over α."""
    models = [f"flexact-a{tenth / 10:.1f}" for tenth in range(11)]
    rows = "\n".join(f"| {model[9:]} | 0.0060 | sigmoid |" for model in models)
    return study_folder(folder, "alpha", models, ["sigmoid"], f"| α | error | pick |\n|---|---|---|\n{rows}\n", 3)


def corrections_folder(folder: Path) -> Path:
    """The ablation of corrections, with the paper's values in its table."""
    rows = "\n".join(f"| {model} | 0.00100 ± 0.00020 | {paper} |" for model, paper in CORRECTIONS.items())
    table = f"| correction | MSE | paper's |\n|---|---|---|\n{rows}\n"
    return study_folder(folder, "corrections", list(CORRECTIONS), ["sigmoid"], table)


def recorder_folder(folder: Path, steps: int = 12) -> Path:
    """A user's own run, recorded by the real thing; one of its layers has a hostile name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
    model.add_module(HOSTILE.replace(".", ""), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model.add_module("head $x_1$ %{x}", nn.Sequential(nn.SiLU(), nn.Linear(8, 1)))
    model = flexact.convert(model)
    optimizer = torch.optim.Adam(flexact.param_groups(model, lr=0.02))
    schedule = flexact.Schedule(model, total_steps=steps)
    x = torch.randn(64, 2)
    y = torch.tanh(3 * x[:, :1])
    with flexact.Recorder(model, path=folder / "history.jsonl") as recorder:
        for step in range(steps):
            loss = nn.functional.mse_loss(model(x), y) + flexact.penalty(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            recorder.record(step, loss=loss, accuracy=step / steps)
    return folder


def _write(path: Path, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
