"""Sending the user's functions to other processes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
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
    """What the functions print in a process that has only their pickle."""
    path = folder / "functions.pickle"
    path.write_bytes(pickle.dumps(functions))
    ended = subprocess.run(
        [sys.executable, "-c", LOADED, str(path)], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_local_functions_take_their_variables_with_them(tmp_path: Path) -> None:
    weight = torch.tensor([2.0, 5.0])
    functions = Functions(
        lambda: nn.Identity(), lambda model, seed, make_schedule: float(weight.sum()) + seed, where=["a", "b"]
    )
    assert in_another_process(functions, tmp_path, tmp_path) == "10.0 ['a', 'b']"


def test_functions_of_a_module_take_registered_candidates_with_them(small: ModuleType, tmp_path: Path) -> None:
    flexact.register_candidate("wave", torch.sin)
    functions = Functions(small.build, small.train)
    torch.manual_seed(0)
    score, where = in_another_process(functions, tmp_path, Path(small.__file__ or "").parent).split()
    assert (float(score) < 0, where) == (True, "all")


def test_without_cloudpickle_the_error_names_the_extra(small: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(FlexActError, match=r"cloudpickle.*flexact\[studies\]"):
        Functions(small.build, small.train).packed()


SCRIPT = """
import functools
from torch import nn

LR = 0.1
OPTIONS = {"betas": (0.9, 0.99)}
UNUSED = 1

def scaled(x):
    return 2 * x

@functools.cache
def helper(x):
    return [scaled(one) for one in x]

def act(x):
    return x.relu()

class Base(nn.Module):
    width = 4

class Net(Base):
    def forward(self, x):
        return act(x)

def build():
    return Net()

def train(model, seed, make_schedule, epochs=3):
    return max(map(lambda x: x + LR, helper((seed,)))) + OPTIONS["betas"][0]
"""


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("LR = 0.1", "LR = 0.2", {"LR"}),
        ("(0.9, 0.99)", "(0.9, 0.999)", {"OPTIONS"}),
        ("2 * x", "3 * x", {"scaled"}),
        ("[scaled(one)", "[-scaled(one)", {"helper"}),
        ("x.relu()", "x.tanh()", {"act"}),
        ("width = 4", "width = 5", {"Base"}),
        ("return act(x)", "return -act(x)", {"Net"}),
        ("return Net()", "return Net().eval()", {"build"}),
        ("return max", "return -max", {"train"}),
        ("UNUSED = 1", "UNUSED = 2", set()),
    ],
)
def test_what_build_and_train_use_is_part_of_their_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, changed: set[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert SCRIPT.count(old) == 1
    digests = []
    for folder, text in (("one", SCRIPT), ("two", SCRIPT.replace(old, new))):
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "edited.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        module = importlib.import_module("edited")
        digests.append(Functions(module.build, module.train).sources(module.build()))
    assert digests[0].keys() == {"build", "train", "LR", "OPTIONS", "helper", "scaled", "Net", "Base", "act"}
    assert {name for name in digests[0] if digests[0][name] != digests[1][name]} == changed


def test_the_arguments_of_a_partial_function_have_a_digest(small: ModuleType) -> None:
    one, two = (
        Functions(small.build, functools.partial(lambda epochs, model, seed, schedule: epochs, epochs))
        for epochs in (1, 2)
    )
    first, second = one.sources(small.build()), two.sources(small.build())
    assert {name for name in first if first[name] != second[name]} == {"the arguments of train"}
