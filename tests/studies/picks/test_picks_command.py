"""End-to-end tests of `flexact reproduce picks`."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexact.cli.app import main
from flexact.studies.grid.cell_task import run_task, without_step_ms
from flexact.studies.grid.run import run
from flexact.studies.grid.study import picked
from flexact.studies.picks.protocol import CHOOSING, Cell, Grid, Protocol
from flexact.studies.picks.study import Store
from flexact.studies.picks.tasks import TASKS
from flexact.studies.workers import Answer

TIMED = ("seconds", "date")


def ran(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "picks", *arguments])
    return int(ended.value.code or 0)


def results(folder: Path) -> dict[Cell, dict[str, object]]:
    """Returns the rows without measured times."""
    rows = Store(folder).results()
    return {
        cell: {name: value for name, value in row._asdict().items() if name not in TIMED} for cell, row in rows.items()
    }


def in_this_process(tasks: Any, ended: Any, beat: Any) -> None:
    """An engine for tests: runs one cell after another in this process."""
    for task in tasks:
        ended(task, run_task(task, "cpu", beat))


@pytest.mark.slow
def test_a_killed_and_resumed_benchmark_has_the_results_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = "reproduce picks --tasks tabular --seeds 1 --steps 40 --device cpu --methods "
    words += "fixed-relu,fixed-gelu,flexact,flexact-alone,flexact-one,random,race"
    command = [sys.executable, "-m", "flexact", *words.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--out", str(whole)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "| flexact-alone |" in ended.stdout
    for name in ("report.html", "table.md", "figures/regret.svg"):
        assert (whole / name).is_file()
    assert len(results(whole)) == 7
    assert all(row["state"] == "done" for row in results(whole).values())

    process = subprocess.Popen([*command, "--out", str(killed), "--quiet"], env=environment)
    until = time.monotonic() + 60
    while len(Store(killed).results()) < 3:
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(Store(killed).results()) < 7
    resumed = [*command[:5], "--resume", "--quiet", "--out", str(killed)]
    assert subprocess.run(resumed, env=environment, timeout=120).returncode == 0
    assert results(killed) == results(whole)


def test_sigterm_stops_a_long_run_soon(tmp_path: Path) -> None:
    words = "reproduce picks --tasks tabular --methods fixed-relu --seeds 1 --steps 200000 --device cpu --quiet"
    command = [sys.executable, "-m", "flexact", *words.split(), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
    lock = tmp_path / "out" / "cells" / "tabular-fixed-relu-0" / "run.lock"
    until = time.monotonic() + 60
    while not lock.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; 0 of 1 cell kept; the others resume from their last checkpoints, or" in output
    assert Store(tmp_path / "out").results() == {}


@pytest.fixture
def go(tmp_path: Path) -> Callable[..., Store]:
    """Runs cells of the benchmark in this process."""

    def go(tasks: str, methods: str, **options: Any) -> Store:
        protocol = Protocol(steps=options.pop("steps", 10), partial=True)
        grid = Grid(tuple(tasks.split(",")), tuple(methods.split(",")), seeds=1)
        store = Store(tmp_path / "out")
        run(store, [grid], protocol, tmp_path / "data", in_this_process, **options)
        return store

    return go


def test_an_image_task_runs_on_a_small_cifar(
    go: Callable[..., Store], tmp_path: Path, write_cifar: Callable[..., Path]
) -> None:
    write_cifar(tmp_path / "data", "cifar100", train=100, test=20)
    store = go("autoencoder", "fixed,flexact,flexact-alone,flexact-one,flexact-sites,random,race")
    rows = store.results()
    assert [row.state for row in rows.values()] == ["done"] * 13
    sites = {str(place) for place in range(1, 10, 2)}
    assert set(picked(rows[Cell("autoencoder", "race", 0)].picks)) == sites
    assert list(store.config()["data"]["sha256"]) == ["cifar100"]


def test_a_cell_that_diverges_fails_and_the_others_continue(
    go: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = dataclasses.replace(TASKS["tabular"], lr=1e12, optimizer="sgd")
    monkeypatch.setitem(TASKS, "tabular", hot)
    rows = go("tabular,coordinates", "fixed-relu").results()
    shown = {cell.task: (row.state, row.error) for cell, row in rows.items()}
    assert shown["coordinates"] == ("done", "")
    assert shown["tabular"][0] == "failed"
    assert "a network of tabular diverged: its training loss is nan" in shown["tabular"][1]
    monkeypatch.undo()
    again = go("tabular,coordinates", "fixed-relu", retry_failed=True).results()
    assert again[Cell("tabular", "fixed-relu", 0)].state == "done"


def test_overwriting_removes_the_plain_runs_that_were_kept(go: Callable[..., Store], tmp_path: Path) -> None:
    go("tabular", "fixed-relu")
    (kept,) = (tmp_path / "out" / "plain").iterdir()
    kept.write_text('{"score": 1.0, "steps": 10, "seconds": 1.0, "picks": {}}')
    resumed = go("tabular", "fixed-relu,random,fixed-gelu", resume=True).results()
    assert resumed[Cell("tabular", "fixed-relu", 0)].score != 1.0
    fresh = go("tabular", "fixed-relu", overwrite=True).results()
    assert fresh[Cell("tabular", "fixed-relu", 0)].score == resumed[Cell("tabular", "fixed-relu", 0)].score


def test_a_row_has_the_documented_columns(go: Callable[..., Store], tmp_path: Path) -> None:
    go("tabular", "random")
    header = (tmp_path / "out" / "results.csv").read_text().splitlines()[0]
    assert header == "task,method,seed,state,score,steps,seconds,picks,error,device,torch,commit,date"


def test_cells_that_share_a_device_keep_their_columns() -> None:
    figures = {"score": 1.0, "steps": 10, "seconds": 1.0, "picks": ""}
    assert without_step_ms(Answer("done", figures)).figures == figures


def test_status_shows_the_progress_of_the_benchmark(
    go: Callable[..., Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go("tabular", "fixed-relu,fixed-gelu")
    path = tmp_path / "out" / "results.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    (tmp_path / "out" / "cells" / "tabular-fixed-gelu-0" / "run.lock").unlink()
    assert ran("--out", str(tmp_path / "out"), "--status") == 0
    output = capsys.readouterr().out
    assert "The benchmark of picks; 10 steps per plain run; commit" in output
    assert "2 cells: 1 done, 1 missing." in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "tabluar"], "unknown task 'tabluar'; did you mean 'tabular'?"),
        (["--methods", "flexct"], "unknown method 'flexct'; did you mean 'flexact'?"),
        (["--methods", "fixed-rleu"], "unknown method 'fixed-rleu'; did you mean 'fixed-relu'?"),
        (
            ["--tasks", "tabular", "--methods", "fixed-sine"],
            "none of the tasks tabular has one of the methods fixed-sine",
        ),
        (["--tasks", "tabular,tabular"], "--tasks names tabular more than once"),
        (["--engine", "rey"], "unknown engine 'rey'; did you mean 'ray'?"),
        (["--data", "nowhere"], "there is no CIFAR-100 in /"),
        (["--data", "nowhere"], "need it: give its folder with --data, or select other --tasks."),
        (["--resume"], "holds no grid"),
    ],
)
def test_bad_input_is_one_line_with_a_suggestion(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("--out", str(tmp_path / "out"), *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_names_every_task_and_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("--help") == 0
    message = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert ", ".join(TASKS) in message
    assert ", ".join(CHOOSING) in message
