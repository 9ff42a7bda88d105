"""Folders with made-up data, as the studies and a Recorder write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import flexact
from flexact.io.result_folder import write_config
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.store import Part, Point, Result, write_parts
from flexact.studies.synthetic.studies import CORRECTIONS

CANDIDATES: dict[str, Callable[[float], float]] = {
    "relu": lambda h: max(0.0, h),
    "leaky_relu": lambda h: max(0.01 * h, h),
    "sigmoid": lambda h: 1 / (1 + math.exp(-h)),
    "tanh": math.tanh,
    "identity": lambda h: h,
}
HOSTILE = "<script>alert(1)</script>"


def study_folder(folder: Path, study: str, models: list[str], truths: list[str], table: str, seeds: int = 2) -> Path:
    """A study in which every model that picks finds the truth; models with later names take longer."""
    options = Options(seeds=seeds, truths=tuple(truths), models=tuple(models))
    config = {
        "flexact_study": 1,
        "study": study,
        "options": options.to_dict(),
        "versions": {"torch": torch.__version__},
        "device": "cpu",
        "commit": "0123abc",
        "date": HOSTILE,
    }
    write_config(folder, config)
    parts = {}
    for number, model in enumerate(options.models):
        part = parts[model] = Part([], [])
        picks = model not in CANDIDATES and model != "prelu"
        for truth in truths:
            for seed in range(seeds):
                error = 0.006 * math.exp(-number) * (1 + 0.3 * seed)
                pick, probability = (truth, 0.99) if picks else (model, 1.0)
                part.results.append(Result(study, model, truth, seed, pick, probability, error, 0.001, 100))
            for epoch in range(0, 101, 5) if picks else ():
                lead = 1 - 0.8 * math.exp(-epoch / (15 + 5 * number)) if epoch < 90 else 1.0
                for name in CANDIDATES:
                    p = lead if name == truth else (1 - lead) / 4
                    part.points.append(Point(model, truth, name, epoch, p, 0.1 * (epoch < 90)))
            for i in range(41):
                x = -1 + i / 20
                target = CANDIDATES[truth](5 * x)
                part.points.append(Point(model, truth, "prediction", x, target + 0.03 * number * math.cos(3 * x)))
                part.points.append(Point(model, truth, "target", x, target))
    write_parts(folder, parts, options.models)
    (folder / "table.md").write_text(table, encoding="utf-8")
    return folder


def synthetic_folder(folder: Path) -> Path:
    """The first study: models that pick, fixed ones and a baseline, two truths, two tables."""
    models = ["flexact-default", "flexact-a0.3", "flexact-a0", *CANDIDATES, "prelu"]
    cells = " | ".join(["0.0001 ± 0.0002"] * 2)
    rows = "\n".join(f"| {model} | {cells} |\n| - paper's | {cells} |" for model in models)
    table = f"# Which\n\n| model | relu | sigmoid |\n| --- | --: | --: |\n{rows}\n"
    table += f"\n| a | b |\n|---|---|\n| {HOSTILE} | 1 |\n"
    return study_folder(folder, "synthetic", models, ["relu", "sigmoid"], table)


def alpha_folder(folder: Path) -> Path:
    """The sweep over α."""
    models = [f"flexact-a{tenth / 10:g}" for tenth in range(11)]
    rows = "\n".join(f"| {model[9:]} | 0.0060 | sigmoid |" for model in models)
    return study_folder(folder, "alpha", models, ["sigmoid"], f"| α | error | pick |\n|---|---|---|\n{rows}\n", 3)


def corrections_folder(folder: Path) -> Path:
    """The ablation of corrections."""
    rows = "\n".join(f"| {model} | 0.00100 ± 0.00020 | 0.00590 |" for model in CORRECTIONS.defaults.models)
    table = f"| correction | MSE | paper's |\n|---|---|---|\n{rows}\n"
    return study_folder(folder, "corrections", list(CORRECTIONS.defaults.models), ["sigmoid"], table)


class Block(nn.Module):
    """A residual block with a normalisation layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.act(self.norm(self.linear(x)))
        return out


def evidence_folder(folder: Path, steps: int = 400) -> Path:
    """A run of seven sites in three stages that is long enough for evidence. The loss is that of the schedule."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("stem", nn.Sequential(nn.Linear(2, 16), nn.ReLU()))
    for number in (1, 2):
        model.add_module(f"layer{number}", nn.Sequential(*(Block() for _ in range(3))))
    model.add_module("head", nn.Linear(16, 1))
    config = flexact.FlexConfig(candidates=("relu", "tanh", "gelu", "identity"), share="site", pick_by="blend")
    model = flexact.convert(model, config=config)
    optimizer = torch.optim.Adam(flexact.param_groups(model, lr=0.003))
    schedule = flexact.Schedule(model, total_steps=steps)
    with flexact.Recorder(model, path=folder / "history.jsonl") as recorder:
        for _ in range(steps):
            x = torch.randn(64, 2)
            loss = nn.functional.mse_loss(model(x), torch.tanh(3 * x[:, :1]) * torch.relu(x[:, 1:]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step(loss)
            if schedule.steps_done % 4 == 0:
                recorder.record(schedule.steps_done)
    return folder


def recorder_folder(folder: Path, steps: int = 12) -> Path:
    """A user's own run, recorded by a real Recorder. One of its layers has a hostile name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
    model.add_module(HOSTILE.replace(".", ""), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model.add_module("head $x_1$ %{x}", nn.Sequential(nn.SiLU(), nn.Linear(8, 1)))
    config = flexact.FlexConfig(candidates=tuple(CANDIDATES), share="site", pick_by="blend", rewind=False)
    model = flexact.convert(model, "*", config=config)
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
