"""What Flex-Act costs per step and per run, against the same network without it.

    PYTHONPATH=src python3 benchmarks/cost.py [--device cpu] [--out FILE] [--repeats 15] [--only mlp,gpt]

Each network is trained on one random batch in three forms that run in turns: unconverted, while it picks, and committed
to its original activation. A network that picks runs a blend, or one candidate of a trial at a time; the ratio of a
trial therefore includes the difference between the costs of its candidates and of the original. A ratio is the median
of the ratios within a round, with the 10th and 90th percentiles. `whole run` is the time of picking and of 8,000 steps
with the pick, relative to 8,000 steps of the unconverted network. On a CPU, times are CPU times of one thread, so other
programs do not count. On a GPU, ResNet-18 and -34 are measured as in `flexact reproduce overhead`. A goal is the
maximum value; the column `reached` says whether the value is at most the goal.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexact
from flexact.candidates.registry import lookup
from flexact.io.atomic_files import write_rows
from flexact.ops import dispatch
from flexact.routing.sites import sites_of
from flexact.studies.overhead import study
from flexact.studies.overhead.options import PEAK, TRAIN, chosen
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
    """Return the mean squared residual of u″ = −u."""
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
TRIAL = flexact.FlexConfig(candidates=("tanh", "gelu", "silu", "elu", "relu"))  # begins with the original
BLEND = flexact.FlexConfig(candidates=("tanh", "sine", "silu", "gelu"), pick_by="blend")


def _transformer(*, attends: bool) -> nn.Sequential:
    return nn.Sequential(*(Block(64, 64, attends=attends) for _ in range(4)))


CASES = {
    "mlp": Case(lambda: _mlp((64, 64, 64, 10), nn.ReLU), (64, 64), math.inf, 1.4),
    "mlp-blend": Case(
        lambda: _mlp((64, 64, 64, 10), nn.ReLU), (64, 64), math.inf, 1.4, config=flexact.FlexConfig(pick_by="blend")
    ),
    "mixer": Case(lambda: _transformer(attends=False), (32, 64, 64), 1.3, 1.3),
    "gpt": Case(lambda: _transformer(attends=True), (32, 64, 64), 1.3, 1.3),
    "gpt-custom": Case(lambda: _transformer(attends=True), (32, 64, 64), 1.25, 1.3, config=CUSTOM),
    "unet": Case(UNet, (8, 3, 64, 64), 1.3, 1.3),
    "physics-trial": Case(lambda: _mlp((1, 64, 64, 64, 1), nn.Tanh), (512, 1), 1.5, 1.5, _second_derivative, TRIAL),
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
    """One measurement: the median with its 10th and 90th percentiles."""

    case: str
    quantity: str
    value: float
    low: float = math.nan
    high: float = math.nan
    plain_ms: float = math.nan
    """The step of the unconverted network."""
    goal: float = math.inf

    @property
    def reached(self) -> bool:
        return self.value <= self.goal


def steps(name: str, case: Case, repeats: int, device: torch.device) -> Iterator[Row]:
    """Time one network in its three forms."""
    forms = {form: Form(case, form, device) for form in ("plain", "picking", "committed")}
    runs = {form: own.step for form, own in forms.items()}
    times, errors = interleaved(runs, repeats, device, clock=time.process_time)
    for error in errors.values():
        raise error
    plain = spread(times["plain"]).median
    picking, committed = (ratios(times[form], times["plain"]) for form in ("picking", "committed"))
    whole = committed.median + picking.median * forms["picking"].picking_steps / NETWORK_STEPS
    yield Row(name, "step while picking, ratio", *picking, plain, case.goal_picking)
    yield Row(name, "step once committed, ratio", *committed, plain)
    yield Row(name, "whole run of 8,000 steps, ratio", whole, plain_ms=plain, goal=case.goal_run)


def first_step(device: torch.device) -> Iterator[Row]:
    """Time the first step of a site with a custom candidate on more than 2^20 elements."""
    site = flexact.FlexAct(candidates=("relu", "silu", "scaled_sigmoid")).to(device)
    h = torch.randn(2**20 + 1, device=device, requires_grad=True)
    start = time.perf_counter()
    site(h).sum().backward()
    float(site.logits.grad.sum())  # type: ignore[union-attr]  # waits for a GPU
    yield Row("custom candidate, 2^20 + 1 elements", "first step, s", time.perf_counter() - start, goal=1.0)


def site_call(repeats: int) -> Iterator[Row]:
    """Time what forward and backward of a site on 64 x 64 elements take in addition to their arithmetic: the values and
    slopes of its candidates, two weighted sums, the statistics, the inner products and a plain activation's autograd.
    """
    plain, relu = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), nn.ReLU()
    network = flexact.convert(plain, config=flexact.FlexConfig(pick_by="blend"))
    flexact.Schedule(network, network_steps=10**8)
    network(torch.randn(64, 64))  # draws the probabilities of this step, which all calls of a step share
    (site,) = sites_of(network)
    candidates = [lookup(key) for key in site.keys]
    h, delta = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    flat, upstream = h.detach().flatten(), delta.flatten()

    def routed() -> None:
        site(h).backward(delta)
        site.router.call_statistics.clear()

    def arithmetic() -> None:
        relu(h).backward(delta)
        x, slope = torch.zeros_like(flat), torch.zeros_like(flat)
        values = []
        for one in candidates:
            values.append(one.function(flat))
            own = one.derivative(flat, values[-1])
            x.add_(values[-1], alpha=0.2)
            slope.add_(own, alpha=0.2)
            own.abs().sum()
        for value in values:
            torch.dot(upstream, value)
        slope.mul_(upstream)

    runs = {"routed": routed, "arithmetic": arithmetic}
    times, _ = interleaved(runs, repeats, torch.device("cpu"), clock=time.process_time)
    beyond = [1e3 * (a - b) for a, b in zip(times["routed"], times["arithmetic"], strict=True)]
    own = statistics.median(times["arithmetic"])
    yield Row("one site, 64 x 64 elements", "call beyond its arithmetic, us", *spread(beyond), own, 60.0)


RESNET_GOALS = {
    ("all", "fused_bn", "eager", TRAIN): 1.15,
    ("penultimate", "fused_bn", "eager", TRAIN): 1.03,
    ("all", "fused", "eager", TRAIN): 1.25,
    ("all", "fused_bn", "compiled", TRAIN): 1.05,
    ("all", "fused_bn", "eager", PEAK): 1.02,
    ("all", "fused", "eager", PEAK): 1.15,
}


def resnets(repeats: int) -> Iterator[Row]:
    """Time ResNet-18 and -34 on a GPU, each with the goals of its rows. Without Triton, the goal is plain torch."""
    for network, modes in (("resnet18", ("eager", "compiled")), ("resnet34", ("eager",))):
        rows = study.measure(network, chosen("cuda", modes=modes, repeats=repeats))
        plain = {row.cell: row for row in rows if row.quantity == TRAIN}
        for row in rows:
            if row.error:
                print(f"{row.cell}: {row.error}")
            if row.ratio is None or row.placement == row.cell.baseline.placement:
                continue
            goal = RESNET_GOALS.get((row.placement, row.way, row.mode, row.quantity), math.inf)
            twin = plain.get(row.cell._replace(way="plain"))
            if row.way == "closed_form" and row.quantity == TRAIN and twin is not None and twin.ratio is not None:
                goal = twin.ratio
            base = plain[row.cell.baseline].value if row.quantity == TRAIN else None
            name = f"{network}, {row.placement}, {row.way}, {row.mode}"
            low, high = row.ratio_p10 or math.nan, row.ratio_p90 or math.nan
            yield Row(name, f"{row.quantity}, ratio", row.ratio, low, high, base or math.nan, goal)
    dispatch.use("auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device", type=torch.device, default=device)
    parser.add_argument("--out", type=Path, help="where the CSV goes [default: results/cost/DEVICE.csv]")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (medians are taken)")
    parser.add_argument("--only", help="names of networks, with commas between them")
    arguments = parser.parse_args()
    device, out = arguments.device, arguments.out or Path(f"results/cost/{arguments.device.type}.csv")
    torch.set_num_threads(1)
    made = provenance()
    if device.type == "cpu":
        made["device"] = f"{processor()}, one thread"
    names = arguments.only.split(",") if arguments.only else list(CASES)
    parts = [steps(name, CASES[name], arguments.repeats, device) for name in names]
    if not arguments.only:
        parts += [first_step(device), site_call(arguments.repeats) if device.type == "cpu" else resnets(10)]
    start, rows = time.perf_counter(), []
    for row in itertools.chain.from_iterable(parts):
        rows.append(row._asdict() | {"reached": "" if math.isinf(row.goal) else row.reached} | made)
        write_rows(out, rows)  # after every row, so that an interrupted run keeps its rows
        mark = "" if math.isinf(row.goal) else f"goal {row.goal:.3g}: {'reached' if row.reached else 'not reached'}"
        spread_of = "" if math.isnan(row.low) else f" ({row.low:.3g} to {row.high:.3g})"
        print(f"{row.case:<40}{row.quantity:<36}{row.value:.3g}{spread_of}  {mark}", flush=True)
    print(f"{out}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
