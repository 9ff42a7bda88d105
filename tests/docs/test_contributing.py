"""The table of files in CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_is_in_the_table_and_every_name_in_it_is_a_file() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    named = {Path(name).name for row in rows for name in re.findall(r"`([\w/.]+\.\w+)`", row)}
    package = ROOT / "src" / "flexact"
    files = {path.name for folder in ("", "studies", "ops") for path in (package / folder).glob("*.py")}
    assert files - {"__main__.py"} <= named
    assert named <= files | {"report.css", "report.js"}
