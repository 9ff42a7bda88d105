"""What Flex-Act costs per step and per run, against the same network without it.

    python benchmarks/cost.py [--device cpu] [--out results/cost/cpu.csv] [--repeats 15] [--only mlp,gpt]

Each network is trained on one random batch in three forms that run in turns: unconverted, while it picks (a blend, or
the original's part of a trial), and committed to its original activation. The figures are medians of ratios within a
round. `whole_run` is the time of picking and of 8,000 steps with the picks, relative to 8,000 steps of the unconverted
network. A row that misses its goal says so.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexact
from flexact.io.atomic_files import write_rows
from flexact.routing.sites import sites_of
from flexact.studies.overhead.timing import interleaved, ratios, spread
from flexact.studies.provenance import processor, provenance

NETWORK_STEPS = 8_000


class Block(nn.Module):
    """A transformer block with causal attention, or a Mixer block without attention."""

    def __init__(self, width: int, length: int, *, attends: bool) -> None:
        super().__init__()
        self.attends, self.heads = attends, 4
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.tokens = nn.Sequential(nn.Linear(length, length), nn.GELU(), nn.Linear(length, length))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normalised = self.first(x)
        if self.attends:
            parts = self.qkv(normalised).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        else:
            mixed = self.tokens(normalised.transpose(1, 2)).transpose(1, 2)
        x = x + mixed
        return x + self.channels(self.second(x))


class UNet(nn.Module):
    """Two levels of convolutions with batch norm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down, self.middle = _convolutions(3, width), _convolutions(width, 2 * width)
        self.up = _convolutions(3 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = self.down(x)
        low = F.interpolate(self.middle(F.max_pool2d(left, 2)), scale_factor=2)
        return self.out(self.up(torch.cat([left, low], dim=1)))


def _convolutions(before: int, after: int) -> nn.Sequential:
    widths = itertools.pairwise((before, after, after))
    layers = [(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()) for a, b in widths]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def _mlp(widths: tuple[int, ...], act: type[nn.Module]) -> nn.Sequential:
    layers = [(nn.Linear(a, b), act()) for a, b in itertools.pairwise(widths[:-1])]
    return nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(*widths[-2:]))


def _square(out: Tensor, x: Tensor) -> Tensor:
    return out.float().square().mean()


def _second_derivative(out: Tensor, x: Tensor) -> Tensor:
    """The residual of u″ = −u."""
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (curvature + out).square().mean()


def _scaled_sigmoid(h: Tensor) -> Tensor:
    return h * torch.sigmoid(1.5 * h)


flexact.register_candidate("scaled_sigmoid", _scaled_sigmoid)


class Case(NamedTuple):
    """A network, its inputs, and the goals for its ratios."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    goal_picking: float
    goal_run: float
    loss: Callable[[Tensor, Tensor], Tensor] = _square
    config: flexact.FlexConfig = flexact.FlexConfig()


CUSTOM = flexact.FlexConfig(candidates=("original", "relu", "silu", "scaled_sigmoid"))
BLEND = flexact.FlexConfig(candidates=("tanh", "sine", "silu", "gelu"), pick_by="blend")


def _transformer(*, attends: bool) -> nn.Sequential:
    return nn.Sequential(*(Block(64, 64, attends=attends) for _ in range(4)))


CASES = {
    "mlp": Case(lambda: _mlp((64, 64, 64, 10), nn.ReLU), (64, 64), math.inf, 1.4),
    "mixer": Case(lambda: _transformer(attends=False), (32, 64, 64), 1.3, 1.3),
    "gpt": Case(lambda: _transformer(attends=True), (32, 64, 64), 1.3, 1.3),
    "gpt-custom": Case(lambda: _transformer(attends=True), (32, 64, 64), 1.25, 1.3, config=CUSTOM),
    "unet": Case(UNet, (8, 3, 64, 64), 1.3, 1.3),
    "physics-trial": Case(lambda: _mlp((1, 64, 64, 64, 1), nn.Tanh), (512, 1), 1.5, 1.5, _second_derivative),
    "physics-blend": Case(lambda: _mlp((1, 64, 64, 64, 1), nn.Tanh), (512, 1), 1.5, 1.5, _second_derivative, BLEND),
}


class Form:
    """A network in one form, with its optimizer and its batch."""

    def __init__(self, case: Case, form: str, device: torch.device) -> None:
        torch.manual_seed(0)
        network = case.build()
        if form != "plain":
            network = flexact.convert(network, config=case.config)
        self.network, self.loss = network.to(device), case.loss
        self.x = torch.randn(case.shape, device=device).requires_grad_(case.loss is _second_derivative)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4)
        self.schedule: flexact.Schedule | None = None
        self.picking_steps = 0
        if form != "plain":
            self.schedule = flexact.Schedule(self.network, network_steps=10**8, optimizer=self.optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                own = flexact.convert(case.build(), config=case.config)
                self.picking_steps = flexact.Schedule(own, network_steps=NETWORK_STEPS).total_steps - NETWORK_STEPS
        if form == "committed":
            for site in sites_of(self.network):
                site.commit(candidate=site.original_index)

    def step(self) -> None:
        loss = self.loss(self.network(self.x), self.x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step(loss)


class Row(NamedTuple):
    """One network: ratios to the unconverted one, with their 10th and 90th percentiles."""

    case: str
    plain_ms: float
    picking: float
    picking_p10: float
    picking_p90: float
    committed: float
    whole_run: float
    goal_picking: float
    goal_run: float
    reached: bool


def measure(name: str, case: Case, repeats: int, device: torch.device) -> Row:
    """Time one network in its three forms."""
    forms = {form: Form(case, form, device) for form in ("plain", "picking", "committed")}
    times, errors = interleaved(
        {form: own.step for form, own in forms.items()}, repeats, device, clock=time.process_time
    )
    for error in errors.values():
        raise error
    picking, committed = (ratios(times[form], times["plain"]) for form in ("picking", "committed"))
    whole = committed.median + picking.median * forms["picking"].picking_steps / NETWORK_STEPS
    plain = spread(times["plain"]).median
    reached = picking.median <= case.goal_picking and whole <= case.goal_run
    return Row(name, plain, *picking, committed.median, whole, case.goal_picking, case.goal_run, reached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, default=Path("results/cost/cpu.csv"), help="where the CSV goes")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (medians are taken)")
    parser.add_argument("--only", default=",".join(CASES), help="names of networks, with commas between them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made = provenance()
    if arguments.device.type == "cpu":
        made["device"] = f"{processor()}, one thread"
    start, rows = time.perf_counter(), []
    for name, case in CASES.items():
        if name in arguments.only.split(","):
            rows.append(measure(name, case, arguments.repeats, arguments.device))
            print(
                "  ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in rows[-1]), flush=True
            )
    write_rows(arguments.out, [row._asdict() | made for row in rows])
    print(f"{arguments.out}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
