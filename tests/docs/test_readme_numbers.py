"""Tests that every number in the README outside of its table of results is computed from a file or from the code."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import flexact
from flexact.candidates.registry import known_names
from flexact.io.markdown_tables import counted
from flexact.studies.picks.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = " ".join(README.split())
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3}|\.\d)[\d.]*")
CHECKED_ELSEWHERE = (
    r"Its mean regret over ten tasks is [\d.]+",  # test_readme.py
    r"Means: original activation [\d.]+, race [\d.]+, Flex-Act [\d.]+",
    r"[\d.]+ to [\d.]+ dB against [\d.]+ to [\d.]+ with ReLU",  # test_index_page.py
    r"small GPT, U-Net, MLP-Mixer \| [\d., ]+",  # test_overhead_page.py
    r"On a CPU a whole run takes [\d.]+ \(physics\) to [\d.]+ \(MLP\)",
)
NOT_RESULTS = ("Python 3.10", "torch 2.6", "Apache-2.0", "8,000", "2,000", "1,000")
"""Versions, and run lengths that are round on purpose."""


def rows_of(path: str) -> list[dict[str, str]]:
    with (ROOT / "results" / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def extra_steps(count: int, normalises: bool = True) -> int:
    """The steps that picking adds with this number of candidates."""
    model = nn.Sequential(nn.Linear(4, 4), *([nn.BatchNorm1d(4)] if normalises else []), nn.ReLU(), nn.Linear(4, 1))
    names = ["relu", *(name for name in known_names() if name not in ("relu", "original"))][:count]
    flexact.convert(model, candidates=names)
    optimizer = torch.optim.SGD(flexact.param_groups(model, weight_decay=0.0), lr=0.1)
    return flexact.Schedule(model, network_steps=8000, optimizer=optimizer).total_steps - 8000


def relative_time(task: str) -> float:
    """Flex-Act's time relative to the original activation; on seed 200, whose runs built no kernels, if it was run."""
    rows = [row for row in rows_of("picks/times.csv") if row["task"] == task]
    rows = [row for row in rows if row["seed"] == "200"] or rows
    names = ("flexact", f"fixed-{TASKS[task].candidates[0]}")
    ours, plain = (sum(float(row["seconds"]) for row in rows if row["method"] == name) for name in names)
    return ours / plain


def overhead(way: str, mode: str, quantity: str) -> float:
    key = {"network": "resnet18", "placement": "all", "way": way, "mode": mode, "quantity": quantity}
    (row,) = [row for row in rows_of("overhead/overhead.csv") if key.items() <= row.items()]
    return float(row["ratio"])


def cost(way: str, quantity: str = "train_ms") -> float:
    """The cost of eager training of ResNet-18 relative to ReLU's."""
    case = f"resnet18, all, {way}, eager"
    rows = [row for row in rows_of("cost/cuda.csv") if (row["case"], row["quantity"]) == (case, f"{quantity}, ratio")]
    return float(rows[0]["value"])


def gain(folder: str) -> tuple[float, int]:
    """The mean gain of Flex-Act over ReLU on CIFAR-100, on the same seeds, and their number."""
    found: dict[str, dict[str, float]] = {"relu": {}, "flexact-all": {}}
    for row in rows_of(f"cifar/{folder}/results.csv"):
        place = (row["dataset"], row["model"], row["state"]) == ("cifar100", "resnet18", "done")
        if place and row["method"] in found:
            found[row["method"]][row["seed"]] = float(row["accuracy"])
    seeds = found["relu"].keys() & found["flexact-all"].keys()
    return sum(found["flexact-all"][seed] - found["relu"][seed] for seed in seeds) / len(seeds), len(seeds)


def phrases() -> list[str]:
    """The sentences of the README with their numbers as the files and the code have them."""
    blend = extra_steps(5)
    most = {count: max(extra_steps(count), extra_steps(count, normalises=False)) // 50 * 50 for count in (3, 7)}
    tasks = {row["task"] for row in rows_of("picks/times.csv")} - {"resnet-seven"}  # all of its runs built kernels
    times = sorted((relative_time(task), task) for task in tasks)
    (least, fastest), (greatest, slowest) = times[0], times[-1]
    (short, short_seeds), (long, long_seeds) = gain("30-epochs"), gain("200-epochs")
    shown = (overhead("fused", "graph", "train_ms"), overhead("fused_bn", "graph", "train_ms"))
    memory = (cost("fused", "peak_memory_mb"), cost("fused_bn", "peak_memory_mb"))
    return [
        f"about {most[3]:,} (three candidates) to {most[7]:,} (seven) extra steps",
        f"a run of 8,000 steps takes {1 + blend / 8000:.2f} times as many steps",
        f"{blend:,} extra steps with five candidates",
        f"about {most[3]:,} to {most[7]:,} extra steps",
        f"here {extra_steps(5, normalises=False) + 420:,} steps, of which 420 trained the winner",
        f"takes {least:.2f} ({fastest}, whose pick is cheaper than ReLU) to {greatest:.2f} ({slowest})",
        f"training step, eager | {cost('fused'):.2f}; with `fuse=True` {cost('fused_bn'):.2f}",
        f"in a CUDA graph | {shown[0]:.3f}; with `fuse=True` {shown[1]:.3f}",
        f"peak memory, eager | {memory[0]:.2f}; with `fuse=True` {memory[1]:.2f}",
        f"Without Triton, an eager step of ResNet-18 takes {cost('measured'):.2f} times as long",
        f"gains {short:.2f} points on CIFAR-100 in 30 epochs ({counted(short_seeds, 'seed')})",
        f"in 200 epochs its gain is {long:.2f} ({counted(long_seeds, 'seed')}",
    ]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return phrases()


def test_the_numbers_are_those_of_the_files_and_of_the_code(expected: list[str]) -> None:
    assert [phrase for phrase in expected if phrase not in WORDS] == []


def test_no_number_is_left_unchecked(expected: list[str]) -> None:
    text = " ".join(re.sub(r"```.*?```", " ", README, flags=re.DOTALL).split())
    for phrase in expected:
        text = text.replace(phrase, " ")
    for pattern in CHECKED_ELSEWHERE:
        text, count = re.subn(pattern, " ", text)
        assert count >= 1, pattern
    for phrase in NOT_RESULTS:
        text = text.replace(phrase, " ")
    start = text.index("| task | original | Flex-Act |")  # every cell is checked in test_readme.py
    text = text[:start] + text[text.index("`flexact reproduce picks --tasks", start) :]
    assert NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)) == []
