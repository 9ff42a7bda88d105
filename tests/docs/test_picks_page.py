"""Tests that the benchmark page describes the tasks and methods of the code."""

from __future__ import annotations

import re
from pathlib import Path

from flexact.studies.picks.protocol import CHOOSING
from flexact.studies.picks.tasks import TASKS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "picks.md").read_text(encoding="utf-8")


def rows() -> dict[str, list[str]]:
    """Returns the rows of the page's tables, by the name in their first cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:1] == "|"]
    return {found[1]: line for line in lines if (found := re.fullmatch(r"`([\w-]+)`", line[0]))}


def test_the_table_of_tasks_has_every_task_with_its_candidates() -> None:
    assert [name for name in rows() if name in TASKS] == list(TASKS)
    for name, task in TASKS.items():
        assert rows()[name][-1] == ", ".join(task.candidates)


def test_the_steps_that_the_page_names_match_the_tasks() -> None:
    assert "All runs\nexcept the ResNets have 8,000 steps" in PAGE
    assert {task.steps for name, task in TASKS.items() if not name.startswith("resnet")} == {8_000}
    assert sum(task.dataset == "cifar100" for task in TASKS.values()) == 6


def test_the_table_of_methods_has_every_method() -> None:
    assert set(CHOOSING) <= rows().keys()
