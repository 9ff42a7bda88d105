"""Tests of the statistics over cells: averages, costs, and the table with the paper's figures."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from flexact.studies.cifar.protocol import Grid, Protocol, Result
from flexact.studies.cifar.table import CIFAR, table


def row(
    method: str, seed: int, accuracy: float, step_ms: float = 2.0, device: str = "card", **others: object
) -> Result:
    fields = {"state": "done", "epochs": 30, "seconds": 1.0, "picks": "", "error": "", "loss": 0.1, **others}
    fields |= {"dataset": "cifar100", "model": "resnet18", "method": method, "seed": seed, "accuracy": accuracy}
    return Result(**{**fields, "step_ms": step_ms, "device": device, "torch": "2", "commit": "c", "date": "d"})  # type: ignore[arg-type]


def test_a_steps_time_is_relative_to_relus_on_the_same_device() -> None:
    results = [row("relu", 0, 70.0, 2.0), row("relu", 1, 71.0, 40.0, "slow"), row("flexact-all", 0, 71.0, 2.2)]
    results.append(row("flexact-all", 1, 71.0, math.nan))
    text = " ".join(table(results, Protocol(), []).split())
    assert "| ReLU | 2 | 70.50 ± 0.71 | - | - |" in text
    assert "| ResNet-18, CIFAR-100 | card | 2.00 | 2.20 (1.10×) |" in text
    assert "| ResNet-18, CIFAR-100 | slow | 40.00 | - |" in text


def test_the_table_names_the_devices_where_there_are_several() -> None:
    one = [row("relu", s, 70.0 + s) for s in range(2)]
    assert "several devices" not in table(one, Protocol(), [])
    text = table([*one, row("flexact-all", 0, 71.0, 90.0, "cpu")], Protocol(), [])
    assert "Trained on several devices: card (2 cells), cpu (1 cell)" in text


def test_the_table_has_the_papers_rows_beside_ours_and_says_what_is_missing() -> None:
    results = [row("relu", s, 70.0 + s) for s in range(3)] + [row("flexact-all", s, 71.0 + 1.5 * s) for s in range(2)]
    results.append(row("splash", 0, math.nan, state="failed", error="the loss is nan"))
    grid = Grid(("cifar100",), ("resnet18",), ("relu", "flexact-all", "splash"), seeds=3)
    text = " ".join(table(results, Protocol(epochs=30), grid.cells).split())
    assert "| ReLU | 3 | 71.00 ± 1.00 | - | - | 77.72 ± 0.11 | - |" in text
    assert "| Flex-Act (all layers) | 2 | 71.75 ± 1.06 | +1.25 | 0.126 | 79.29 ± 0.11 | <0.001 |" in text
    assert "200 epochs (here 30) and 10 runs" in text
    assert "cifar100-resnet18-splash-0: the loss is nan" in text
    assert "Not done yet, 3 of 9: cifar100-resnet18-splash-1, cifar100-resnet18-flexact-all-2" in text


def test_without_times_the_table_gives_the_reason() -> None:
    untimed = [row("relu", 0, 70.0, math.nan), row("flexact-all", 0, 71.0, math.nan)]
    assert "Cells shared a device, so times are left out." in table(untimed, Protocol(), [])
    assert "times are left out" not in table([*untimed, row("splash", 0, 60.0)], Protocol(), [])


def test_one_seed_has_no_p_value_and_the_table_gives_the_reason() -> None:
    text = table([row("relu", 0, 70.0), row("prelu", 0, 69.0)], Protocol(), [])
    assert "no p-value for PReLU, ResNet-18 on CIFAR-100: one seed" in text
    assert "200 epochs (as here)" in text


def test_each_table_is_followed_by_its_statistics_if_there_is_a_test() -> None:
    results = [row("relu", s, 70.0 + s) for s in range(6)] + [row("gelu", s, 70.5 + 1.1 * s) for s in range(6)]
    results += [row("flexact-all", s, 71.0 + 0.8 * s) for s in range(3)]
    text = " ".join(table(results, Protocol(), []).split())
    assert text.count("Statistics: differences from ReLU on the same seeds.") == 1
    statistics = text.partition("| seeds needed for 0.5 |")[2]
    assert "Statistics:" not in table([row("relu", 0, 70.0), row("gelu", 0, 71.0)], Protocol(), [])
    gains = [0.5 + 0.1 * s for s in range(6)]
    size = 0.75 / math.sqrt(sum((gain - 0.75) ** 2 for gain in gains) / 5)
    assert f"| 0.031 | {size:.2f} |" in statistics  # all of six differences are positive: 2 · 2⁻⁶
    assert "| Flex-Act (all layers) | +0.80 |" in statistics
    assert statistics.index("GELU") < statistics.index("Flex-Act")


def test_the_papers_table_is_the_papers() -> None:
    paper = Path(__file__).parents[4] / "shared" / "paper" / "flex-act.tex"
    if not paper.is_file():
        pytest.skip("the paper is not part of the repository")
    text = paper.read_text(encoding="utf-8")
    text = text[text.index(r"\label{tab:cifar_results}") :]
    text = text[: text.index(r"\end{table}")].replace(r"\!", "")
    cells = re.findall(r"(\d\d\.\d\d)\}? \\pm (\d\.\d\d)\$\}? & (?:\\\w+\{)?(-|\$[^$]*\$)", " ".join(text.split()))
    found = sorted((float(mean), float(std), p.strip("$-")) for mean, std, p in cells)
    assert len(found) == 28
    assert found == sorted(CIFAR.values())
