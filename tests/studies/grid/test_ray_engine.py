"""Tests of cells on a Ray cluster that the test starts."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexact import FlexActError
from flexact.studies.cifar.protocol import Cell
from flexact.studies.cifar.study import Store
from flexact.studies.grid.engines import _connect, engine

HERE = Path(__file__).parent
pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """A head node with two CPUs: its address, and the environment of a program that uses it."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    # A separate token for this test; otherwise Ray writes one to the home folder.
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [before.get("PYTHONPATH")])])
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False},
    )
    try:
        yield cluster.address, dict(os.environ)
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.slow
def test_a_killed_workers_cell_is_retried_and_resumes_from_its_checkpoint(
    cluster: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, environment = cluster
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    cells = [Cell("cifar10", "resnet18", method, seed) for seed in (0, 1) for method in ("relu", "prelu")]
    behaviour = {"die": [cells[0].name], "fail": [cells[3].name]}
    (data / "behaviour.json").write_text(json.dumps(behaviour))
    command = [sys.executable, str(HERE / "fake_training.py"), str(out), str(data), "relu,prelu", "ray", address]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    store = Store(out)
    results = store.results()
    assert [results[cell].state for cell in cells] == ["done", "done", "done", "failed"]
    assert (store.cell_folder(cells[0]) / "died").exists()
    assert (store.cell_folder(cells[0]) / "starts").read_text() == "0\n2\n"
    assert results[cells[3]].error == "the loss is nan, not finite"
    assert len((out / "results.csv").read_text().splitlines()) == 5


@pytest.mark.slow
def test_sigterm_stops_the_cells_on_the_cluster_with_a_checkpoint(
    cluster: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, environment = cluster
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    (data / "behaviour.json").write_text(json.dumps({"waits": True}))
    command = [sys.executable, str(HERE / "fake_training.py"), str(out), str(data), "relu", "ray", address]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    first = Store(out).cell_folder(Cell("cifar10", "resnet18", "relu", 0))
    until = time.monotonic() + 60
    while not (first / "curve.csv").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    words = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; 0 of 2 cells kept" in words
    assert len(json.loads((first / "checkpoint.pt").read_text())) == 1
    assert not (first / "stop").exists()
    assert Store(out).results() == {}


def test_a_missing_cluster_is_reported_with_its_address() -> None:
    with pytest.raises(FlexActError, match=r"127.0.0.1:1 .*ray start --head"):
        engine("ray", "cpu", None, "127.0.0.1:1")([], print, lambda: False)


def test_any_error_of_ray_becomes_an_error_of_ours() -> None:
    class Ray:
        def init(self, **_: Any) -> None:
            raise Exception("The current node timed out during startup.")  # as Ray does

    with pytest.raises(FlexActError, match=r"cannot join or start a Ray cluster here \(The current node timed out"):
        _connect(Ray(), None)


def test_rays_options_are_checked_before_connecting_to_a_cluster() -> None:
    with pytest.raises(FlexActError, match="Ray"):
        engine("ray", "cuda:1", None, None)
