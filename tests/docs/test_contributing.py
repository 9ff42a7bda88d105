"""Tests the tables and the diagrams in CONTRIBUTING.md."""

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


def test_every_name_in_the_table_of_changes_is_in_a_file_of_its_row() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = text.partition("| to change | edit |\n| --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    assert rows
    for row in rows:
        names = re.findall(r"`([\w/.]+)`", row.split("|")[2])
        sources = [(ROOT / "src/flexact" / name).read_text(encoding="utf-8") for name in names if name.endswith(".py")]
        assert sources, row
        for name in names:
            assert name.endswith(".py") or any(re.search(rf"\b{name}\b", source) for source in sources), name
