"""Tests that docs/start.md shows what its code prints on two threads. test_code_blocks.py runs a shortened form."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SHOWN = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def cells(table: str) -> list[list[str]]:
    """Returns the cells of a printed table's rows, without titles and notes."""
    lines = [re.split(r"  +", line) for line in table.splitlines()]
    return [line for line in lines[2:] if len(line) == len(lines[0])]


@pytest.mark.slow
def test_the_tables_of_the_page_are_what_its_code_prints(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    inspection, selection = SHOWN
    last = next(i for i, block in enumerate(CODE) if "print(flexact.selection(model))" in block)
    settings = {"OMP_NUM_THREADS": 2, "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": 200}
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(CODE[: last + 1])],
        cwd=tmp_path,
        env=os.environ | {name: str(value) for name, value in settings.items()},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    assert ran.stdout.startswith(inspection)
    printed, shown = cells(ran.stdout.removeprefix(inspection)), cells(selection)
    assert len(shown) == 3
    for row, documented in zip(printed, shown, strict=True):
        # site, pick, steps, runner-up and drops are equal; the lead and both z differ by rounding
        assert [row[i] for i in (0, 1, 4, 5, 7)] == [documented[i] for i in (0, 1, 4, 5, 7)]
        for i in (3, 6):
            assert float(row[i]) == pytest.approx(float(documented[i]), rel=0.2)
