"""Declares torchvision's missing operators in a subprocess of a test: put this folder on its PYTHONPATH.

Python imports `sitecustomize` when it starts, also in the ranks that torchrun starts. tests/conftest.py says why and
for which builds this is needed; it does the same for the tests themselves.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

_SPEC = find_spec("torchvision")  # finds the package without importing it
if _SPEC is not None and _SPEC.origin is not None:
    for _compiled in Path(_SPEC.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(_compiled))
        except (OSError, ImportError):
            continue
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # the operators exist as long as this
    for _name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, _name):
            _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
