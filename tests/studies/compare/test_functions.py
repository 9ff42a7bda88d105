"""Tests of sending the user's functions to other processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import flexact
from flexact import FlexActError
from flexact.studies.compare.functions import Functions

LOADED = """
import pickle, sys
functions = pickle.load(open(sys.argv[1], "rb"))
print(functions.train(functions.build(), 3, None), functions.where)
"""


def in_another_process(functions: Functions, folder: Path, cwd: Path) -> str:
    """Returns what the functions print in a process that has only their pickle."""
    path = folder / "functions.pickle"
    path.write_bytes(pickle.dumps(functions))
    ended = subprocess.run(
        [sys.executable, "-c", LOADED, str(path)], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_local_functions_are_pickled_with_their_variables(tmp_path: Path) -> None:
    weight = torch.tensor([2.0, 5.0])
    functions = Functions(
        lambda: nn.Identity(), lambda model, seed, make_schedule: float(weight.sum()) + seed, where=["a", "b"]
    )
    assert in_another_process(functions, tmp_path, tmp_path) == "10.0 ['a', 'b']"


def test_functions_of_a_module_are_pickled_with_registered_candidates(small: ModuleType, tmp_path: Path) -> None:
    flexact.register_candidate("wave", torch.sin)
    functions = Functions(small.build, small.train)
    torch.manual_seed(0)
    score, where = in_another_process(functions, tmp_path, Path(small.__file__ or "").parent).split()
    assert (float(score) < 0, where) == (True, "all")


def test_without_cloudpickle_the_error_names_the_extra(small: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(FlexActError, match=r"cloudpickle.*flexact\[studies\]"):
        _ = Functions(small.build, small.train).packed
