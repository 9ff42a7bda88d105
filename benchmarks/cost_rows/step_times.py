"""Train a small ResNet from empty caches, and print the time of every step and evaluation as JSON.

    python benchmarks/cost_rows/step_times.py [--device cpu] [--fuse]

`cost_rows.first_run` runs this in a process of its own, because a process keeps what it has compiled. The unconverted
network trains first, so that the libraries of the device are loaded.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor, nn

import flexact
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import BLOCKS, ResNet
from flexact.studies.cuda_graph import autocast

SIZES = {"cuda": (64, 128), "cpu": (4, 4)}
"""The width of the network and the size of a batch."""
ROUND_STEPS = 120
"""Steps between two drops; the default is 350."""
AFTER = 60
"""Steps that are timed after the commitment."""
EVALUATED_EVERY = 40
WARM_UP = 20
"""Steps of the unconverted network."""


class Steps:
    """The steps of a network on one batch, each with the seconds until the device has finished."""

    def __init__(self, network: nn.Module, images: Tensor) -> None:
        self.network, self.images, self.device = network.train(), images, images.device
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def loss(self) -> Tensor:
        with autocast(self.device, half=True):
            return self.network(self.images).float().square().mean()

    def train(self, schedule: flexact.Schedule | None = None) -> float:
        start = time.perf_counter()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if schedule is not None:
            schedule.step(loss)
        return self._since(start)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.network.eval()
        start = time.perf_counter()
        self.loss()
        seconds = self._since(start)
        self.network.train()
        return seconds

    def _since(self, start: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def measured(device: torch.device, fuse: bool) -> dict[str, Any]:
    """Return the seconds of each step and evaluation, and the number of candidates at each step."""
    width, batch = SIZES[device.type]
    torch.manual_seed(0)
    network = ResNet(BLOCKS["resnet18"], width=width).to(device, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 32, 32).to(device, memory_format=torch.channels_last)
    plain = Steps(network, images)
    for _ in range(WARM_UP):
        plain.train()
    plain.evaluate()
    converted = flexact.convert(network, config=flexact.FlexConfig(round_steps=ROUND_STEPS), fuse=fuse)
    picking = Steps(converted, images)
    schedule = flexact.Schedule(converted, network_steps=2_000, optimizer=picking.optimizer)
    (site, *_) = sites_of(converted)
    steps, candidates, evaluations = [], [], []
    while schedule.steps_done < schedule.commit_step + AFTER:
        candidates.append(len(site.alive))
        steps.append(picking.train(schedule))
        if schedule.steps_done % EVALUATED_EVERY == 0:
            evaluations.append(picking.evaluate())
    return {"steps": steps, "candidates": candidates, "evaluations": evaluations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--fuse", action="store_true", help="as convert(..., fuse=True)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measured(arguments.device, arguments.fuse)))


if __name__ == "__main__":
    main()
