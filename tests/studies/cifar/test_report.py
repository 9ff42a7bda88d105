"""Tests of the figures and the report of a grid."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from flexact.report.build import build, read_histories
from flexact.studies.cifar.protocol import Grid, Protocol
from flexact.studies.cifar.study import Store, accuracy_curves
from flexact.studies.grid.cell_task import read_curve, run_task
from flexact.studies.grid.report import selection_by_depth
from flexact.studies.grid.run import run


@pytest.fixture
def store(fake_training: ModuleType, tmp_path: Path) -> Store:
    def engine(tasks, ended, beat) -> None:  # type: ignore[no-untyped-def]
        for task in tasks:
            ended(task, run_task(task, "cpu", beat))

    grid = Grid(("cifar100",), ("resnet18",), ("relu", "flexact-all"), seeds=2)
    protocol = Protocol(epochs=fake_training.EPOCHS)
    store = fake_training.store_in(tmp_path / "out")
    run(store, [grid], protocol, tmp_path, engine)
    return store


def test_the_page_has_table_curves_and_selection(store: Store) -> None:
    assert "Flex-Act (all layers)" in store.table()
    page = build(store.folder).read_text(encoding="utf-8")
    for words in ("79.29 ± 0.11", "Accuracy over epochs", "Selection by depth"):
        assert words in page
    names = {path.name for path in (store.folder / "figures").iterdir()}
    slugs = ("accuracy", "selection-cifar100-resnet18-flexact-all")
    assert names == {f"{slug}.{kind}" for slug in slugs for kind in ("png", "svg")}


def test_accuracy_is_the_mean_over_seeds(store: Store) -> None:
    curves = {cell: read_curve(store.cell_folder(cell)) for cell in store.results()}
    picture = accuracy_curves(curves)
    assert picture is not None
    relu, flexact = picture.figure.axes[0].get_lines()
    assert list(relu.get_ydata()) == [67.5, 68.5, 69.5, 70.5]
    assert list(flexact.get_xdata()) == [1, 2, 3, 4]
    assert flexact.get_ydata()[-1] == pytest.approx(70.5 + 0.55)


def test_accuracy_has_a_panel_for_the_last_quarter_and_the_tables_order() -> None:
    points = list(range(5, 201, 5))
    curve = [{"epoch": epoch, "test_accuracy": 50.0 + epoch / 10} for epoch in points]
    grid = Grid(("cifar100", "cifar10"), ("resnet34", "resnet18"), ("relu",), seeds=1)
    picture = accuracy_curves(dict.fromkeys(grid.cells, curve))
    assert picture is not None
    assert "band of one standard deviation" in picture.title
    titles = [ax.get_title() for ax in picture.figure.axes]
    whole = ["ResNet-18 on CIFAR-10", "ResNet-34 on CIFAR-10", "ResNet-18 on CIFAR-100", "ResNet-34 on CIFAR-100"]
    assert titles[::2] == whole
    assert titles[1::2] == [f"{heading}: last quarter" for heading in whole]
    (line,) = picture.figure.axes[1].get_lines()
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == (150, 200)
    assert line.get_ydata()[0] == 65.0


def test_selection_is_by_site_and_epoch_with_a_panel_per_seed(store: Store) -> None:
    histories = {
        cell.seed: found["history.jsonl"].records
        for cell in store.results()
        if (found := read_histories(store.cell_folder(cell)))
    }
    picture = selection_by_depth("flexact-all", "all layers", histories)
    assert [ax.get_title() for ax in picture.figure.axes] == ["seed 0", "seed 1"]
    ax = picture.figure.axes[0]
    assert (ax.get_xlabel(), ax.get_xlim()) == ("epoch", (-0.5, 4.5))
    assert [text.get_text() for text in ax.get_yticklabels()] == ["layer1.0.relu", "layer4.1.relu"]


def test_a_grid_without_finished_cells_has_a_report_too(store: Store) -> None:
    (store.folder / "results.csv").unlink()
    for path in store.folder.glob("cells/*/*"):
        path.unlink()
    assert "Not done yet, 4 of 4" in build(store.folder).read_text(encoding="utf-8")
