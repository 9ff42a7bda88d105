"""The sections of a synthetic study's page, from the files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexact.io.csv_rows import read_text
from flexact.io.markdown_tables import PAPERS_ROW
from flexact.io.result_folder import TABLE
from flexact.report.page import Section, markdown
from flexact.studies.synthetic.studies import STUDIES
from flexact.studies.synthetic.study_run import read_run


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Return the table and the figures of a run. An unfinished run shows its finished models."""
    study = STUDIES[config["study"]]
    run = read_run(folder, config)
    body = markdown(read_text(folder / TABLE), muted=PAPERS_ROW) if (folder / TABLE).is_file() else ""
    if not run.results:
        body += "<p>No results yet.</p>"
    drawn = [draw(run) for draw in study.pictures]
    return [Section(study.question, body, [one for one in drawn if one is not None])]
