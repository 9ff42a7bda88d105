"""Plain runs, each trained once for all cells of a grid.

A plain run trains a network with fixed picks. Its result depends on the network, the seed, the picks, the steps and the
device, so it is cached in the grid's folder under a digest of these. Two cells that need it at the same time both train
it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass

import torch

from flexact.io.atomic_files import write_whole
from flexact.studies.picks.setting import Picks, Setting

FOLDER = "plain"
"""The folder of the cache in the grid's folder."""


@dataclass(frozen=True)
class Plain:
    """The cached result of a plain run."""

    score: float
    steps: int
    seconds: float


def trained_alone(setting: Setting, picks: Picks) -> Plain:
    """Return the result of a network with these picks, from the cache if it is there."""
    path = setting.kept / f"{_digest(setting, picks)}.json"
    try:
        return Plain(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # missing, or from another version
        steps = setting.task.steps
    training = setting.plain(picks, steps)
    training.run(steps, setting.stop)
    result = Plain(training.evaluate(setting.problem.score), steps, training.seconds)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{setting.name}")  # another cell may write the same result
    write_whole(own, json.dumps(asdict(result)) + "\n")
    os.replace(own, path)
    return result


def _digest(setting: Setting, picks: Picks) -> str:
    task, on_gpu = setting.task, setting.device.type == "cuda"
    device = torch.cuda.get_device_name(setting.device) if on_gpu else setting.device.type
    what = [task.network or task.name, setting.seed, task.steps, sorted(picks.items()), device]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
