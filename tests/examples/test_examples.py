"""Runs every file of examples/ as a user would, and checks what it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    # Number of rows of the selection table, measured quantity of the extracted network, and its minimum.
    "two_spirals": (2, r"Accuracy on new points: ([\d.]+) %", 90),
    "digits": (2, r"Accuracy of the plain network on test digits: ([\d.]+) %", 94),
    "timm_finetune": (8, r"Accuracy of the plain ResNet on test digits: ([\d.]+) %", 85),
    "transformers_trainer": (3, r"Accuracy of the plain network on new sentences: ([\d.]+) %", 95),
    "lightning_module": (2, r"Accuracy of the plain network on test digits: ([\d.]+) %", 90),
    "accelerate_loop": (2, r"Accuracy of the plain network on test digits: ([\d.]+) %", 90),
    "per_channel": (24, r"Accuracy of the plain network on test digits: ([\d.]+) %", 90),
    "custom_candidate": (1, r"Mean squared error of the plain network: ([\d.]+)", 0),
}
WORKED = {
    # Number of steps, then the figures of the network with its own activation and with Flex-Act.
    "siren_image": ("60", r"seed 0: ReLU ([\d.]+), Flex-Act ([\d.]+) dB on unseen pixels"),
    "byte_gpt": ("60", r"seed 0: GELU ([\d.]+), Flex-Act ([\d.]+) nats per byte of new text"),
    "physics_informed": ("60", r"seed 0: Tanh ([\d.]+), Flex-Act ([\d.]+) dB of signal to error"),
}
NEEDS = {"timm_finetune": "timm", "transformers_trainer": "transformers", "lightning_module": "lightning"}
TITLES = re.compile(r"site pick lead z steps runner-up (z \(original\) )?dropped \(at step\)")


def printed(name: str, folder: Path) -> str:
    """Returns what an example prints when it is started in another folder."""
    (out,) = forked.outputs(
        forked.Program(ROOT / "examples" / f"{name}.py", settings={"COLUMNS": 200}, folder=folder), timeout=300
    )
    return out


def picks(text: str) -> dict[str, str]:
    """Returns the pick of each committed site in the printed table."""
    lines = [line.split() for line in text.splitlines()]
    start = next(i for i, words in enumerate(lines) if TITLES.fullmatch(" ".join(words)))
    rows = {}
    for words in lines[start + 2 :]:
        if not words or words[0] == "lead:":
            break
        rows[words[0]] = words[1]
    return rows


def test_every_example_is_listed() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, *WORKED, "compare"}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKED)
def test_a_worked_example_prints_both_figures_and_draws_its_picture(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    steps, measure = WORKED[name]
    picture = tmp_path / "picture.png"
    (text,) = forked.outputs(
        forked.Program(
            ROOT / "examples" / f"{name}.py",
            *("--seeds", "1", "--steps", steps, "--picture", picture),
            settings={"COLUMNS": 200},
            folder=tmp_path,
        ),
        timeout=300,
    )
    assert re.search(measure, text)
    assert len(picks(text)) >= 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]
    assert len((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 120


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_picks_commits_and_gives_a_working_plain_network(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    rows, measure, least = EXAMPLES[name]
    text = printed(name, tmp_path)
    table = picks(text)
    assert len(table) == rows
    found = re.search(measure, text)
    assert found is not None
    assert "FlexAct(" not in text  # the printed network is plain
    assert float(found[1]) >= least
    if name == "custom_candidate":
        assert table == {"1": "snake_3"}
        assert float(found[1]) < 0.01
        assert "(1): Snake3()" in text
    if name == "per_channel":
        assert len(set(table.values())) > 1
        assert "ChannelPicks(" in text
    assert list(tmp_path.iterdir()) == []  # no files are left behind


@pytest.mark.slow
def test_the_comparison_prints_a_row_per_method_and_is_the_code_of_its_page(tmp_path: Path) -> None:
    path = ROOT / "examples" / "compare.py"
    ended = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    rows = {line.split()[1]: line for line in ended.stdout.splitlines() if line.startswith("| ")}
    for method in ("original", "fixed-gelu", "fixed-tanh", "flexact", "flexact-alone"):
        found = re.search(r"\| +5 \| ([\d.]+) ± [\d.]+ \|", rows[method])
        assert found is not None
        assert float(found[1]) > 90
    assert "seed 4" in ended.stdout
    assert list(tmp_path.iterdir()) == []  # no files are left behind
    functions = path.read_text(encoding="utf-8").partition("EPOCHS = 40")[2].partition("if __name__")[0]
    assert functions.strip()
    assert functions in (ROOT / "docs" / "comparing.md").read_text(encoding="utf-8")
