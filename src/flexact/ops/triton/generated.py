"""Custom candidates as Triton functions that are generated from their torch functions.

`custom_forms.works` compares a form with its function before its first use on a device.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import logging
from typing import Any

import triton

from flexact.candidates.registry import lookup
from flexact.ops.codegen.printing import triton_source
from flexact.ops.codegen.recording import record
from flexact.ops.triton import elementary

_log = logging.getLogger(__name__)

_rejected: set[str] = set()


def form(key: str) -> Any:
    """Return a Triton function that computes a candidate, as `register_candidate` takes it; None if there is none."""
    return None if key in _rejected else _form(key)


def reject(key: str, obstacle: str) -> None:
    """Use the closed form for a candidate from now on."""
    _rejected.add(key)
    _log.info("candidate %s runs in the closed form on a GPU, which is slower: %s", key, obstacle)


@functools.cache
def _form(key: str) -> Any:
    try:
        return _jitted(triton_source(record(lookup(key))))
    except Exception as error:  # from the candidate or torch's decompositions
        reject(key, f"{type(error).__name__}: {error}")
        return None


@functools.cache
def _jitted(source: str) -> Any:
    """Return the function `form` of a source under a name of its own, by which Triton tells functions in a kernel
    apart. Triton reads the source through linecache."""
    name = f"form_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    source, file = source.replace("def form(", f"def {name}("), f"<flexact {name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    namespace: dict[str, Any] = {**vars(elementary), "__name__": __name__}
    exec(compile(source, file, "exec"), namespace)
    return triton.jit(namespace[name])
