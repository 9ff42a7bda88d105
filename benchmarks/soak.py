"""Soak test: over a long run, do memory use and step time stay constant, and the loss finite?

    python benchmarks/soak.py [--steps 20000] [--out results/reliability/soak.csv]

A small converted network trains with a penalty, noise, a Recorder on disk and a checkpoint every 2,000 steps. There are
three runs, each in its own process. "memory" runs a whole schedule, including elimination and commitment, under
tracemalloc. "routing" never commits, and "committed" commits at once; both alternate with the same network with ReLU,
in blocks of ten steps. Times are CPU times, so other programs do not count, and the value for a thousand steps is the
median over blocks. Memory may grow by 1 % from step 1,000 to the end. The time of the last thousand steps, relative to
ReLU, may differ by 5 % from that of the first thousand. Takes about fifteen minutes on one core.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

WIDTH, BATCH, BLOCK = 64, 64, 10
POLICIES: dict[str, dict[str, object]] = {
    "memory": {"round_steps": "fill"},
    "routing": {"eliminate": "none", "commit_at": None},
    "committed": {"round_steps": 1},
}
MEMORY, SPEED = 0.01, 0.05
"""Maximum relative change from the beginning of a run to its end."""


@dataclass(frozen=True)
class Sample:
    """The state of a run after another thousand steps, and the times of these steps."""

    run: str
    step: int
    loss: float
    candidates: int
    """Remaining candidates over all sites; one per site after the commitment."""
    routed_ms: float
    relu_ms: float
    ratio: float
    """Routed time divided by ReLU's, median over blocks."""
    traced_kb: float
    """Memory that Python has allocated, from tracemalloc; 0 if it is off."""
    rss_kb: float
    """Resident memory of the process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1000, help="steps per line of the CSV")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "reliability" / "soak.csv")
    parser.add_argument("--run", choices=POLICIES, help="run only this one, in this process")
    arguments = parser.parse_args()
    if arguments.run is None:
        _all(arguments)
        return
    if arguments.run == "memory":
        tracemalloc.start()  # before the import of torch, so that its memory is traced too
    from flexact.io.atomic_files import write_rows
    from flexact.studies.provenance import processor, provenance

    made = {**provenance(), "device": processor()}
    rows = []
    for sample in samples(arguments.run, arguments.steps, arguments.every):
        rows.append({**asdict(sample), **made})
        print(sample, flush=True)
        write_rows(arguments.out, rows)


def samples(run: str, steps: int, every: int) -> Iterator[Sample]:
    """Train, and yield a sample every `every` steps. Exits with an error if the loss is not finite."""
    import torch
    from torch import nn

    import flexact

    torch.set_num_threads(1)
    torch.manual_seed(0)
    relu, routed = _network(), _network()
    config = flexact.FlexConfig(policy=flexact.Policy(noise=1.0, alpha=0.3, alpha_kind="absolute"), **POLICIES[run])
    routed = flexact.convert(routed, config=config)
    optimizer = torch.optim.SGD(flexact.param_groups(routed, weight_decay=5e-4), lr=0.01, momentum=0.9)
    plain_optimizer = torch.optim.SGD(relu.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    schedule = flexact.Schedule(routed, total_steps=steps, optimizer=optimizer)
    x = y = loss = torch.zeros(())

    def routed_step() -> None:
        nonlocal loss
        loss = nn.functional.mse_loss(routed(x), y) + flexact.penalty(routed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    def plain_step() -> None:
        nn.functional.mse_loss(relu(x), y).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    with (
        tempfile.TemporaryDirectory() as folder,
        flexact.Recorder(routed, path=Path(folder, "history.jsonl")) as recorder,
    ):
        blocks: list[tuple[float, float]] = []
        for step in range(BLOCK, steps + 1, BLOCK):
            x = torch.randn(BATCH, WIDTH)
            y = torch.tanh(x[:, :1] + x[:, 1:2])
            blocks.append((_timed(routed_step), _timed(plain_step)))
            if not bool(loss.isfinite()):
                raise SystemExit(f"the loss is {loss.item()} after {step} steps of the run {run!r}")
            if step % max(every // 10, BLOCK) == 0:
                recorder.record(step, loss=loss)
            if step % (2 * every) == 0:
                parts = {"model": routed, "optimizer": optimizer, "schedule": schedule}
                torch.save({name: part.state_dict() for name, part in parts.items()}, Path(folder, "checkpoint.pt"))
            if step % every == 0:
                alive = sum(len(row.probabilities) - len(row.dropped) for row in flexact.selection(routed))
                yield _sample(run, step, loss.item(), alive, blocks)
                blocks = []


def _network() -> "nn.Module":  # noqa: F821, UP037  # torch is imported late
    from torch import nn

    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def _timed(step: Callable[[], None]) -> float:
    """Return the CPU milliseconds per step over one block."""
    begun = time.process_time()
    for _ in range(BLOCK):
        step()
    return (time.process_time() - begun) * 1e3 / BLOCK


def _sample(run: str, step: int, loss: float, candidates: int, blocks: list[tuple[float, float]]) -> Sample:
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        run=run,
        step=step,
        loss=round(loss, 6),
        candidates=candidates,
        routed_ms=round(statistics.median(routed for routed, _ in blocks), 4),
        relu_ms=round(statistics.median(relu for _, relu in blocks), 4),
        ratio=round(statistics.median(routed / relu for routed, relu in blocks), 4),
        traced_kb=round(traced / 1024, 1),
        rss_kb=pages * os.sysconf("SC_PAGE_SIZE") / 1024,
    )


def _all(arguments: argparse.Namespace) -> None:
    """Execute each run in its own process, write one CSV, and exit with 1 if a limit is exceeded."""
    from flexact.io.atomic_files import write_rows

    rows: list[dict[str, str]] = []
    for run in POLICIES:
        with tempfile.TemporaryDirectory() as folder:
            own = Path(folder, "soak.csv")
            options = ["--steps", str(arguments.steps), "--every", str(arguments.every), "--out", str(own)]
            subprocess.run([sys.executable, __file__, "--run", run, *options], check=True)
            with own.open(newline="") as file:
                rows += csv.DictReader(file)
        write_rows(arguments.out, rows)
    met = [_within_limits(run, [row for row in rows if row["run"] == run]) for run in POLICIES]
    sys.exit(not all(met))


def _within_limits(run: str, rows: list[dict[str, str]]) -> bool:
    """Print the change from the beginning of a run to its end, and return whether it is within the limits."""
    columns = {"memory": ("traced_kb", "rss_kb")}.get(run, ("ratio", "rss_kb"))
    met = True
    for column in columns:
        first, last = float(rows[0][column]), float(rows[-1][column])
        change, limit = last / first - 1, SPEED if column == "ratio" else MEMORY
        met &= abs(change) <= limit
        span = f"{first:g} at step {rows[0]['step']}, {last:g} at the end"
        print(f"{run}: {column} {span}: {change:+.2%} (limit {limit:.0%})")
    return met


if __name__ == "__main__":
    main()
