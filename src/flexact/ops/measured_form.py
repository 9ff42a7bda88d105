"""Chooses between the closed form and plain torch by measurement, where no kernels run.

Which of the two is faster depends on the machine, the device, the candidates and the size of the tensor. At the first
training call of a site, forward and backward of both are timed on its input, before anything is computed with either.
The choice is kept in the cache folder of `native.library`, one small JSON file for each `Case`, because rounding
differs between the forms: a choice that each process made anew would depend on the machine's load, and runs would not
be reproducible. If it cannot be kept or measured, the closed form runs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from flexact.candidates.registry import lookup
from flexact.ops.blending import Blending
from flexact.ops.native import library
from flexact.ops.operators import Implementation

Form = Literal["closed_form", "plain"]
DEFAULT: Form = "closed_form"
LARGEST_ON_CPU = 1 << 20
"""Maximum number of elements of a CPU tensor on which the forms are timed; a measurement on more takes seconds."""
WARM_UP = 2
ROUNDS = 10
"""Maximum number of timings of each form; the fastest one counts."""
SECONDS = 0.3
"""Duration of a measurement after which no further round starts."""


class Case(NamedTuple):
    """What a choice is made for."""

    device: torch.device
    dtype: torch.dtype
    keys: tuple[str, ...]
    statistics: bool
    size: int
    """The number of elements, rounded up, as a power of two."""


_chosen: dict[Case, Form] = {}
"""The choices of this process."""


def faster(h: Tensor, blending: Blending, forms: Mapping[Form, Implementation]) -> Form:
    """Return which form runs in training on inputs like this one."""
    keys = tuple(blending.keys[k] for k in blending.alive)
    case = Case(h.device, h.dtype, keys, blending.statistics, max(h.numel() - 1, 0).bit_length())
    if case not in _chosen:
        _chosen[case] = _choice(case, h.detach(), blending, forms)
    return _chosen[case]


def kept(device: torch.device) -> dict[Form, int]:
    """Return how many choices for a device on this machine are kept of each form."""
    folder = library.cache_folder()
    paths = folder.glob(f"form-{_machine(device)}-*.json") if folder else ()
    return collections.Counter(form for path in paths if (form := _read(path)))


def _choice(case: Case, h: Tensor, blending: Blending, forms: Mapping[Form, Implementation]) -> Form:
    if (folder := library.cache_folder()) is None:
        return DEFAULT
    path = folder / _name(case)
    if known := _read(path):
        return known
    seconds = _measured(h, blending, forms) if _has_room(h, blending) else {}
    if not seconds:
        return DEFAULT
    form = min(seconds, key=seconds.__getitem__)
    record = {"form": form, "seconds": seconds} | {name: str(value) for name, value in case._asdict().items()}
    return _keep(path, json.dumps(record), form)


def _has_room(h: Tensor, blending: Blending) -> bool:
    """Return whether a measurement on this tensor can run now, with at most half of the memory that is left."""
    if h.numel() == 0 or h.device.type not in ("cpu", "cuda", "mps", "xpu"):
        return False
    if h.device.type == "cpu":
        return h.numel() <= LARGEST_ON_CPU
    if h.device.type != "cuda":
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    free, _ = torch.cuda.mem_get_info(h.device)
    free += torch.cuda.memory_reserved(h.device) - torch.cuda.memory_allocated(h.device)
    tensors = 4 * len(blending.alive) + 6  # values, slopes, a stack of both, and tensors of the size of h
    return 2 * tensors * h.numel() * max(h.element_size(), 4) <= free


def _measured(h: Tensor, blending: Blending, forms: Mapping[Form, Implementation]) -> dict[Form, float]:
    """Return the duration of the fastest forward and backward of each form; nothing if the memory does not suffice.

    They run in a thread of their own, in which none of the caller's modes is active: autocast, hooks for saved tensors,
    as those of activation checkpointing, and dispatch modes.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_fastest, h, blending, forms).result()


@torch.no_grad()
def _fastest(h: Tensor, blending: Blending, forms: Mapping[Form, Implementation]) -> dict[Form, float]:
    start, seconds = time.perf_counter(), dict.fromkeys(forms, math.inf)
    try:
        for form in [*forms.values()] * WARM_UP:
            _timed(form, h, blending)
        for _ in range(ROUNDS):
            for name, form in forms.items():
                seconds[name] = min(seconds[name], _timed(form, h, blending))
            if time.perf_counter() - start > SECONDS:
                break
    except torch.OutOfMemoryError:
        return {}
    return seconds


def _timed(form: Implementation, h: Tensor, blending: Blending) -> float:
    """Return the duration of one forward and backward, with h in place of the upstream gradient."""
    _synchronize(h.device)
    start = time.perf_counter()
    saved: list[Tensor] = []
    form.forward(h, blending, saved)
    form.backward(h, h, blending, True, saved)
    _synchronize(h.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _name(case: Case) -> str:
    """Return the file name of a choice, which does not depend on aliases of the candidates."""
    identity = repr((case.dtype, sorted(lookup(key).name for key in case.keys), *case[3:]))
    return f"form-{_machine(case.device)}-{_digest(identity)}.json"


@functools.cache
def _machine(device: torch.device) -> str:
    """Return a digest of what the speed of a device depends on, and of the version of torch."""
    about: tuple[object, ...] = (device.type, torch.__version__, *library.processor())
    if device.type == "cuda":
        about += (torch.cuda.get_device_name(device), torch.version.cuda, torch.version.hip)
    if device.type == "cpu":
        about += (torch.get_num_threads(),)
    return _digest(repr(about))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> Form | None:
    """Return the form in a file; None if there is none."""
    try:
        form = json.loads(path.read_text(encoding="utf-8"))["form"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return form if form in get_args(Form) else None


def _keep(path: Path, text: str, form: Form) -> Form:
    """Write a file, and return its form: that of another process if it was faster to write one. Return `DEFAULT` if
    the folder cannot be written to."""
    try:
        handle, unfinished = tempfile.mkstemp(dir=path.parent)
    except OSError:
        return DEFAULT
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        with contextlib.suppress(OSError):  # the file exists, or the file system has no links
            os.link(unfinished, path)
        if not _read(path):
            os.replace(unfinished, path)
        return _read(path) or form
    except OSError:
        return DEFAULT
    finally:
        Path(unfinished).unlink(missing_ok=True)
