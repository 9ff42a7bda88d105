"""Declares torchvision's missing operators in a program that a test starts: put this folder on its PYTHONPATH.

Python runs a `sitecustomize` at its start, in the ranks that torchrun starts too. Why it is needed, and for which
builds, is in tests/conftest.py, which does the same for the tests themselves.
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
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # the operators live as long as this
    for _name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, _name):
            _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
