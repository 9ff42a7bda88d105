"""Tests the table of packages in CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_and_module_is_in_the_table_and_every_name_in_it_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Architecture")[2]
    table = text.partition("**A training step.**")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w/]+)`", row.split("|")[1])}
    package = ROOT / "src" / "flexact"
    modules = {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    packages = {path.parent.name + "/" for path in package.glob("*/__init__.py")}
    assert named == modules | packages


def test_every_module_in_the_diagrams_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in re.findall(r"\[((?:routing|policy|surgery|cli)\.\w+)", text):
        assert (ROOT / "src" / "flexact" / f"{name.replace('.', '/')}.py").is_file(), name
