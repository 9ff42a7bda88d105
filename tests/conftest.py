"""Set-up shared by all tests: torchvision's missing operators, and hypothesis' profile.

The torchvision that `make install` puts beside a CPU build of torch is built for CUDA: its compiled part does not load,
so the operators ``nms`` and ``qnms`` do not exist, and ``import torchvision`` fails because it registers fake kernels
for them. That breaks timm and transformers too. Declaring the two operators (without a kernel: no test calls them)
before the first import is enough. A complete torchvision keeps its own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from hypothesis import settings


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

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci")
