"""Training one cell of the image study, and resuming it after it was stopped or killed.

    python -m flexact.studies.cifar.train --dataset cifar100 --model resnet18 --method flexact-all --seed 0 \\
        --epochs 30 --data DATA --out FOLDER

torchrun starts the same command on several GPUs or hosts. A cell's folder contains checkpoint.json and the tensors that
it names, curve.csv with one line per epoch, history.jsonl with the probabilities of all sites during training, and in
the end network.safetensors, the extracted network.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from flexact.errors import FlexActError
from flexact.io.json_input import parsed_json
from flexact.studies.cifar import checkpoint
from flexact.studies.cifar.cell_run import CellRun, Epoch, NanLoss, Outcome
from flexact.studies.cifar.methods import METHODS
from flexact.studies.cifar.protocol import NORMS, Cell, Protocol
from flexact.studies.cifar.ranks import TIMEOUT, Ranks, started_by_torchrun
from flexact.studies.cifar_data import data
from flexact.studies.cifar_data.data import Images
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.cuda_graph import study_stream
from flexact.studies.device_lock import DEVICE
from flexact.studies.grid.cell_task import Stopped, locked
from flexact.studies.grid.engines import devices
from flexact.studies.grid.study import LOCK, POLICIES

__all__ = ["Epoch", "NanLoss", "Outcome", "Stopped", "main", "sigterm", "train_cell"]

SETTINGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "epochs": (int, "passes over the data"),
    "batch": (int, "images per step, over all ranks together"),
    "lr": (float, "learning rate of the first step"),
    "width": (int, "channels of the first stage"),
    "norm": (str, f"batch norm with several ranks: {', '.join(NORMS)}"),
    "policy": (str, ", ".join(POLICIES)),
    "candidates": (lambda text: tuple(text.split(",")), "names, separated by commas"),
    "changes": (parsed_json, "fields of the policy's FlexConfig, as a JSON object"),
    "evaluate_every": (int, "epochs between evaluations"),
    "checkpoint_minutes": (float, "minutes between checkpoints; 0 for one after every epoch"),
}
"""The fields of the protocol that are options of the command."""


def train_cell(
    cell: Cell,
    protocol: Protocol,
    images: Images,
    folder: Path,
    device: torch.device,
    report: Callable[[Epoch], object] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Outcome:
    """Train a cell, or resume it from the checkpoint in its folder; bit-identical on the same device.

    report: called after each epoch. stop: called before each step; once it returns True, a checkpoint is written and
    `Stopped` raised.
    """
    if images.name != cell.dataset:
        raise FlexActError(f"the cell needs {cell.dataset}; got the images of {images.name}.")
    try:
        with DEVICE.held(), study_stream(device):
            return CellRun(cell, protocol, images, Path(folder), device, report, stop).outcome()
    finally:
        gc.collect()  # a CUDA graph is part of a reference cycle, which holds its memory


@contextmanager
def sigterm() -> Iterator[Callable[[], bool]]:
    """Yield a `stop` that SIGTERM sets instead of ending the process."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of one cell. Returns its exit code, which is 2 for a `FlexActError`, as in `flexact`."""
    given = _parser().parse_args(arguments)
    with sigterm() as stop:  # also while the error is printed: a launcher sends SIGTERM
        try:
            _train(given, stop)
        except FlexActError as error:
            print(f"flexact: error: {' '.join(str(error).split())}", file=sys.stderr)
            return 128 + signal.SIGTERM if isinstance(error, Stopped) else 2
    return 0


def _train(given: argparse.Namespace, stop: Callable[[], bool]) -> None:
    settings = {name: getattr(given, name) for name in SETTINGS if getattr(given, name) is not None}
    cell, protocol = Cell(given.dataset, given.model, given.method, given.seed), Protocol(**settings)
    devices(given.device)  # raises if there is no such device
    images = data.load(given.dataset, given.data, complete=not given.partial)
    with started_by_torchrun(given.device, given.timeout) as device, _locked(given.out):
        outcome = train_cell(cell, protocol, images, given.out, device, report=_print_epoch, stop=stop)
        if Ranks.current().writes:
            print(f"{cell.name}: {outcome.accuracy:.2f} % in {outcome.seconds:.0f} s")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the cell's folder, as a grid's worker does; the first rank does this for all."""
    with ExitStack() as held:
        if Ranks.current().writes:
            with checkpoint.naming(folder):
                folder.mkdir(parents=True, exist_ok=True)
                busy = f"HOLDER is training in {folder}; give --out another folder, or wait."
                held.enter_context(locked(folder / LOCK, busy))
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flexact.studies.cifar.train", description="Train one cell.")
    parser.add_argument("--dataset", required=True, help=", ".join(data.NAMES))
    parser.add_argument("--model", default="resnet18", help=", ".join(BLOCKS))
    parser.add_argument("--method", required=True, help=", ".join(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the official binary files")
    parser.add_argument("--out", type=Path, required=True, help="the cell's own folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds that a rank waits for the others")
    parser.add_argument("--partial", action="store_true", help="accept part of a data set")
    for name, (kind, text) in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    return parser


def _print_epoch(line: Epoch) -> None:
    accuracy = "" if line.test_accuracy is None else f", accuracy {line.test_accuracy:.2f} %"
    print(f"epoch {line.epoch}: loss {line.loss:.4f}{accuracy}, {line.step_ms:.2f} ms per step", flush=True)


if __name__ == "__main__":
    sys.exit(main())
