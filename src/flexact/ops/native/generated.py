"""Candidates without a formula in kernels.c, as C code that is generated from their torch functions.

The code of a candidate is compiled, and compared with its function, when the candidate is first used.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import c_int, c_void_p

import torch

from flexact.candidates.registry import lookup
from flexact.ops.codegen.checking import difference, inputs
from flexact.ops.codegen.printing import c_source
from flexact.ops.codegen.recording import record
from flexact.ops.native import library

_log = logging.getLogger(__name__)


@functools.cache
def address(key: str) -> int:
    """Return the address of a candidate's code, a function of the type Generated in kernels.c; 0 if there is none."""
    candidate = lookup(key)
    try:
        function = library.generated(c_source(record(candidate))).value_and_slope
        function.argtypes, function.restype = (c_int, c_void_p, c_void_p, c_void_p), None
        h = inputs()
        value, slope = torch.empty_like(h), torch.empty_like(h)
        function(h.numel(), *[tensor.data_ptr() for tensor in (h, value, slope)])
        found = difference(candidate, h, value, slope)
        obstacle = f"its generated code {found}" if found else ""
    except Exception as error:  # from the candidate, the compiler or torch's decompositions
        obstacle = f"{type(error).__name__}: {error}"
    if obstacle:
        _log.info("candidate %s runs in torch operations on a CPU, which is slower: %s", key, obstacle)
        return 0
    _log.info("candidate %s runs in C code that was generated from its function", key)
    return ctypes.cast(function, c_void_p).value or 0
