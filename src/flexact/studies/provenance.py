"""Where a measurement comes from: what stands in every committed CSV beside its figures."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import torch


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


def _commit() -> str:
    """Of the checkout that this file lies in; empty where there is none."""
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
