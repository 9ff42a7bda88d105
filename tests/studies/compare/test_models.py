"""Tests of a digits MLP, a tiny timm model and a tiny transformers model, in a notebook and by the command."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexact.studies.grid.study import picked

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
SITES = {"mlp": 2, "timm": 11, "bert": 3}
ENGINES = {"mlp": "local", "timm": "inline", "bert": "inline"}
METHODS = ("original", "fixed-tanh", "flexact", "flexact-alone")


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if name not in ("seconds", "commit", "date")} for row in rows]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment of a user's processes: flexact's sources, and torchvision's missing operators."""
    sources = Path(sys.modules["flexact"].__file__ or "").parents[1]
    paths = [str(TESTS / "torchvision_operators"), str(sources), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def by_command(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, Path]:
    """The folder of each model's comparison by the command."""
    for package in ("timm", "transformers", "sklearn"):
        pytest.importorskip(package)
    out = tmp_path_factory.mktemp("by_command")
    for name in SITES:
        words = [f"model_trainings:build_{name}", f"model_trainings:train_{name}", "--out", str(out / name)]
        words += ["--candidates", "original,relu,gelu,tanh", "--methods", ",".join(METHODS), "--seeds", "2"]
        words += ["--engine", ENGINES[name]]
        ended = subprocess.run(
            [sys.executable, "-m", "flexact", "compare", *words, "--device", "cpu"],
            cwd=HERE,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stderr
    return {name: out / name for name in SITES}


@pytest.mark.slow
@pytest.mark.parametrize("name", SITES)
def test_the_command_compares_a_real_model(by_command: dict[str, Path], name: str) -> None:
    rows = rows_of(by_command[name])
    assert {(row["method"], row["seed"], row["state"]) for row in rows} == {
        (method, seed, "done") for method in METHODS for seed in "01"
    }
    for row in rows:
        assert len(picked(row["picks"])) == (SITES[name] if row["method"].startswith("flexact") else 0)
    scores = {(row["method"], row["seed"]): row["score"] for row in rows}
    assert scores["original", "0"] != scores["fixed-tanh", "0"]
    assert (by_command[name] / "report.html").is_file()


@pytest.mark.slow
def test_a_notebook_gives_the_results_of_the_command(
    by_command: dict[str, Path], environment: dict[str, str], tmp_path: Path
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    source = (HERE / "model_trainings.py").read_text(encoding="utf-8")
    call = (
        f"flexact.compare(build_mlp, train_mlp, ('original', 'relu', 'gelu', 'tanh'), {METHODS}, seeds=2, out='mlp', "
        "device='cpu')"
    )
    cells = [source, call]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute(env=environment)
    assert rows_of(tmp_path / "mlp") == rows_of(by_command["mlp"])
    outputs = notebook.cells[1].outputs
    shown = next(one["data"]["text/markdown"] for one in outputs if one["output_type"] == "execute_result")
    assert shown == (tmp_path / "mlp" / "table.md").read_text(encoding="utf-8")
    message = "".join(one["text"] for one in outputs if one.get("name") == "stderr")
    assert "8/8 flexact-alone-1: " in message
    assert "s left)" in message
