"""A rank that dies or hangs: the others end with a message, and the run goes on from its last checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forked

EPOCHS, STEPS_AN_EPOCH = 6, 5
OPTIONS = (
    f"--dataset cifar10 --model resnet18 --method flexact-all --epochs {EPOCHS} --batch 8 --lr 0.02 --width 4 "
    "--partial --device cpu --checkpoint-minutes 0 --evaluate-every 6"
)
WAIT = 90
"""Seconds for anything that should take few."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few images in the official layout."""
    path = Path(__file__).parents[1] / "studies" / "cifar_data" / "official_layout.py"
    spec = importlib.util.spec_from_file_location("faults_official_layout", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("data")
    module.write_cifar(folder, "cifar10", train=45, test=10)
    return folder


class Run:
    """Two ranks, each started by hand, as on two hosts: nobody ends one when the other dies."""

    def __init__(self, data: Path, out: Path, timeout: float = 60.0, kind: Any = forked.Program) -> None:
        self.out = out
        module = "flexact.studies.cifar.train"
        words = [*OPTIONS.split(), "--data", data, "--out", out, "--timeout", timeout]
        self.ranks = forked.ranks(2, module, *words, settings={"MKL_NUM_THREADS": 1}, kind=kind)

    def wait_for(self, step: int) -> None:
        until = time.monotonic() + WAIT
        while step_of(self.out) < step:
            assert all(rank.returncode is None for rank in self.ranks), [rank.output() for rank in self.ranks]
            assert time.monotonic() < until
            time.sleep(0.005)

    def ended(self, rank: int) -> tuple[int, str]:
        """Exit code and what was said, of a rank that must end by itself."""
        _, told = self.ranks[rank].output(WAIT)
        code = self.ranks[rank].returncode
        assert code is not None
        return code, told

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()


def _environment(**settings: object) -> dict[str, str]:
    told = {name: str(value) for name, value in settings.items()}
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **told}


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """Every run that a test starts, ended with it."""
    started: list[Run] = []
    yield started
    for run in started:
        run.close()


def step_of(folder: Path) -> int:
    path = folder / "checkpoint.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else -1


def finished(folder: Path) -> bool:
    return "outcome" in json.loads((folder / "checkpoint.json").read_text())


def to_the_end(data: Path, out: Path, runs: list[Run]) -> bytes:
    runs.append(Run(data, out))
    for rank in (0, 1):
        code, told = runs[-1].ended(rank)
        assert code == 0, told
    assert finished(out)
    return (out / "network.safetensors").read_bytes()


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_the_run_goes_on_bit_for_bit(
    data: Path, tmp_path: Path, runs: list[Run]
) -> None:
    straight = to_the_end(data, tmp_path / "straight", runs)
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "flexact.studies.cifar.train", *OPTIONS.split(), "--data", str(data), "--out", str(out)]
    with subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        until = time.monotonic() + WAIT
        while step_of(out) < 2 * STEPS_AN_EPOCH:
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < until
            time.sleep(0.005)
        ranks = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
        os.kill(ranks[-1], signal.SIGKILL)
        _, told = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert "Signal 9 (SIGKILL)" in told
    assert "lost another rank" in told or "was stopped after" in told  # whichever the other rank notices first
    assert all(not Path(f"/proc/{pid}").exists() for pid in ranks)
    assert not finished(out)
    assert to_the_end(data, out, runs) == straight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "timeout"),
    [
        pytest.param(signal.SIGKILL, 60.0, id="killed"),  # a closed connection is noticed at once, not after a minute
        pytest.param(signal.SIGSTOP, 5.0, id="hangs"),
    ],
)
def test_without_a_launcher_the_other_rank_ends_by_itself_with_a_message(
    number: signal.Signals, timeout: float, data: Path, tmp_path: Path, runs: list[Run]
) -> None:
    runs.append(Run(data, tmp_path, timeout, kind=forked.Fresh))
    runs[0].wait_for(STEPS_AN_EPOCH)
    os.kill(runs[0].ranks[1].pid, number)
    begun = time.monotonic()
    code, told = runs[0].ended(0)
    assert time.monotonic() - begun < 30
    assert code == 2
    assert "flexact: error: rank 0 of 2 lost another rank" in told
    assert "it resumes from the last checkpoint" in told
    assert "Traceback" not in told
    assert not finished(tmp_path)
