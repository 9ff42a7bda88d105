"""The provenance of a measurement: for the rows of a CSV file, or for the config.json next to it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flexact.io.result_folder import VERSION


def provenance() -> dict[str, str]:
    """Return device, torch version, commit (with "+" if there are uncommitted changes) and date.

    >>> list(provenance())
    ['device', 'torch', 'commit', 'date']
    """
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def run_config(study: str, title: str, **settings: Any) -> dict[str, Any]:
    """Return the content of a study's config.json in plain JSON types: its settings, versions and provenance."""
    try:
        own = version("flexact")
    except PackageNotFoundError:
        own = "source"  # imported from a source tree without installation
    versions = {"flexact": own, "torch": torch.__version__, "python": platform.python_version()}
    made = {name: one for name, one in provenance().items() if name in ("commit", "date")}
    config = {"flexact_study": VERSION, "study": study, "title": title, **settings, "versions": versions, **made}
    plain: dict[str, Any] = json.loads(json.dumps(config))
    return plain


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str:
    """Return FLEXACT_COMMIT if it is set, else the commit of the checkout that contains this file, else ""."""
    if given := os.environ.get("FLEXACT_COMMIT"):
        return given
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
