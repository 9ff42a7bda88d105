"""Tests that `import flexact` is lean: no optional package, no CUDA, little time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

OPTIONAL = (
    "pandas",
    "matplotlib",
    "transformers",
    "timm",
    "torchvision",
    "tensorboard",
    "rich",
    "typer",
    "scipy",
    "sklearn",
    "safetensors",
    "accelerate",
    "lightning",
    "ray",
    "triton",
    "hypothesis",
    "datasets",
)

PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import flexact
seconds = time.process_time() - start
model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
flexact.Schedule(model, 2).step()
model(torch.randn(3, 2))
str(flexact.selection(model))
flexact.extract(model, commit=True)
print(json.dumps({
    "added": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
    "cuda": torch.cuda.is_initialized(),
    "seconds": seconds,
}))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, object]:
    """Returns the modules and state of a fresh process that imports flexact and uses it."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_no_optional_package_is_imported(probe: dict[str, object]) -> None:
    assert set(OPTIONAL) & set(probe["added"]) == set()


def test_cuda_is_not_initialised(probe: dict[str, object]) -> None:
    assert probe["cuda"] is False


def test_it_adds_little_to_the_time_of_importing_torch(probe: dict[str, object]) -> None:
    assert probe["seconds"] < 0.5
