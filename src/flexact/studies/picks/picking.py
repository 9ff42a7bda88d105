"""How the methods pick, and what picking costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flexact import Schedule, convert
from flexact.io.atomic_files import write_whole
from flexact.routing.sites import sites_of
from flexact.studies.picks.protocol import policy
from flexact.studies.picks.setting import Setting
from flexact.studies.picks.training import Training, number

FILE = "picks.json"
"""File in the folder of a flexact cell, written when it has picked."""


@dataclass(frozen=True)
class Picked:
    """The picks of a method, and the training steps and seconds of picking."""

    picks: Mapping[str, str]
    steps: int
    seconds: float

    def write(self, folder: Path) -> None:
        """Write the picks for cells that reuse them."""
        write_whole(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Picked | None:
        """Read what `write` wrote; None if there is no valid file."""
        try:
            return cls(**json.loads((folder / FILE).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None


def flexact_run(setting: Setting, **changes: Any) -> tuple[Training, Picked]:
    """Run Flex-Act up to its commitment. changes: overrides of its policy."""
    network = convert(setting.network(), config=policy(setting.task, setting.seed, **changes))
    training = setting.training(network, setting.task.steps)
    schedule = Schedule(network, optimizer=training.optimizer, network_steps=setting.task.steps)
    training.schedule = schedule
    training.run(schedule.commit_step, setting.stop)
    picks = {site.name: site.picks[0] for site in sites_of(network)}
    further = schedule.total_steps - setting.task.steps  # some steps of a trial are the first steps of the pick
    return training, Picked(picks, further, training.seconds * further / schedule.commit_step)


def further_steps(setting: Setting) -> int:
    """Return the number of steps that Flex-Act takes in addition to a plain run."""
    network = convert(setting.network(), config=policy(setting.task, setting.seed))
    return Schedule(network, network_steps=setting.task.steps).total_steps - setting.task.steps


def picked_by_flexact(setting: Setting, folder: Path) -> Picked:
    """Return the picks of the flexact cell in this folder. If it has none yet, pick here, with the same result."""
    return Picked.read(folder) or flexact_run(setting)[1]


def picked_at_random(setting: Setting) -> Picked:
    """Return a random candidate for each site."""
    generator = torch.Generator().manual_seed(number(f"random picks, {setting.task.name}", setting.seed))
    candidates, sites = setting.task.candidates, setting.sites
    chosen = torch.randint(len(candidates), (len(sites),), generator=generator).tolist()
    return Picked({site: candidates[i] for site, i in zip(sites, chosen, strict=True)}, 0, 0.0)
