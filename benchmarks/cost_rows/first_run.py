"""What the first run on a machine waits for: the builds of kernels, with nothing in any cache."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import flexact
from cost_rows.networks import CUSTOM
from cost_rows.row import Row
from flexact.studies.overhead.timing import spread

DEFAULT, FUSED = "first run", "first run, fuse=True"
FIRST = {"cpu": "first steps, with the C library, s", "cuda": "first steps, with Triton's kernels, s"}
DROPS, COMMITMENT, EVALUATIONS = "drops, s", "commitment, s", "evaluations, s"
OTHERS, OTHER = "all other steps, s", "longest other step, s"
STALL = ("custom candidate, 2^20 + 1 elements", "longest first step of a round, s")
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
WINDOW = 3
"""Steps from a drop on, and at the start, that may wait for builds."""
RUNS = {"cpu": 3, "cuda": 1}
"""Processes. A GPU is measured once, because most of the time is spent on builds."""
TIMEOUT = 240
"""Maximum duration of a process in seconds."""


def rows(device: torch.device) -> Iterator[Row]:
    """Train a small ResNet in processes with empty caches, and report the seconds that training waits."""
    options: dict[str, list[str]] = {DEFAULT: []} if device.type == "cpu" else {DEFAULT: [], FUSED: ["--fuse"]}
    for case, own in options.items():
        found = [waits(**_step_times("--device", str(device), *own)) for _ in range(RUNS[device.type])]
        for quantity in found[0]:
            name = FIRST[device.type] if quantity == "first" else quantity
            yield Row(case, name, *spread([one[quantity] for one in found]))


def _step_times(*arguments: str) -> dict[str, Any]:
    """Run `step_times.py` in a process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("step_times.py")), *arguments],
            env=os.environ | {name: str(Path(folder, name)) for name in CACHES},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"step_times.py failed: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def waits(steps: Sequence[float], candidates: Sequence[int], evaluations: Sequence[float]) -> dict[str, float]:
    """Return the seconds beyond the usual step of the same round, of the steps at which kernels may be built, and of
    all others, which builds in the background may slow down.

    The usual step is the median of the second half of the round, by which these builds should have ended.
    steps, evaluations: seconds. candidates: how many were left at each step.
    """
    changes = [i for i in range(1, len(steps)) if candidates[i] != candidates[i - 1]]
    beyond: list[float] = []
    for start, end in itertools.pairwise([0, *changes, len(steps)]):
        own = steps[start:end]
        usual = statistics.median(own[len(own) // 2 :])
        beyond += [seconds - usual for seconds in own]
    # The step before a change drops the candidates; those after it are the first without them.
    windows = [range(WINDOW), *(range(change - 1, change + WINDOW) for change in changes)]
    first, *drops, commitment = (sum(beyond[i] for i in window) for window in windows)
    others = [beyond[i] for i in set(range(len(steps))) - set(itertools.chain.from_iterable(windows))]
    usual = statistics.median(evaluations)
    found = {"first": first, DROPS: sum(drops), COMMITMENT: commitment}
    return found | {
        EVALUATIONS: sum(own - usual for own in evaluations), OTHERS: sum(others), OTHER: max(others),
    }  # fmt: skip


def custom_candidate(device: torch.device) -> Iterator[Row]:
    """Time the first step of each round of a site with a custom candidate on more than 2^20 elements."""
    site = flexact.FlexAct(candidates=CUSTOM.candidates[1:]).to(device)
    h = torch.randn(2**20 + 1, device=device, requires_grad=True)
    longest = 0.0
    while not site.committed:
        start = time.perf_counter()
        site(h).sum().backward()
        float(site.logits.grad.sum())  # type: ignore[union-attr]  # waits for a GPU
        longest = max(longest, time.perf_counter() - start)
        site.keep(len(site.alive) - 1, step=0)
    yield Row(*STALL, longest)
