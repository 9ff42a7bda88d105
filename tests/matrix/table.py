"""Writes the table of docs/matrix.md from a run of these tests: ``python tests/matrix/table.py [JUNIT.xml]``.

Without a file, the tests are run first, which takes some minutes. Otherwise the file is a report of pytest's
--junitxml.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "matrix.md"
if str(HERE.parent) not in sys.path:
    sys.path.append(str(HERE.parent))

from matrix.models import TITLES  # noqa: E402
from matrix.rows import ROWS  # noqa: E402

COMMAND = "python tests/matrix/table.py"
RIGHT, WRONG, NEEDS_GPU, MISSING = "✓", "✗", "GPU", "not tested"

_OPENING = f"""# Compatibility

Each row of the table is a test file in `tests/matrix/`. Each column is a small model on which its tests run: a
`FlexAct` by itself, an MLP, a ResNet with shared activations and batch norm, and transformers' BERT.

- {RIGHT}: every test of the cell passed.
- {NEEDS_GPU}: the tests need a CUDA device. Run them with `python -m pytest -m gpu tests/matrix`. All of them passed in
  the last run, on an H200 (`results/gpu_tests/log.txt`).

This command runs the tests and writes the page; CI checks that the page has the rows and columns of the tests:

```sh
{COMMAND}
```
"""


def outcomes(report: Path) -> dict[tuple[str, str], list[str]]:
    """Returns the outcome of each test, by row and column: "passed", "failed" or "skipped"."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = case.get("classname", "").rpartition("test_")[2]
        chosen = case.get("name", "").partition("[")[2].rstrip("]").split("-")
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        for column in TITLES:
            if column in chosen:
                found.setdefault((file, column), []).append(outcome)
    return found


def cell(tests: list[str]) -> str:
    """Returns the table's cell for the tests of one row and column."""
    if "failed" in tests:
        return WRONG
    if "passed" in tests:
        return RIGHT
    return NEEDS_GPU if tests else MISSING


def page(found: dict[tuple[str, str], list[str]]) -> str:
    """Returns the text of docs/matrix.md."""
    lines = [_OPENING, f"| | {' | '.join(TITLES.values())} |", f"| --- |{' --- |' * len(TITLES)}"]
    notes: list[str] = []
    for row in ROWS:
        marks = "".join(f"<sup>{len(notes) + i}</sup>" for i in range(1, len(row.notes) + 1))
        notes += row.notes
        cells = " | ".join(cell(found.get((row.file, column), [])) for column in TITLES)
        lines.append(f"| {row.title}{marks}: {row.holds} | {cells} |")
    lines += ["", "Notes:", "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def run(report: Path) -> None:
    """Runs the matrix tests except those of the page. Tests that need a GPU are skipped without one."""
    options = ["-q", "-p", "no:cacheprovider", "-m", "gpu or not gpu", f"--junitxml={report}"]
    options.append(f"--ignore={HERE / 'test_table.py'}")
    subprocess.run([sys.executable, "-m", "pytest", *options, str(HERE)], check=False)


def main(arguments: Iterable[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        given = list(arguments)
        report = Path(given[0]) if given else Path(folder) / "report.xml"
        if not given:
            run(report)
        found = outcomes(report)
    PAGE.write_text(page(found), encoding="utf-8")
    wrong = [f"{row}, {column}" for (row, column), tests in found.items() if cell(tests) == WRONG]
    print(f"{PAGE}: {len(found)} cells" + (f"; not right: {'; '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
