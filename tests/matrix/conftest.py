"""The matrix: each row of the table in docs/matrix.md is a file of tests here, and each of its columns a model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = str(Path(__file__).resolve().parent.parent)
if TESTS not in sys.path:
    sys.path.append(TESTS)  # so that the processes which tests start, and pickles, find `matrix.models`

from matrix.models import COLUMNS, Column  # noqa: E402


@pytest.fixture(params=COLUMNS)
def column(request: pytest.FixtureRequest) -> Column:
    """Each model of the matrix."""
    if request.param == "bert":
        pytest.importorskip("transformers")
    return COLUMNS[request.param]


class Ranks:
    """Starts the processes of a distributed row once, and hands out what each rank left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: set[int] = set()

    def results(self, row: str, column: Column, ranks: int) -> list[dict[str, Any]]:
        """One a rank; the error of a rank fails the test that asks for it."""
        folder = self.folder / str(ranks)
        if ranks not in self._started:
            self._start(ranks, folder)
            self._started.add(ranks)
        found = [
            torch.load(folder / f"{row}-{column.name}-{rank}.pt", weights_only=False)
            if (folder / f"{row}-{column.name}-{rank}.pt").exists()
            else (folder / f"{rank}.log").read_text()
            for rank in range(ranks)
        ]
        for one in found:
            assert isinstance(one, dict), one
        return found

    def _start(self, ranks: int, folder: Path) -> None:
        folder.mkdir()
        path = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
        rows = ["ddp", "fsdp"] if ranks == 2 else ["ddp"]
        processes = []
        for rank in range(ranks):
            with (folder / f"{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "matrix.ranks", str(folder), *rows],
                        env={
                            **os.environ,
                            "PYTHONPATH": path,
                            "OMP_NUM_THREADS": "1",
                            "RANK": str(rank),
                            "WORLD_SIZE": str(ranks),
                        },
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        for process in processes:
            try:
                process.wait(timeout=200)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("ranks"))
