"""Builds the report of a folder: figures as files, and one page that opens offline.

It uses only the files of a study's folder, or the histories that a Recorder wrote.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError, missing_extra
from flexact.io.atomic_files import write_whole
from flexact.io.csv_rows import read_text
from flexact.io.markdown_tables import counted
from flexact.io.result_folder import REPORT, TABLE, read_config
from flexact.observe import history
from flexact.observe.figures.history import history_pictures
from flexact.observe.figures.outcomes import outcomes
from flexact.observe.history import History, Records
from flexact.observe.html_tables import outcome_table
from flexact.report.page import Report, Section, markdown, page


def read_histories(run: Path) -> dict[str, History]:
    """Return the histories in a folder, or that of a single file, by file name."""
    histories = {}
    for path in [run] if run.is_file() else sorted(run.glob("*.jsonl")):
        if path.is_file() and _is_history(path):  # opening a named pipe would wait for a writer
            found = history.read(path)
            if found.records:
                histories[path.name] = found
    return histories


def _is_history(path: Path) -> bool:
    """Return whether a file is a history, rather than one of another program."""
    with path.open("rb") as file:
        return f'"{history.KEY}"'.encode() in file.readline()


_PACKAGES = {"matplotlib": "matplotlib", "markdown_it": "markdown-it-py"}
"""Module and package of each dependency of a report."""


def build(run: Path) -> Path:
    """Write report.html, figures/*.png and figures/*.svg of a folder or of one history, and return the page's path."""
    report, folder = read(run), _folder(run)
    figures, path = folder / "figures", folder / REPORT
    if figures.is_symlink():
        raise FlexActError(
            f"{figures} is a link to {os.readlink(figures)}; remove it, so that figures can be written here."
        )
    figures.mkdir(exist_ok=True)
    for section in report.sections:
        for picture in section.pictures:
            write_whole(figures / f"{picture.slug}.png", picture.png())
            write_whole(figures / f"{picture.slug}.svg", picture.svg())
    write_whole(path, page(report))
    return path


def _folder(run: Path) -> Path:
    return run.parent if run.is_file() else run


def check_packages() -> None:
    """Raise if a package that a report needs is missing. A study calls this before it trains."""
    for package in missing_packages():
        raise missing_extra(package, "report")


def missing_packages() -> list[str]:
    """Return the packages that a report needs and that are not installed."""
    return [package for module, package in _PACKAGES.items() if find_spec(module) is None]


def read(run: Path) -> Report:
    """Read the content of the report of a folder, or of one history."""
    check_packages()
    config = read_config(run) or {}
    histories = read_histories(run)
    if not config and not histories:
        names = sorted(path.name for path in run.iterdir()) if run.is_dir() else []
        raise FlexActError(
            f"{run} holds nothing to report: looked for config.json of a study (flexact reproduce ... --out DIR) and "
            "for *.jsonl with the history of a Recorder (Recorder(model, path=...), at least one record). Found: "
            f"{', '.join(names[:8]) or 'nothing'}."
        )
    sections = _study_sections(run, config) if config else []
    for name, one in histories.items():
        sections.append(_history_section(name, one.records, Path(name).stem if len(histories) > 1 else "history"))
    title = str(config.get("title") or f"flexact: {config.get('study') or _folder(run).resolve().name}")
    facts = {name: config.get(name) for name in ("device", "commit", "date")}
    shown = {"flexact_study", "study", "title"}
    details = {name: value for name, value in config.items() if name not in shown and value is not None}
    return Report(title, facts, sections, details | {name: one.about for name, one in histories.items()})


def _study_sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Return the sections of the study that wrote the folder. Studies register theirs in `flexact.studies.REPORTS`."""
    name = config["study"]
    modules = importlib.import_module("flexact.studies").REPORTS
    if name not in modules:
        body = markdown(read_text(folder / TABLE)) if (folder / TABLE).is_file() else ""
        return [Section(str(name), body, [])]
    sections: list[Section] = importlib.import_module(modules[name]).sections(folder, config)
    return sections


def _history_section(name: str, records: Records, stem: str) -> Section:
    found = outcomes(records)
    what = f"{counted(len(records), 'record')} of {counted(len(found), 'site')}"
    body = f"<p>{what}, steps {records[0]['step']} to {records[-1]['step']}.</p>\n"
    return Section(f"Run: {name}", body + outcome_table(found), history_pictures(records, stem))
