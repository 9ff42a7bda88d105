"""Set-up shared by all tests: Triton's interpreter, torchvision's missing operators, and the hypothesis profile.

Without a CUDA device, Triton kernels run on CPU tensors under Triton's interpreter. This is slow, so only tests that
select it do, with the fixture `triton_kernels` or `kernels.using("triton")`. Triton reads the environment variable when
it is imported, so the variable is set first.

`make install` may install a CUDA build of torchvision next to a CPU build of torch. Its compiled part does not load, so
the operators ``nms`` and ``qnms`` do not exist, and ``import torchvision`` fails when it registers fake kernels for
them. timm and transformers fail for the same reason. Declaring both operators before the first import is enough; no
test calls them, so they need no kernel. A complete torchvision keeps its own operators.
"""

from __future__ import annotations

import os

import torch

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch's deterministic mode
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

from flexact import FlexAct
from flexact.candidates import registry
from flexact.ops import dispatch

sys.path.append(str(Path(__file__).resolve().parent))  # for `forked` and `matrix.models`, in subprocesses too

from kernels import using  # needs the path


def _declare_missing_torchvision_operators() -> torch.library.Library | None:
    """Declares the operators that torchvision's compiled part registers. Returns None if none is missing."""
    spec = importlib.util.find_spec("torchvision")  # finds the package without importing it
    if spec is None or spec.origin is None:
        return None
    for compiled in Path(spec.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(compiled))  # torchvision does the same; loading it twice is harmless
        except (OSError, ImportError):
            continue
    missing = [name for name in ("nms", "qnms") if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


# The operators exist as long as this object does.
_TORCHVISION_LIBRARY = _declare_missing_torchvision_operators()

collect_ignore = ["forked_imports.py"]  # Triton's interpreter is off where this is imported
if importlib.util.find_spec("triton") is None:  # Triton has no package for macOS
    collect_ignore += ["ops/triton"]

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci")


def pytest_collection_finish() -> None:
    """Excludes existing objects from garbage collection, which would otherwise walk through all of them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    """Isolates the candidates that a test registers from other tests."""
    own = {candidate.name: candidate for candidate in registry.BUILT_IN}
    with mock.patch.object(registry, "_registry", own):
        yield
    if len(own) > len(registry.BUILT_IN):
        _forget_candidates()


def _forget_candidates() -> None:
    """Clears what is cached by the name of a candidate, which is registered only once in a process of a user."""
    cached = {"flexact.ops": ["_forms"], "flexact.ops.triton.basis": ["has_form", "blend"]}
    cached |= {"flexact.ops.triton.custom_forms": ["works"], "flexact.ops.triton.generated": ["_form"]}
    cached |= {"flexact.ops.native.routed": ["_functions", "_plan"], "flexact.ops.native.generated": ["address"]}
    for module, names in cached.items():
        for name in names if module in sys.modules else ():
            getattr(sys.modules[module], name).cache_clear()
    if "flexact.ops.triton.generated" in sys.modules:
        sys.modules["flexact.ops.triton.generated"]._rejected.clear()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device on which Triton kernels are tested: the CPU under the interpreter, or a GPU with the marker gpu."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        assert torch.cuda.is_available(), "Triton's interpreter is off: something changed TRITON_INTERPRET"
        pytest.skip("Triton's interpreter is off where there is a CUDA device")
    return torch.device(request.param)


@pytest.fixture
def triton_kernels() -> Iterator[None]:
    """Uses Triton kernels wherever they can run. Fails a test in which Triton is disabled unexpectedly."""
    with using("triton"):
        yield
        assert not dispatch._broken


@pytest.fixture
def launches_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the extension, for tests that watch or replace the functions in Python for which it stands in."""
    from flexact.ops.triton import extension  # needs Triton

    monkeypatch.setattr(extension, "ready", lambda: None)


@pytest.fixture
def tile_sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Returns a function that sets the elements per tile and the programs per launch, so that a small tensor takes
    many.
    """
    from flexact.ops.triton import moments, routed, tiles  # these need Triton

    def choose(tile: int, programs: int) -> None:
        for name in ("FLAT", "FEW_SUMS", "MANY_SUMS", "MOMENTS"):
            for module in (moments, tiles, routed):
                monkeypatch.setattr(module, name, tiles.Cut(tile, programs), raising=False)

    return choose


@pytest.fixture(scope="session")
def resnets() -> ModuleType:
    """Imports tests/resnets.py under a name by which its classes can be pickled."""
    spec = importlib.util.spec_from_file_location("flexact_test_resnets", Path(__file__).with_name("resnets.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pick() -> Callable[[nn.Module, str | None], nn.Module]:
    """Returns a function that makes every site of a model pick one candidate; None is the pick of init="original"."""

    def choose(model: nn.Module, name: str | None) -> nn.Module:
        for site in model.modules():
            if isinstance(site, FlexAct):
                with torch.no_grad():
                    table = site.logits.view(site.rows, site.k)
                    chosen = table.argmax(-1) if name is None else torch.full((site.rows,), site.candidates.index(name))
                    table.copy_(5.0 * nn.functional.one_hot(chosen, site.k))
        return model

    return choose
