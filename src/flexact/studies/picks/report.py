"""The parts of the benchmark's page, from the files in its folder and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexact.report.page import Section, markdown
from flexact.studies.grid.report import finished
from flexact.studies.picks.pictures import picks_maps, regrets
from flexact.studies.picks.statistics import summaries
from flexact.studies.picks.study import Store
from flexact.studies.picks.table import table_of


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Regret and picks, then all tables; of a grid that is not finished, what there is."""
    store = Store(folder)
    done = finished(store)
    figures = [one for one in (regrets(summaries(done)), picks_maps(done)) if one is not None]
    return [Section("Regret and picks", "", figures), Section("Scores and costs", markdown(table_of(store)), [])]
