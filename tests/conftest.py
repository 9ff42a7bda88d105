"""Set-up shared by all tests: Triton's interpreter, torchvision's missing operators, and hypothesis' profile.

Where there is no CUDA device, Triton's kernels run on CPU tensors under its interpreter, slowly, and only where a test
asks for them with `dispatch.use("triton")`. Triton decides when it is imported, so the variable comes first.

The torchvision that `make install` puts beside a CPU build of torch is built for CUDA: its compiled part does not load,
so the operators ``nms`` and ``qnms`` do not exist, and ``import torchvision`` fails because it registers fake kernels
for them. That breaks timm and transformers too. Declaring the two operators (without a kernel: no test calls them)
before the first import is enough. A complete torchvision keeps its own.
"""

from __future__ import annotations

import os

import torch

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's deterministic mode asks for
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from hypothesis import settings
from torch import nn

from flexact import FlexAct, candidates
from flexact.ops import dispatch

sys.path.append(str(Path(__file__).resolve().parent))  # for `forked` and `matrix.models`, in processes of tests too


def _declare_missing_torchvision_operators() -> torch.library.Library | None:
    """Declare the operators that torchvision's compiled part would have brought; None where nothing is missing."""
    spec = importlib.util.find_spec("torchvision")  # finds the package without importing it
    if spec is None or spec.origin is None:
        return None
    for compiled in Path(spec.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(compiled))  # what torchvision does itself; loading it twice is harmless
        except (OSError, ImportError):
            continue
    missing = [name for name in ("nms", "qnms") if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


# The operators live as long as this object does.
_TORCHVISION_LIBRARY = _declare_missing_torchvision_operators()

collect_ignore = ["forked_imports.py"]  # turns Triton's interpreter off where it is imported
if importlib.util.find_spec("triton") is None:  # it has no package for macOS
    collect_ignore += ["ops/triton"]

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci")


def pytest_collection_finish() -> None:
    """Take what is there from now on out of garbage collections, each of which would walk through all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    """What a test registers is forgotten after it, and it does not meet what others have registered."""
    own = {candidate.name: candidate for candidate in candidates.BUILT_IN}
    with mock.patch.object(candidates, "_registry", own):
        yield


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton's kernels are tested: on the CPU under the interpreter, and on the card with the marker gpu."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if request.param == "cpu" and not dispatch.interpreting():
        assert torch.cuda.is_available(), "Triton's interpreter is off: something changed TRITON_INTERPRET"
        pytest.skip("Triton's interpreter is off where there is a CUDA device")
    return torch.device(request.param)


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's kernels wherever they can run; a test fails when they were given up in it without its doing."""
    monkeypatch.setattr(dispatch, "_forced", "triton")
    monkeypatch.setattr(dispatch, "_broken", {})
    yield
    assert not dispatch._broken


@pytest.fixture
def tile_sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A function that sets the elements a tile and the programs a launch, so that a small tensor takes many."""
    from flexact.ops.triton import batch_norm, routed, tiles  # need Triton

    def choose(tile: int, programs: int) -> None:
        for name in ("FLAT", "FEW_SUMS", "MANY_SUMS", "MOMENTS"):
            for module in (batch_norm, tiles, routed):
                monkeypatch.setattr(module, name, tiles.Cut(tile, programs), raising=False)

    return choose


@pytest.fixture(scope="session")
def resnets() -> ModuleType:
    """tests/resnets.py, under a name by which its classes can be pickled."""
    spec = importlib.util.spec_from_file_location("flexact_test_resnets", Path(__file__).with_name("resnets.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pick() -> Callable[[nn.Module, str | None], nn.Module]:
    """A function that makes every site of a model pick one candidate; None is what init="original" starts at."""

    def choose(model: nn.Module, name: str | None) -> nn.Module:
        for site in model.modules():
            if isinstance(site, FlexAct):
                with torch.no_grad():
                    table = site.logits.view(site.rows, site.k)
                    chosen = table.argmax(-1) if name is None else torch.full((site.rows,), site.candidates.index(name))
                    table.copy_(5.0 * nn.functional.one_hot(chosen, site.k))
        return model

    return choose
