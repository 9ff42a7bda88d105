"""Fixtures of the compatibility matrix: each row of docs/matrix.md is a test file here, and each column a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from matrix.models import COLUMNS, Column


@pytest.fixture(params=COLUMNS)
def column(request: pytest.FixtureRequest) -> Column:
    """Each model of the matrix."""
    if request.param == "bert":
        pytest.importorskip("transformers")
    return COLUMNS[request.param]


class Ranks:
    """Starts the processes of a distributed row once, and returns what each rank has saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: set[int] = set()

    def results(self, row: str, column: Column, ranks: int) -> list[dict[str, Any]]:
        """Returns one result per rank. The error of a rank fails the test that asks for its result."""
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
        rows = ["ddp", "fsdp"] if ranks == 2 else ["ddp"]
        programs = forked.ranks(ranks, "matrix.ranks", folder, *rows)
        for rank, program in enumerate(programs):
            try:
                (folder / f"{rank}.log").write_text("".join(program.output(200)))
            except TimeoutError as error:
                (folder / f"{rank}.log").write_text(str(error))


@pytest.fixture(scope="session")
def alone() -> Callable[[Column, str], dict[str, Any]]:
    """The state of a single process at the end of a run under a policy, trained once for all tests."""
    from matrix.ranks import POLICIES, trained

    return functools.cache(lambda column, policy: trained(column, POLICIES[policy]))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("ranks"))
