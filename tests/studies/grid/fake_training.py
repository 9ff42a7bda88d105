"""A trainer that takes no time, for tests of the grid. It keeps `train_cell`'s contract, and fails on request.

Its behaviour is read from behaviour.json in the data folder: lists of cell names under "fail", "die" and "full",
seconds per epoch under "pace", whether it waits after its first epoch until it is stopped under "waits", and the
data's digest under "sha256". A cell under "die" dies once, in the middle of its run.

As a program, it runs a grid: ``python fake_training.py OUT DATA METHODS [local|ray] [--resume]``.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flexact.errors import FlexActError
from flexact.io.atomic_files import write_rows, write_whole
from flexact.studies.cifar.protocol import Cell, Grid, Protocol, Result
from flexact.studies.cifar.study import STUDY
from flexact.studies.cifar.train import CHECKPOINT
from flexact.studies.grid.engines import engine
from flexact.studies.grid.run import GridStopped, run
from flexact.studies.grid.store import Store
from flexact.studies.grid.study import picks_column

EPOCHS = 4


def load(name: str, folder: Path, protocol: Protocol) -> Any:
    path = Path(folder, "behaviour.json")
    behaviour = json.loads(path.read_text()) if path.exists() else {}
    return SimpleNamespace(
        name=name, train_y=range(1000), behaviour=behaviour, sha256=behaviour.get("sha256", f"that of {name}")
    )


def train(cell: Cell, protocol: Protocol, images: Any, folder: Path, device: Any, stop: Any) -> Any:
    script, checkpoint = images.behaviour, folder / CHECKPOINT
    curve = json.loads(checkpoint.read_text()) if checkpoint.exists() else []
    with (folder / "starts").open("a") as starts:
        starts.write(f"{len(curve)}\n")
    while len(curve) < protocol.epochs:
        while script.get("waits") and curve and not stop():
            time.sleep(0.05)
        if stop():
            write_whole(checkpoint, json.dumps(curve))
            raise FlexActError("stopped")
        if cell.name in script.get("fail", []):
            raise FlexActError("the loss is nan,\nnot finite")
        if cell.name in script.get("full", []) and len(curve) == 2:
            raise FlexActError("cannot write") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if cell.name in script.get("die", []) and len(curve) == 2 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(script.get("pace", 0.0))
        epoch = len(curve) + 1
        accuracy = accuracy_of(cell, epoch, protocol.epochs)
        curve.append({"epoch": epoch, "loss": 1 / epoch, "test_accuracy": accuracy, "seconds": float(epoch)})
        write_rows(folder / "curve.csv", curve)
        write_whole(checkpoint, json.dumps(curve))
    picks = {}
    if cell.method == "flexact-all":
        picks = {"layer1.0.relu": "relu", "layer4.1.relu": "tanh"}
        _write_history(folder)
    return Result(
        **cell.to_dict(),
        state="done",
        accuracy=curve[-1]["test_accuracy"],
        loss=curve[-1]["loss"],
        epochs=len(curve),
        seconds=4.0,
        step_ms=2.2 if picks else 2.0,
        picks=picks_column(picks),
        device=device.type,
    )


def store_in(folder: Path) -> Store[Any]:
    """A grid of the image study with the fake trainer."""
    return Store(folder, dataclasses.replace(STUDY, train=train, load=load))


def accuracy_of(cell: Cell, epoch: int = EPOCHS, epochs: int = EPOCHS) -> float:
    """Returns an accuracy that rises with the epochs. Flex-Act's is a bit higher, by an amount that depends on the
    seed.
    """
    gain = 0.5 + 0.1 * (cell.seed % 3) if cell.method == "flexact-all" else 0.0
    return 70.0 + cell.seed + gain - (epochs - epoch)


def _write_history(folder: Path) -> None:
    lines: list[dict[str, Any]] = [{"flexact_history": 1}]
    for epoch in range(EPOCHS + 1):
        p = epoch / EPOCHS
        sites = {site: {"relu": 1 - p, "tanh": p} for site in ("layer1.0.relu", "layer4.1.relu")}
        lines.append({"step": 10 * epoch, "epoch": epoch, "sites": sites, "picks": {}})
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main(out: str, data: str, methods: str, name: str = "local", *flags: str) -> int:
    grid = Grid(("cifar10",), ("resnet18",), tuple(methods.split(",")), seeds=2)
    address = flags[0] if flags and not flags[0].startswith("--") else None
    try:
        own = engine(name, "cpu", None, address)
        resume = "--resume" in flags
        run(store_in(Path(out)), [grid], Protocol(epochs=EPOCHS), Path(data), own, resume=resume)
    except GridStopped as stopped:
        print(stopped)
        return 128 + stopped.number
    return 0


if __name__ == "__main__":
    import fake_training  # looked up by name in a worker

    sys.exit(fake_training.main(*sys.argv[1:]))
