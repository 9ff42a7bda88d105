"""Where a measurement comes from: what stands in every committed CSV beside its figures."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

SOURCE = "source"
"""The version of a source tree on the path, which is not installed."""


def provenance() -> dict[str, str]:
    """Device, torch version, commit (with "+" where the tree differs from it) and date.

    >>> list(provenance())
    ['device', 'torch', 'commit', 'date']
    """
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def versions() -> dict[str, str]:
    """What a run is made with.

    >>> list(versions())
    ['flexact', 'torch', 'python']
    """
    try:
        own = version("flexact")
    except PackageNotFoundError:
        own = SOURCE
    return {"flexact": own, "torch": torch.__version__, "python": platform.python_version()}


def processor() -> str:
    """The name of the CPU, for figures that depend on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str:
    """Of the checkout that this file lies in; FLEXACT_COMMIT where it travelled without its history."""
    if told := os.environ.get("FLEXACT_COMMIT"):
        return told
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
        )
    except OSError:  # no git
        return ""
    return described.stdout.strip()
