"""End-to-end tests of `flexact reproduce cifar`, with the real trainer on a small data set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexact.cli.app import main
from flexact.studies.cifar.protocol import RECTIFIERS, Cell, Protocol
from flexact.studies.cifar.study import Store

HERE = ("--engine", "streams", "--jobs", "1")
"""Runs cells in this process, which needs no time to start."""
TIMED = ("seconds", "step_ms", "date")


@pytest.fixture
def command(tmp_path: Path, write_cifar: Callable[..., Path]) -> list[str]:
    """The arguments of a grid of two methods and two seeds, without its --out."""
    write_cifar(tmp_path / "data", "cifar10", train=100, test=50)
    words = "reproduce cifar --datasets cifar10 --methods relu,flexact-all --seeds 2 --epochs 3 --batch 50 --width 4"
    more = f"--partial --data {tmp_path / 'data'} --device cpu --checkpoint-minutes 0"
    return [sys.executable, "-m", "flexact", *words.split(), *more.split()]


def results(folder: Path) -> list[dict[str, object]]:
    """Returns the rows without measured times."""
    rows = Store(folder).results().values()
    return [{name: value for name, value in row._asdict().items() if name not in TIMED} for row in rows]


@pytest.mark.slow
def test_a_killed_and_resumed_grid_has_the_results_of_an_uninterrupted_one(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    monkeypatch.setenv("FLEXACT_COMMIT", "abc")
    assert ran(*command[5:], *HERE, "--out", str(whole)) == 0
    assert "| Flex-Act (all layers) |" in capsys.readouterr().out
    assert (whole / "report.html").is_file()
    assert (whole / "figures" / "selection-cifar10-resnet18-flexact-all.svg").is_file()
    assert len(results(whole)) == 4

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--out", str(killed), "--quiet"], env=environment)
    second = Store(killed).cell_folder(Cell("cifar10", "resnet18", "flexact-all", 0)) / "checkpoint.pt"
    until = time.monotonic() + 120
    while not second.exists():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert ran(*command[5:], "--out", str(killed), "--status") == 0
    assert "4 cells: 1 done" in capsys.readouterr().out
    assert ran(*command[5:], *HERE, "--out", str(killed), "--quiet", "--resume") == 0
    assert results(killed) == results(whole)


def test_without_the_packages_of_the_report_it_trains_and_prints_the_table(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(SystemExit) as ended:
        main([*command[3:], *HERE, "--epochs", "1", "--seeds", "1", "--out", str(tmp_path / "run")])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "| ReLU" in out
    assert "Page: not built, because markdown-it-py is missing" in out
    assert (tmp_path / "run" / "table.md").is_file()
    assert not (tmp_path / "run" / "report.html").exists()


def test_cells_in_threads_have_the_results_of_cells_in_processes(command: list[str], tmp_path: Path) -> None:
    for engine in ("streams", "local"):
        options = ["--engine", engine, "--jobs", "2", "--epochs", "1", "--seeds", "1", "--quiet"]
        assert ran(*command[5:], *options, "--out", str(tmp_path / engine)) == 0
    assert results(tmp_path / "streams") == results(tmp_path / "local")
    assert {row["state"] for row in results(tmp_path / "streams")} == {"done"}


def ran(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "cifar", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_resume_alone_uses_the_settings_of_the_first_call(
    tmp_path: Path, write_cifar: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_cifar(tmp_path / "data", "cifar10", train=100, test=50)
    out, store = tmp_path / "out", Store(tmp_path / "out")
    here = ["--out", str(out), "--device", "cpu", "--quiet", *HERE]
    asked = "--datasets cifar10 --methods relu --seeds 2 --epochs 1 --batch 50 --width 4 --partial"
    assert ran(*here, *asked.split(), "--data", str(tmp_path / "data")) == 0
    before, path = store.config(), out / "results.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert ran(*here, "--resume") == 0
    assert [cell.seed for cell in store.results()] == [0, 1]
    assert store.config() == before
    assert ran(*here, "--retry-failed") == 0
    assert store.config() == before
    assert ran(*here, "--resume", "--methods", "prelu", "--seeds", "1") == 0
    assert [cell.method for cell in store.results()] == ["relu", "relu", "prelu"]
    capsys.readouterr()
    assert ran(*here, "--resume", "--lr", "0.3", "--budget", "short") == 2
    assert "(epochs: 1 → 30; lr: 0.1 → 0.3)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "reluu"], "unknown method 'reluu'; did you mean 'relu'?"),
        (["--models", "resnet50"], "unknown model 'resnet50';"),
        (["--datasets", "cifar11"], "unknown data set 'cifar11'; did you mean 'cifar10'?"),
        (["--engine", "rey"], "unknown engine 'rey'; did you mean 'ray'?"),
        (["--budget", "shrt"], "unknown budget 'shrt'; did you mean 'short'?"),
        (["--budget", "shrt", "--epochs", "3"], "unknown budget 'shrt'; did you mean 'short'?"),
        (["--budget", "short", "--epochs", "3"], "--budget short is 30 epochs and --epochs asks for 3; give one"),
        (["--policy", "papr"], "unknown policy 'papr'; did you mean 'paper'?"),
        (["--candidates", "relu,tahn"], "unknown candidate 'tahn'; did you mean 'tanh'?"),
        (["--methods", ","], "--methods names nothing"),
        (["--data", "nowhere"], "there is no CIFAR-10 in /"),
        (["--status"], "holds no grid"),
        (["--resume"], "holds no grid"),
        (["--resume", "--methods", "relu"], "holds no grid"),
        (["--retry-failed"], "holds no grid"),
    ],
)
def test_bad_input_is_one_line_with_a_suggestion(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "cifar", "--out", str(tmp_path / "out"), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_papers_policy_has_the_papers_candidates(command: list[str], tmp_path: Path) -> None:
    options = ["--policy", "paper", "--seeds", "1", "--epochs", "1", "--quiet"]
    assert ran(*command[5:], *HERE, *options, "--out", str(tmp_path / "out")) == 0
    assert Store(tmp_path / "out").protocol() == Protocol(
        policy="paper", epochs=1, batch=50, width=4, partial=True, checkpoint_minutes=0
    )


def test_help_names_the_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("--help") == 0
    assert f"({', '.join(RECTIFIERS)};" in " ".join(capsys.readouterr().out.replace("│", "").split())


def test_an_interrupt_before_a_grid_starts_does_not_advise_resume(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flexact.studies.cifar.study.load", interrupted)
    assert ran(*command[5:], "--out", str(tmp_path / "out")) == 130
    output = capsys.readouterr().err
    assert "nothing was started" in output
    assert "--resume" not in output
    assert not (tmp_path / "out").exists()
