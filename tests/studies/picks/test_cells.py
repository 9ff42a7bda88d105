"""Tests of the cells of a benchmark and their order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flexact import FlexActError
from flexact.studies.picks.protocol import USUAL, Cell, Grid
from flexact.studies.picks.tasks import TASKS


def test_a_whole_benchmark_has_every_candidate_and_every_method_of_every_task() -> None:
    cells = Grid(seeds=1).cells
    assert len(set(cells)) == len(cells) == sum(len(task.candidates) + len(USUAL) - 1 for task in TASKS.values())


def test_a_method_that_a_task_lacks_has_no_cell_in_it() -> None:
    cells = Grid(("resnet-rectifiers", "resnet-seven"), ("fixed-tanh",), seeds=1).cells
    assert cells == [Cell("resnet-seven", "fixed-tanh", 0)]
    with pytest.raises(FlexActError, match="fixed-sine"):
        Grid(("tabular",), ("fixed-sine",))


def test_cells_that_can_reuse_other_runs_are_last_in_a_seed() -> None:
    cells = Grid(("tabular", "resnet-seven", "resnet-rectifiers"), seeds=2).cells
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    place = {(cell.task, cell.method): i for i, cell in enumerate(cells) if cell.seed == 0}
    for task in ("tabular", "resnet-seven", "resnet-rectifiers"):
        assert place[task, "flexact"] < place[task, "flexact-alone"]
        assert place["tabular", "fixed-identity"] < min(place[task, "race"], place[task, "flexact-one"])
    # The tasks share their network: the second task's runs are done when the first one's are.
    assert (
        place["resnet-rectifiers", "fixed-relu"] < place["tabular", "fixed-relu"] < place["resnet-seven", "fixed-relu"]
    )
    assert place["resnet-seven", "fixed-tanh"] < place["tabular", "fixed-relu"]


def test_the_order_of_names_does_not_matter() -> None:
    assert Grid(("tabular", "vit"), ("race", "fixed")).cells == Grid(("vit", "tabular"), ("fixed", "race")).cells


def test_a_task_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "picks.md").read_text(encoding="utf-8")
    (tmp_path / "product.py").write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    code = f"""
from flexact.studies.picks import tasks
tasks.__path__.append({str(tmp_path)!r})
print(tasks._found()[-1].name)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "product"
