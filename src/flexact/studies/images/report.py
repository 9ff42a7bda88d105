"""The parts of a grid's page, from the files in its folder and nothing else."""

from __future__ import annotations

from pathlib import Path

from flexact.studies.grid.curves import read_curve
from flexact.studies.grid.pictures import final_picks
from flexact.studies.grid.store import DONE
from flexact.studies.images.cells import asked
from flexact.studies.images.pictures import accuracy_curves, costs, selection_by_depth
from flexact.studies.images.protocol import Protocol
from flexact.studies.images.statistics import summaries
from flexact.studies.images.store import Result, Store
from flexact.studies.images.table import table as markdown_table
from flexact.studies.images.table import title
from flexact.studies.report_data import read_histories
from flexact.studies.report_page import Section, markdown
from flexact.studies.store import TABLE
from flexact.writing import write_whole


def write_table(store: Store) -> Path:
    """table.md from what is done so far; its path."""
    path = store.folder / TABLE
    write_whole(path, _table(store))
    return path


def sections(folder: Path) -> list[Section]:
    """Accuracy, cost and selection by depth; of a grid that is not finished, what there is."""
    store = Store(folder)
    cells, results = asked(store.config()), store.results()
    done = [results[cell] for cell in cells if cell in results and results[cell].state == DONE]
    curves = {cell: curve for cell in cells if (curve := read_curve(store.cell_folder(cell))).epochs}
    figures = [accuracy_curves(curves), costs(summaries(done))]
    histories = {}
    for cell in cells:
        found = read_histories(store.cell_folder(cell)) if store.cell_folder(cell).is_dir() else {}
        if found:
            histories[cell] = next(iter(found.values())).records
    parts = [Section("Accuracy and cost", markdown(_table(store)), [one for one in figures if one is not None])]
    if histories:
        parts.append(Section("What was picked, by depth", _pick_tables(done), selection_by_depth(histories)))
    return parts


def _table(store: Store) -> str:
    config = store.config()
    results = store.results()
    return markdown_table(list(results.values()), Protocol.from_dict(config["protocol"]), asked(config))


def _pick_tables(done: list[Result]) -> str:
    """Site by seed, a table for each kind of run."""
    kinds: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in done:
        if row.picks:
            kinds.setdefault((row.dataset, row.model, row.method), {})[row.seed] = row.picks
    return "\n".join(
        final_picks(f"{title(method)}, {title(model)} on {title(dataset)}", by_seed)
        for (dataset, model, method), by_seed in kinds.items()
    )
