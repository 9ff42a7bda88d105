"""The sections of a synthetic study's page, from the files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexact.io.csv_rows import read_text
from flexact.io.markdown_tables import PAPERS_ROW
from flexact.io.result_folder import TABLE
from flexact.report.page import Section, markdown
from flexact.studies.synthetic.store import read_options, read_parts
from flexact.studies.synthetic.studies import STUDIES


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Return the table and the figures of a run. An unfinished run shows its finished models."""
    study, options = STUDIES[config["study"]], read_options(folder, config)
    parts = read_parts(folder, study.name, options)
    body = markdown(read_text(folder / TABLE), muted=PAPERS_ROW) if (folder / TABLE).is_file() else ""
    if not parts:
        body += "<p>No results yet.</p>"
    drawn = [draw(options, parts) for draw in study.pictures]
    return [Section(study.question, body, [one for one in drawn if one is not None])]
