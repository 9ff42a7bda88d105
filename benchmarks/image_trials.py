"""Compare candidates and policies on CIFAR-100 without its test images.

    python benchmarks/image_trials.py --data DATA [--out results/cifar/held_out.csv] [--seeds 10,11] [--epochs 30]

A fixed random fifth of the training images is held out. ResNet-18 is trained on the others, and the extracted network
is evaluated on the held-out ones. A row is written as soon as its run is done, and runs that have a row are skipped.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flexact.io.atomic_files import write_rows
from flexact.studies.cifar.protocol import RECTIFIERS, Cell, Protocol
from flexact.studies.cifar.train import train_cell
from flexact.studies.cifar_data import data
from flexact.studies.cifar_data.data import Images
from flexact.studies.grid.study import picked
from flexact.studies.provenance import provenance

WITH_ELU = (*RECTIFIERS, "elu")
THREE = ("relu", "leaky_relu", "gelu")
TRIALS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("relu", (), {}),
    ("gelu", (), {}),
    ("flexact-all", RECTIFIERS, {}),
    ("flexact-all", WITH_ELU, {}),
    ("flexact-all", THREE, {}),
    ("flexact-all", ("relu", "gelu"), {}),
    ("flexact-all", THREE, {"round_steps": 200}),
    ("flexact-all", THREE, {"granularity": "channel"}),
    ("flexact-all", WITH_ELU, {"granularity": "channel"}),
]
"""Method, candidates (empty for a fixed activation), and changes to the policy."""
BY_SITE = {"share": "site", "rewind": False}
"""The default settings of the time when the committed rows were made."""
HELD_OUT = 5
"""One in this many images is held out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the official binary files")
    parser.add_argument("--partial", action="store_true", help="accept part of the data set")
    parser.add_argument("--out", type=Path, default=Path("results/cifar/held_out.csv"), help="the CSV file to write")
    parser.add_argument("--seeds", default="10,11", help="separated by commas")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = held_out(data.load("cifar100", given.data, partial=given.partial))
    rows = list(csv.DictReader(given.out.open(encoding="utf-8"))) if given.out.exists() else []
    for seed in (int(text) for text in given.seeds.split(",")):
        for method, candidates, changes in TRIALS:
            about = {
                "method": method,
                "candidates": ",".join(candidates),
                "changes": json.dumps(changes, separators=(",", ":")) if changes else "",
                "seed": str(seed),
                "epochs": str(given.epochs),
            }
            if any(about.items() <= row.items() for row in rows):
                continue
            settings = {"epochs": given.epochs, "width": given.width, "changes": {**BY_SITE, **changes}}
            protocol = Protocol(**settings, candidates=candidates or None, evaluate_every=given.epochs)
            with tempfile.TemporaryDirectory() as folder:
                done = train_cell(Cell("cifar100", "resnet18", method, seed), protocol, images, Path(folder), device)
            picks = "(by channel)" if "granularity" in changes else " ".join(picked(done.picks).values())
            found = {"accuracy": f"{done.accuracy:.2f}", "train_loss": f"{done.loss:.4f}", "picks": picks}
            rows.append({**about, **found, **provenance()})
            write_rows(given.out, rows)
            print(*about.values(), *found.values(), sep="  ", flush=True)


def held_out(images: Images) -> Images:
    """Return the training images, with the held-out part in place of the test images."""
    count = len(images.train_y)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    kept, apart = order[: count - count // HELD_OUT], order[count - count // HELD_OUT :]
    x, y = images.train_x, images.train_y
    return replace(images, train_x=x[kept], train_y=y[kept], test_x=x[apart], test_y=y[apart])


if __name__ == "__main__":
    main()
