"""Tests of the grid: which cells run, which results are kept, and what a stop, a kill or a failure leaves behind."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flexact import FlexActError
from flexact.studies.cifar.protocol import Cell, Grid, Protocol
from flexact.studies.cifar.study import STUDY, Store
from flexact.studies.grid.cell_task import run_task
from flexact.studies.grid.engines import engine
from flexact.studies.grid.run import run
from flexact.studies.grid.status import states, table
from flexact.studies.grid.store import Store as GridStore

HERE = Path(__file__).parent
TWO = Grid(("cifar10",), ("resnet18",), ("relu", "flexact-all"), seeds=2)


def in_this_process(tasks: Any, ended: Any, beat: Any) -> None:
    """An engine for tests: runs one cell after another in this process."""
    for task in tasks:
        if beat():
            return
        ended(task, run_task(task, "cpu", beat))


@pytest.fixture
def go(fake_training: ModuleType, tmp_path: Path) -> Any:
    """Runs a grid with the fake trainer and a given behaviour."""
    data = tmp_path / "data"
    data.mkdir()

    def go(grid: Grid = TWO, behaviour: dict[str, Any] | None = None, **options: Any) -> Store:
        (data / "behaviour.json").write_text(json.dumps(behaviour or {}))
        chosen = {"engine": in_this_process, "protocol": Protocol(epochs=fake_training.EPOCHS), **options}
        store: Store = fake_training.store_in(tmp_path / "out")
        run(store, [grid], chosen.pop("protocol"), data, **chosen)
        return store

    return go


def rows(store: Store) -> list[tuple[str, str, float, int, str]]:
    return [(cell.name, r.state, r.accuracy, r.epochs, r.picks) for cell, r in store.results().items()]


def test_cells_run_seed_by_seed_so_that_a_partial_grid_can_be_compared() -> None:
    assert [(cell.method, cell.seed) for cell in TWO.cells] == [
        ("relu", 0),
        ("flexact-all", 0),
        ("relu", 1),
        ("flexact-all", 1),
    ]


def test_options_that_are_not_given_are_read_from_the_folder() -> None:
    begun = [Grid(("cifar10",), methods=("relu",), seeds=1), Grid(("cifar100",), methods=("gelu",), seeds=2)]
    before = {"grids": [dataclasses.asdict(grid) for grid in begun]}
    grown = Grid.asked_for({"seeds": 2}, before)
    assert [cell.name for grid in grown for cell in grid.cells] == [
        "cifar10-resnet18-relu-0",
        "cifar10-resnet18-relu-1",
        "cifar100-resnet18-gelu-0",
        "cifar100-resnet18-gelu-1",
    ]
    assert Grid.asked_for({"datasets": ("cifar10",), "methods": ("silu",), "seeds": 1}, before) == [
        Grid(("cifar10",), methods=("silu",), seeds=1)
    ]
    assert Grid.asked_for({}, before) == []
    assert Grid.asked_for({"seeds": 1}, None) == [Grid(seeds=1)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"methods": ("flexact-al",)}, "unknown method 'flexact-al'; did you mean 'flexact-all'"),
        ({"models": ("resnet19",)}, "unknown model 'resnet19'; did you mean 'resnet18'"),
        ({"datasets": ("cifar1000",)}, "unknown data set 'cifar1000'; did you mean 'cifar100'"),
        ({"methods": ()}, "--methods names nothing"),
        ({"methods": ("relu", "relu")}, "names relu more than once"),
        ({"seeds": 0}, "--seeds must be a whole number from 1"),
        ({"first_seed": -1}, "--first-seed must be a whole number from 0"),
    ],
)
def test_unknown_names_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FlexActError, match=message):
        Grid(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lokal", None, None, None), "unknown engine 'lokal'; did you mean 'local'"),
        (("local", None, None, "here:1"), "give it with --engine ray"),
        (("local", "gpu", None, None), "unknown device 'gpu'"),
        (("local", "cuda:99", None, None), "there is no cuda:99 here"),
        (("ray", "cuda:0", None, None), "Ray chooses the GPU"),
    ],
)
def test_an_unknown_engine_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(FlexActError, match=message):
        engine(*arguments)


def test_every_cell_has_one_line_and_one_folder(go: Any, fake_training: ModuleType) -> None:
    store = go()
    assert [name for name, *_ in rows(store)] == [cell.name for cell in TWO.cells]
    assert all(row.accuracy == fake_training.accuracy_of(cell) for cell, row in store.results().items())
    assert len((store.folder / "results.csv").read_text().splitlines()) == 5
    assert sorted(path.name for path in (store.folder / "cells").iterdir()) == sorted(cell.name for cell in TWO.cells)
    assert store.results()[TWO.cells[1]].picks == "layer1.0.relu=relu layer4.1.relu=tanh"


def test_lines_are_in_the_order_of_the_cells_however_the_engine_finished_them(go: Any) -> None:
    def backwards(tasks: Any, ended: Any, beat: Any) -> None:
        in_this_process(tasks[::-1], ended, beat)

    assert [name for name, *_ in rows(go(engine=backwards))] == [cell.name for cell in TWO.cells]


def test_a_failed_cell_is_recorded_and_the_grid_continues(go: Any) -> None:
    bad = TWO.cells[1]
    store = go(behaviour={"fail": [bad.name]})
    assert [row.state for row in store.results().values()] == ["done", "failed", "done", "done"]
    assert store.results()[bad].error == "the loss is nan, not finite"
    go(resume=True)
    assert store.results()[bad].state == "failed"  # failed cells are retried only on request
    go(retry_failed=True)
    assert store.results()[bad].state == "done"
    assert len((store.folder / "results.csv").read_text().splitlines()) == 5  # one line per cell


def test_done_cells_are_skipped_and_a_grid_can_be_extended(go: Any) -> None:
    store = go(Grid(("cifar10",), ("resnet18",), ("relu",), seeds=1))
    before = (store.folder / "results.csv").read_text()
    go(resume=True)
    after = (store.folder / "results.csv").read_text()
    assert after.startswith(before)
    assert len(store.results()) == 4
    assert (store.cell_folder(TWO.cells[0]) / "starts").read_text() == "0\n"
    assert {kind for kind, _ in states(store).values()} == {"done"}


def test_another_configuration_is_refused_with_the_difference(go: Any) -> None:
    go()
    with pytest.raises(FlexActError, match="already holds a run of this study"):
        go()
    with pytest.raises(FlexActError, match="epochs: 4 → 5"):
        go(protocol=Protocol(epochs=5), resume=True)
    with pytest.raises(FlexActError, match=r"partial: False → True"):
        go(protocol=Protocol(epochs=4, partial=True), resume=True)
    with pytest.raises(FlexActError, match="one of the two"):
        go(resume=True, overwrite=True)
    assert len(go(protocol=Protocol(epochs=4, checkpoint_minutes=0), resume=True).results()) == 4
    assert go(protocol=Protocol(epochs=5), overwrite=True).results()[TWO.cells[0]].epochs == 5


def test_other_data_of_the_same_name_are_refused(go: Any, tmp_path: Path) -> None:
    store = go(Grid(("cifar10",), ("resnet18",), ("relu",)), {"sha256": "11aa"})
    place = str(tmp_path / "data")
    assert store.config()["data"] == {"folder": place, "sha256": {"cifar10": "11aa"}}
    with pytest.raises(FlexActError, match=r"sha256.cifar10: 11aa → 22bb"):
        go(behaviour={"sha256": "22bb"}, resume=True)
    assert len(store.results()) == 3
    go(Grid(("cifar10", "cifar100"), ("resnet18",), ("relu",)), {"sha256": "11aa"}, resume=True)
    assert store.config()["data"]["sha256"] == {"cifar100": "11aa", "cifar10": "11aa"}
    assert len(go(behaviour={"sha256": "22bb"}, overwrite=True).results()) == 4


def test_an_old_grid_without_digests_can_be_resumed_and_gets_them(go: Any) -> None:
    store = go(Grid(("cifar10",), ("resnet18",), ("relu",)))
    path, known = store.folder / "config.json", store.config()
    path.write_text(json.dumps(known | {"data": {}}))
    old = path.read_text()
    go(Grid(("cifar10",), ("resnet18",), ("relu",)), resume=True)
    assert path.read_text() == old  # there was no file to read
    go(resume=True)
    assert store.config()["data"] == known["data"]


def test_a_foreign_folder_is_unchanged(go: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(FlexActError, match=r"thesis\.tex"):
        go(overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"


def test_a_full_disk_stops_the_grid_and_written_results_stay_valid(go: Any) -> None:
    full = TWO.cells[1]
    with pytest.raises(FlexActError, match=r"full.*1 of 4 cells.*--resume"):
        go(behaviour={"full": [full.name]})
    store = go(resume=True)
    assert [row.state for row in store.results().values()] == ["done"] * 4
    assert (store.cell_folder(full) / "starts").read_text() == "0\n2\n"


def test_failed_cells_do_not_count_as_kept(go: Any) -> None:
    with pytest.raises(FlexActError, match=r"1 of 4 cells kept, 1 failed; the others"):
        go(behaviour={"fail": [TWO.cells[0].name], "full": [TWO.cells[2].name]})


def test_a_line_that_does_not_fit_on_the_disk_is_not_half_written(
    go: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    new = tmp_path / "out" / "results.csv.new"

    def full(handle: int) -> None:
        if new.exists() and "flexact-all" in new.read_text():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("flexact.io.atomic_files.os.fsync", full)
    with pytest.raises(FlexActError, match="full"):
        go()
    monkeypatch.undo()
    store = Store(tmp_path / "out")
    assert [row.method for row in store.results().values()] == ["relu"]
    assert len(go(resume=True).results()) == 4


def test_a_damaged_line_is_reported_with_its_number(go: Any) -> None:
    store = go()
    path = store.folder / "results.csv"
    path.write_text(path.read_text().replace(",done,", ",perhaps,", 1))
    with pytest.raises(FlexActError, match=r"results\.csv, line 2.*'perhaps'"):
        store.results()


def test_a_second_grid_in_one_folder_is_refused_with_the_process_of_the_first(go: Any, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from flexact.studies.cifar.study import Store\n"
        "with Store(Path(sys.argv[1])).held(): print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(FlexActError, match=f"process {other.pid}"):
            go(overwrite=True)
    finally:
        other.kill()
        other.wait()
    assert len(go().results()) == 4  # a lock ends with its process


@pytest.mark.parametrize("flag", ["resume", "retry_failed"])
def test_a_folder_without_a_grid_cannot_be_resumed(go: Any, tmp_path: Path, flag: str) -> None:
    with pytest.raises(FlexActError, match=r"holds no grid of .* Give --out the folder of an existing grid"):
        go(**{flag: True})
    assert not (tmp_path / "out").exists()


def test_a_grid_run_from_a_source_tree_records_it(go: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("flexact.studies.provenance.version", lacking)
    store = go(Grid(("cifar10",), ("resnet18",), ("relu",)))
    known = store.config()
    assert known["versions"]["flexact"] == "source"
    monkeypatch.undo()
    monkeypatch.setattr("flexact.studies.provenance.version", lambda name: "1.0")
    with pytest.raises(FlexActError, match=r"flexact: source → 1\.0"):
        go(resume=True)


def test_one_cell_is_reported_in_the_singular(go: Any) -> None:
    alone = Grid(("cifar10",), ("resnet18",), ("relu",), seeds=1)
    with pytest.raises(FlexActError, match="0 of 1 cell"):
        go(alone, {"full": [alone.cells[0].name]})
    assert "\n1 cell: 1 done." in table(go(alone, resume=True))


def test_unreadable_data_stop_the_grid_before_any_cell(tmp_path: Path) -> None:
    def nothing(name: str, folder: Path, protocol: Protocol) -> Any:
        raise FlexActError("there is no CIFAR-10 here")

    unreadable = GridStore(tmp_path / "new" / "out", dataclasses.replace(STUDY, load=nothing))
    with pytest.raises(FlexActError, match="there is no CIFAR-10 here"):
        run(unreadable, [TWO], Protocol(), tmp_path, in_this_process)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_local_engine_survives_a_worker_that_dies_and_one_that_fails(go: Any) -> None:
    dead, bad = TWO.cells[0], TWO.cells[1]
    store = go(behaviour={"die": [dead.name], "fail": [bad.name]}, engine=engine("local", "cpu", 2))
    results = store.results()
    assert {cell: results[cell].state for cell in TWO.cells} == dict(
        zip(TWO.cells, ("failed", "failed", "done", "done"), strict=True)
    )
    assert "the worker died" in results[dead].error
    go(retry_failed=True, engine=engine("local", "cpu", 1))
    assert {row.state for row in store.results().values()} == {"done"}
    assert (store.cell_folder(dead) / "starts").read_text() == "0\n2\n"  # from its checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_or_killed_grid_resumes_to_the_same_results(
    number: signal.Signals, go: Any, tmp_path: Path, fake_training: ModuleType
) -> None:
    (tmp_path / "data" / "behaviour.json").write_text(json.dumps({"pace": 0.3}))
    out = tmp_path / "killed"
    command = [sys.executable, str(HERE / "fake_training.py"), str(out), str(tmp_path / "data"), "relu,flexact-all"]
    process = subprocess.Popen([*command, "local"], stdout=subprocess.PIPE, text=True)
    second = Store(out).cell_folder(TWO.cells[1]) / "curve.csv"
    wait_for(lambda: second.exists())
    shown = table(Store(out))
    process.send_signal(number)
    words = process.communicate(timeout=60)[0]
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert f"stopped by {number.name}; 1 of 4 cells kept" in words
        assert "running | epoch" in " ".join(shown.split())
    assert len(Store(out).results()) == 1
    assert subprocess.run([*command, "local", "--resume"], timeout=60).returncode == 0
    starts = (Store(out).cell_folder(TWO.cells[1]) / "starts").read_text().split()
    assert starts[0] == "0"
    assert int(starts[1]) >= 1
    assert rows(Store(out)) == rows(go())


def test_status_shows_the_progress_of_every_cell(go: Any) -> None:
    store = go(Grid(("cifar10",), ("resnet18",), ("relu", "flexact-all")), {"fail": [TWO.cells[1].name]})
    lines = (store.folder / "results.csv").read_text().splitlines(keepends=True)
    (store.folder / "results.csv").write_text("".join(lines[:4]))
    shutil.rmtree(store.cell_folder(Cell("cifar10", "resnet18", "relu", 2)))
    (store.cell_folder(Cell("cifar10", "resnet18", "flexact-all", 2)) / "curve.csv").unlink()  # before its first epoch
    kinds = [(cell.method, cell.seed, kind) for cell, (kind, _) in states(store).items()]
    assert kinds == [
        ("relu", 0, "done"),
        ("flexact-all", 0, "failed"),
        ("relu", 1, "done"),
        ("flexact-all", 1, "stopped"),
        ("relu", 2, "missing"),
        ("flexact-all", 2, "stopped"),
    ]
    shown = table(store)
    about, _, header, rule = shown.splitlines()[:4]
    assert "; 4 epochs; policy default; candidates relu, leaky_relu, gelu, silu; commit " in about
    assert header.split("|")[-2].strip() == "progress"
    assert [cell.strip().endswith(":") for cell in rule.split("|")[1:-1]] == [False] * 3 + [True] + [False] * 2
    assert "70.00 %" in shown
    assert f"- {TWO.cells[1].name}: the loss is nan, not finite" in shown
    assert "6 cells: 2 done, 1 failed, 2 stopped, 1 missing." in shown
    assert "device" not in shown
    (store.folder / "results.csv").write_text("".join([*lines[:3], lines[3].replace(",cpu,", ",NVIDIA H200,")]))
    assert "Trained on several devices: cpu (1 cell), NVIDIA H200 (1 cell)" in table(store)
    with pytest.raises(FlexActError, match="holds no grid"):
        states(Store(store.folder / "nowhere"))


def wait_for(there: Any, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until
        time.sleep(0.05)
