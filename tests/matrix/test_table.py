"""Tests that docs/matrix.md matches the matrix tests: its rows and columns, and no failing cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from matrix.models import COLUMNS, TITLES
from matrix.rows import ROWS
from matrix.table import NEEDS_GPU, PAGE, RIGHT, cell, outcomes, page

HERE = Path(__file__).parent


def table() -> list[list[str]]:
    """Returns the cells of the page's table, line by line."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [[part.strip() for part in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_every_test_file_is_a_row_and_every_row_has_a_file() -> None:
    files = {path.stem.removeprefix("test_") for path in HERE.glob("test_*.py")} - {"table"}
    assert {row.file for row in ROWS} == files


def test_the_page_has_the_rows_and_columns_of_the_tests() -> None:
    header, _, *lines = table()
    assert header[1:] == [TITLES[name] for name in COLUMNS]
    assert len(lines) == len(ROWS)
    for line, row in zip(lines, ROWS, strict=True):
        assert line[0].startswith(row.title)
        assert line[0].endswith(row.holds)
        assert len(line) == 1 + len(COLUMNS)


def test_every_cell_passes_or_needs_a_gpu() -> None:
    _, _, *lines = table()
    for line, row in zip(lines, ROWS, strict=True):
        assert set(line[1:]) == {NEEDS_GPU if row.file == "cuda_graphs" else RIGHT}


def test_the_rest_of_the_page_is_what_the_command_writes() -> None:
    written = page({})
    found = PAGE.read_text(encoding="utf-8")
    assert found.partition("\n|")[0] == written.partition("\n|")[0]
    assert found.rpartition("|\n")[2] == written.rpartition("|\n")[2]


@pytest.mark.parametrize(
    ("tests", "expected"),
    [(["passed", "skipped"], "✓"), (["passed", "failed"], "✗"), (["skipped"], "GPU"), ([], "not tested")],
)
def test_a_cell_passes_only_if_nothing_failed(tests: list[str], expected: str) -> None:
    assert cell(tests) == expected


def test_a_report_is_read_by_row_and_column(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.matrix.test_ddp" name="test_a[2 ranks-mlp]"/>'
        '<testcase classname="tests.matrix.test_ddp" name="test_b[mlp-paper]"><failure/></testcase>'
        '<testcase classname="tests.matrix.test_func" name="test_c[bert]"><skipped/></testcase>'
        '<testcase classname="tests.matrix.test_table" name="test_d"/></testsuite></testsuites>'
    )
    assert outcomes(report) == {("ddp", "mlp"): ["passed", "failed"], ("func", "bert"): ["skipped"]}
