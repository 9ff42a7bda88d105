"""`flexact.compare`: the comparison as a function, and what it returns."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.io.result_folder import CONFIG, REPORT
from flexact.studies.compare.functions import Build, Functions, Train
from flexact.studies.compare.protocol import USUAL, Grid, Result, methods_of
from flexact.studies.compare.setup import engine_for, prepared
from flexact.studies.compare.study import STUDY, Store
from flexact.studies.compare.table import Summary, mean_agreement, picks_by_seed, summaries
from flexact.studies.compare.training import train_cell
from flexact.studies.grid.cell_task import read_curve
from flexact.studies.grid.run import page_of, run_and_report
from flexact.studies.progress import Progress
from flexact.surgery.choosing import Where


@dataclass(frozen=True)
class Compared:
    """The results of a comparison; prints as a table."""

    folder: Path

    @property
    def page(self) -> Path | None:
        """report.html; None if the packages of the page are not installed."""
        path = self.folder / REPORT
        return path if path.is_file() else None

    @cached_property
    def runs(self) -> list[Result]:
        """One row per run, as in results.csv."""
        store = Store(self.folder)
        results = store.results()
        return [results[cell] for cell in store.asked() if cell in results]

    @cached_property
    def summaries(self) -> list[Summary]:
        """One summary per method: scores by seed, difference and p against the original, cost."""
        return summaries(self.runs)

    @property
    def picks(self) -> dict[int, dict[str, str]]:
        """Seed → site → pick."""
        return picks_by_seed(self.runs)

    @property
    def agreement(self) -> float:
        """The share of seeds with the most common pick, averaged over sites."""
        return mean_agreement(self.picks)

    @property
    def curves(self) -> dict[tuple[str, int], list[float]]:
        """(method, seed) → the scores that `train` yielded; empty if it returns one score."""
        store = Store(self.folder)
        found = {(row.method, row.seed): read_curve(store.cell_folder(row.cell)) for row in self.runs}
        return {run: [line["score"] for line in curve] for run, curve in found.items() if curve}

    def __str__(self) -> str:
        return Store(self.folder).table()

    _repr_markdown_ = __str__  # what a notebook shows


def compare(
    build: Build,
    train: Train,
    candidates: Sequence[str] | None = None,
    methods: Sequence[str] = USUAL,
    seeds: int | Sequence[int] = 5,
    *,
    config: FlexConfig | None = None,
    where: Where = "all",
    out: str | Path = "runs/compare",
    engine: str = "local",
    jobs: int | None = None,
    device: str | None = None,
    address: str | None = None,
    overwrite: bool = False,
    retry_failed: bool = False,
    quiet: bool = False,
) -> Compared:
    """Train a network with its own activation, with each candidate everywhere, and with Flex-Act, paired by seed.

    build: makes the network, with the same architecture every time. All methods of a seed start with the same weights.
    train: your training as a function `train(model, seed, make_schedule)` that returns a score. `make_schedule` is None
    for a plain network. For the network that picks, it makes the Schedule: call it with the arguments of
    `flexact.Schedule` after the model, train for its `total_steps`, and call its `step(loss)`. If `train` yields scores
    instead, they are its learning curve, and the last one is the score.
    candidates: by default those of `config`. "original" stands for the network's own activation.
    methods: "original", "fixed" (each candidate at every site), "fixed-CANDIDATE", "flexact", and "flexact-alone",
    which trains Flex-Act's picks from the start in a plain network.
    seeds: a number of seeds, from 0 on; or the seeds themselves.
    config, where: as in `flexact.convert`.
    out: the folder of the comparison. If it holds this comparison already, only the missing runs are trained.
    engine: "local" (processes of this machine), "inline" (this process) or "ray" (a cluster).
    jobs: runs at a time; by default one per device. Costs are meaningful only if runs do not share a device.
    device: "cpu", "cuda" (all GPUs) or "cuda:N"; by default all GPUs or the CPU. `train` must move the model; in each
    worker, the current CUDA device is the worker's GPU. address: the address of the Ray cluster.
    overwrite: start again. retry_failed: also train the runs that failed before.

    >>> import torch, flexact, tempfile
    >>> def build():
    ...     return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> def train(model, seed, make_schedule):
    ...     x = torch.linspace(-2, 2, 64)[:, None]
    ...     optimizer = torch.optim.Adam(flexact.param_groups(model), lr=0.01)
    ...     schedule = make_schedule and make_schedule(network_steps=20, optimizer=optimizer)
    ...     for _ in range(schedule.total_steps if schedule else 20):
    ...         loss = (model(x) - x.abs()).square().mean()
    ...         loss.backward(); optimizer.step(); optimizer.zero_grad()
    ...         if schedule:
    ...             schedule.step(loss)
    ...     return -float(loss)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = flexact.compare(build, train, ("relu", "tanh"), ["original", "fixed"], seeds=2, out=folder,
    ...                             engine="inline", quiet=True)
    ...     [one.method for one in found.summaries]
    ['original', 'fixed-relu']
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself checks it
        raise FlexActError(
            "compare was called while a worker process imports your script. Put the call under "
            "if __name__ == '__main__':, or give engine='inline'."
        )
    numbers = list(range(seeds) if isinstance(seeds, int) else seeds)
    if not 0 < len(numbers) == len(set(numbers)):
        raise FlexActError(f"seeds must be a number of seeds or a sequence of distinct seeds; got {seeds!r:.80}.")
    config = FlexConfig() if config is None else config
    if candidates is not None:
        config = replace(config, candidates=candidates)  # type: ignore[arg-type]  # checked there
    folder = Path(out)
    functions = Functions(build, train, where)
    protocol, original = prepared(functions, config, numbers)
    chosen = methods_of(config.candidates, methods, original)
    store = Store(folder, study=replace(STUDY, train=partial(train_cell, functions)))
    resume = (folder / CONFIG).is_file() and not overwrite
    if resume and not quiet:
        print("flexact: finished runs keep their results, even if build or train was edited since.", file=sys.stderr)
    run_and_report(
        store,
        Progress(quiet, pieces="runs"),
        grids=[Grid(chosen, seeds=1, first_seed=seed) for seed in numbers],
        protocol=protocol,
        data=Path.cwd(),
        engine=engine_for(functions, engine, device, jobs, address),
        resume=resume,
        overwrite=overwrite,
        retry_failed=retry_failed and resume,
    )
    compared = Compared(folder)
    if compared.page is None:
        warnings.warn(f"{REPORT} is {page_of(folder)}", stacklevel=3)
    return compared
