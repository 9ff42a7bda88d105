"""Every file of examples/ runs as its reader would run it, and what it prints is a result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    # How many rows the selection table has; what is measured of the extracted network, and what it is at least.
    "two_spirals": (2, r"Accuracy on new points: ([\d.]+) %", 90),
    "digits": (2, r"Accuracy of the plain network on test digits: ([\d.]+) %", 94),
    "timm_finetune": (8, r"Accuracy of the plain ResNet on test digits: ([\d.]+) %", 85),
    "transformers_trainer": (3, r"Accuracy of the plain network on new sentences: ([\d.]+) %", 95),
    "lightning_module": (2, r"Accuracy of the plain network on test digits: ([\d.]+) %", 90),
    "accelerate_loop": (2, r"Accuracy of the plain network on test digits: ([\d.]+) %", 90),
    "per_channel": (24, r"Accuracy of the plain network on test digits: ([\d.]+) %", 90),
    "custom_candidate": (1, r"Mean squared error of the plain network: ([\d.]+)", 0),
}
NEEDS = {"timm_finetune": "timm", "transformers_trainer": "transformers", "lightning_module": "lightning"}
TITLES = re.compile(r"site pick lead z steps runner-up (z \(original\) )?dropped \(at step\)")


def printed(name: str, folder: Path) -> str:
    """What an example prints, started in another folder."""
    (out,) = forked.outputs(
        forked.Program(ROOT / "examples" / f"{name}.py", settings={"COLUMNS": 200}, folder=folder), timeout=300
    )
    return out


def picks(text: str) -> dict[str, str]:
    """Pick by site, from the rows of committed sites in the printed table."""
    lines = [line.split() for line in text.splitlines()]
    start = next(i for i, words in enumerate(lines) if TITLES.fullmatch(" ".join(words)))
    rows = {}
    for words in lines[start + 2 :]:
        if not words or words[0] == "lead:":
            break
        rows[words[0]] = words[1]
    return rows


def test_all_examples_are_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_picks_commits_and_gives_a_plain_network_that_works(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    rows, measure, least = EXAMPLES[name]
    text = printed(name, tmp_path)
    table = picks(text)
    assert len(table) == rows
    found = re.search(measure, text)
    assert found is not None
    assert "FlexAct(" not in text  # the network that is printed is plain
    assert float(found[1]) >= least
    if name == "custom_candidate":
        assert table == {"1": "snake"}
        assert float(found[1]) < 0.01
        assert "(1): Snake()" in text
    if name == "per_channel":
        assert len(set(table.values())) > 1
        assert "ChannelPicks(" in text
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
