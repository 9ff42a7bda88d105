"""Training one cell of the image study, and going on with it after it was stopped, killed or ran out of disk.

    python -m flexact.studies.cifar.train --dataset cifar100 --model resnet18 --method flexact-all --seed 0 \\
        --epochs 30 --data DATA --out FOLDER

torchrun starts the same command on several GPUs or hosts. A cell's folder has checkpoint.json and the tensors it names,
curve.csv with one line an epoch, history.jsonl with the probabilities of all sites over training (where there are any),
and in the end network.safetensors, the extracted network.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from flexact.errors import FlexActError
from flexact.studies.cifar import checkpoint
from flexact.studies.cifar.cell_run import CellRun, Epoch, NanLoss, Outcome, Stopped
from flexact.studies.cifar.methods import METHODS, MODELS
from flexact.studies.cifar.protocol import NORMS, Cell, Protocol
from flexact.studies.cifar.ranks import TIMEOUT, Ranks, started_by_torchrun
from flexact.studies.cifar_data import data
from flexact.studies.cifar_data.data import Images
from flexact.studies.cuda_graph import study_stream
from flexact.studies.grid.engines import devices
from flexact.studies.grid.locks import Taken, locked
from flexact.studies.grid.protocol import POLICIES
from flexact.studies.grid.running import LOCK

__all__ = ["Epoch", "NanLoss", "Outcome", "Stopped", "main", "sigterm", "train_cell"]


def train_cell(
    cell: Cell,
    protocol: Protocol,
    images: Images,
    folder: Path,
    device: torch.device,
    report: Callable[[Epoch], object] | None = None,
    stop: Callable[[], bool] | None = None,
    blocks: Sequence[int] | None = None,
) -> Outcome:
    """Train a cell, or go on with it where its folder holds a checkpoint; bit for bit, on the same device.

    report: told each epoch. stop: asked before each step; once True, a checkpoint is written and `Stopped` raised.
    blocks: of each stage in the place of the model's own, for tests.
    """
    if images.name != cell.dataset:
        raise FlexActError(f"the cell is of {cell.dataset} and the images are those of {images.name}.")
    # Without searching for the fastest algorithms, and with none that adds in whatever order: a resumed run repeats.
    flags = torch.backends.cudnn.flags(enabled=True, deterministic=True) if device.type == "cuda" else nullcontext()
    with study_stream(device), flags:
        return CellRun(cell, protocol, images, Path(folder), device, report, stop, blocks).outcome()


@contextmanager
def sigterm() -> Iterator[Callable[[], bool]]:
    """A `stop` that SIGTERM sets, in the place of ending the process at once."""
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of one cell; its exit code: 2 for what `FlexActError` tells, as the command `flexact` has it."""
    given = _parser().parse_args(arguments)
    with sigterm() as stop:  # around what is told too: a launcher ends the ranks that lost one, and they say why
        try:
            _train(given, stop)
        except FlexActError as error:
            print(f"flexact: error: {' '.join(str(error).split())}", file=sys.stderr)
            return error.exit_code if isinstance(error, Stopped) else 2
    return 0


def _train(given: argparse.Namespace, stop: Callable[[], bool]) -> None:
    names = ("epochs", "batch", "lr", "width", "norm", "policy", "evaluate_every", "checkpoint_minutes")
    settings = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    if given.candidates is not None:
        settings["candidates"] = tuple(given.candidates.split(","))
    if given.changes is not None:
        settings["changes"] = _json(given.changes)
    cell, protocol = Cell(given.dataset, given.model, given.method, given.seed), Protocol(**settings)
    devices(given.device)  # refuses one that there is none of
    images = data.load(given.dataset, given.data, complete=not given.partial)
    with started_by_torchrun(given.device, given.timeout) as device, _alone_in(given.out):
        outcome = train_cell(cell, protocol, images, given.out, device, report=_told, stop=stop)
        if Ranks.current().writes:
            print(f"{cell.name}: {outcome.accuracy:.2f} % in {outcome.seconds:.0f} s")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the cell's folder against other processes, as a grid's worker does: the first rank does, for all."""
    with ExitStack() as held:
        if Ranks.current().writes:
            try:
                with checkpoint.naming(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    held.enter_context(locked(folder / LOCK))
            except Taken as taken:
                raise FlexActError(f"{taken} trains in {folder} already; give --out another folder, or wait.") from None
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flexact.studies.cifar.train", description="Train one cell.")
    parser.add_argument("--dataset", required=True, help=", ".join(data.NAMES))
    parser.add_argument("--model", default="resnet18", help=", ".join(MODELS))
    parser.add_argument("--method", required=True, help=", ".join(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the official binary files")
    parser.add_argument("--out", type=Path, required=True, help="the cell's own folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds that a rank waits for the others")
    parser.add_argument("--partial", action="store_true", help="read a part of a data set")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch", type=int, help="images a step, over all ranks together")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--width", type=int, help="channels of the first stage")
    parser.add_argument("--norm", help=f"{', '.join(NORMS)}: with several ranks")
    parser.add_argument("--policy", help=", ".join(POLICIES))
    parser.add_argument("--candidates", help="names, separated by commas")
    parser.add_argument("--changes", help="fields of the policy's FlexConfig, as a JSON object")
    parser.add_argument("--evaluate-every", type=int, help="epochs")
    parser.add_argument("--checkpoint-minutes", type=float, help="0: after every epoch")
    return parser


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise FlexActError(
            f"--changes takes a JSON object, such as '{{\"commit_at\": 0.5}}'; got {text!r} ({error})."
        ) from None


def _told(line: Epoch) -> None:
    accuracy = "" if line.test_accuracy is None else f", {line.test_accuracy:.2f} % right"
    print(f"epoch {line.epoch}: loss {line.loss:.4f}{accuracy}, {line.step_ms:.2f} ms a step", flush=True)


if __name__ == "__main__":
    sys.exit(main())
