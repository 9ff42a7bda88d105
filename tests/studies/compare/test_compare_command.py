"""End-to-end tests of `flexact compare`: resume, stopping, engines, and invalid input."""

from __future__ import annotations

import csv
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

import flexact
from flexact.cli.app import main
from flexact.studies.compare.functions import named
from flexact.studies.compare.study import Store

HERE = Path(__file__).parent
TIMED = ("seconds", "commit", "date")
FUNCTIONS = ("small_training:build", "small_training:train")
OPTIONS = ("--candidates", "relu,tanh,gelu", "--seeds", "2", "--device", "cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a user's module, which is not on sys.path."""
    shutil.copy(HERE / "small_training.py", tmp_path)
    return tmp_path


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from flexact.cli.app import main; main()", "compare", *words]


def environment(**settings: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"} | settings


def called(*words: str, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), cwd=cwd, env=environment(**settings), capture_output=True, text=True, timeout=240
    )


def results(folder: Path) -> dict[str, dict[str, str]]:
    """Returns the rows by cell, without times and commit."""
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        f"{row['method']}-{row['seed']}": {name: value for name, value in row.items() if name not in TIMED}
        for row in rows
    }


def table_without_costs(folder: Path) -> list[str]:
    """Returns the lines of table.md, without the last column in the table of methods."""
    lines = (folder / "table.md").read_text().splitlines()
    return ["|".join(line.split("|")[:6]) if line.count("|") == 7 else line for line in lines]


def ran(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_a_killed_and_resumed_comparison_has_the_table_of_an_uninterrupted_one(folder: Path, small: ModuleType) -> None:
    whole = called(*FUNCTIONS, *OPTIONS, "--out", "whole", cwd=folder)
    assert whole.returncode == 0, whole.stderr
    assert "| flexact-alone |" in whole.stdout
    assert "10/10 flexact-alone-1" in whole.stderr
    for name in ("report.html", "table.md", "figures/differences.svg"):
        assert (folder / "whole" / name).is_file()
    assert {row["state"] for row in results(folder / "whole").values()} == {"done"}

    process = subprocess.Popen(
        command(*FUNCTIONS, *OPTIONS, "--out", "killed", "--quiet"), cwd=folder, env=environment()
    )
    until = time.monotonic() + 60
    while len(Store(folder / "killed").results()) < 3:
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(results(folder / "killed")) < 10
    resumed = called(*FUNCTIONS, *OPTIONS, "--out", "killed", "--resume", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert results(folder / "killed") == results(folder / "whole")
    here = {"out": folder / "here", "engine": "inline", "device": "cpu", "quiet": True}
    flexact.compare(small.build, small.train, small.CANDIDATES, seeds=2, **here)
    assert results(folder / "here") == results(folder / "whole")
    assert table_without_costs(folder / "killed") == table_without_costs(folder / "whole")


@pytest.mark.slow
def test_ray_and_two_processes_give_the_results_of_one_process(folder: Path) -> None:
    pytest.importorskip("ray")
    # A separate token for this test; otherwise Ray writes one to the home folder.
    settings = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    for name, words in {"one": [], "two": ["--jobs", "2"], "ray": ["--engine", "ray"]}.items():
        words = [*words, "--methods", "original,flexact,flexact-alone", "--out", name]
        ended = called(*FUNCTIONS, *OPTIONS, *words, cwd=folder, **settings)
        assert ended.returncode == 0, ended.stderr
    assert results(folder / "two") == results(folder / "one")
    assert results(folder / "ray") == results(folder / "one")
    assert list(results(folder / "ray")) == list(results(folder / "two")) == list(results(folder / "one"))
    assert table_without_costs(folder / "ray") == table_without_costs(folder / "one")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "inline"])
def test_a_signal_stops_a_training_that_does_not_handle_it(folder: Path, engine: str) -> None:
    words = command("small_training:build", "small_training:endless", *OPTIONS, "--out", "out", "--engine", engine)
    process = subprocess.Popen(words, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (folder / "out" / "cells" / "original-0" / "run.lock").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; 0 of 10 cells kept; the others resume from their last checkpoints, or" in output
    assert "Resume with: " in output
    assert results(folder / "out") == {}


def test_failed_runs_are_counted_and_retried(
    folder: Path, monkeypatch: pytest.MonkeyPatch, small: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = ["small_training:build", "small_training:fails_on_seed_1", "--out", "out", "--engine", "inline"]
    words += ["--device", "cpu"]
    words += ["--candidates", "relu,tanh", "--seeds", "2", "--methods", "original,fixed"]
    assert ran(*words) == 1
    error = capsys.readouterr().err
    assert "flexact: 2 cells failed; --status shows the errors, --retry-failed reruns the cells." in error
    assert ran("--out", "out", "--status") == 0
    output = capsys.readouterr().out
    assert "build small_training:build; train small_training:fails_on_seed_1; candidates relu, tanh" in output
    assert "4 cells: 2 done, 2 failed." in output
    assert "train raised RuntimeError: the disk of the user is missing" in output
    (folder / "corrected").touch()
    assert ran(*words, "--retry-failed", "--quiet") == 0
    assert {row["state"] for row in results(folder / "out").values()} == {"done"}


def test_settings_are_read_from_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch, small: ModuleType) -> None:
    monkeypatch.chdir(folder)
    config = flexact.FlexConfig(candidates=("relu", "silu"), pick_by="blend", share="site")
    (folder / "config.json").write_text(config.to_json())
    words = [*FUNCTIONS, "--out", "out", "--engine", "inline", "--device", "cpu", "--quiet"]
    words += ["--config", "config.json", "--where", "3", "--methods", "flexact"]
    assert ran(*words, "--seeds", "1") == 0
    assert ran(*words, "--resume", "--seeds", "2") == 0
    shown = json.loads((folder / "out" / "config.json").read_text())["protocol"]
    assert flexact.FlexConfig.from_dict(shown["config"]) == config
    assert (shown["where"], shown["sites"]) == ("3", ["3"])
    assert list(results(folder / "out")) == ["flexact-0", "flexact-1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a function is missing. Give both, as in: flexact compare my_module:build my_module:train"),
        (["small_training", FUNCTIONS[1]], "cannot load 'small_training' (it is a module). Give module:name"),
        ([FUNCTIONS[0], "x"], "cannot load 'x' (No module named 'x'). Give module:name"),
        (["smal_training:build", FUNCTIONS[1]], "cannot load 'smal_training:build' (No module named"),
        (["small_training:biuld", FUNCTIONS[1]], "has no attribute 'biuld')"),
        (["small_training:STEPS", FUNCTIONS[1]], "got 30, which cannot be called as build()"),
        ([*FUNCTIONS, "--config", "nothing.json"], "cannot read nothing.json"),
        ([*FUNCTIONS, "--resume"], "holds no grid of `flexact compare`"),
        (["--status"], "holds no grid of `flexact compare`"),
    ],
)
def test_invalid_input_is_reported_in_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    assert ran(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "runs").exists()


def test_a_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_in_this_folder.py").write_text("class Kind:\n    def build():\n        return 5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(Path.cwd()))])
    assert named("only_in_this_folder:Kind.build")() == 5
