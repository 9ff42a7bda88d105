"""What Flex-Act costs per step and per run, against the same network without it.

    PYTHONPATH=src:tests/torchvision_operators python3 benchmarks/cost.py [--device cpu] [--out FILE] [--repeats 15]
    PYTHONPATH=src python3 benchmarks/cost.py --only mlp,gpt --out FILE
    PYTHONPATH=src python3 benchmarks/cost.py --join FILE,FILE --out FILE

Each network is trained on one random batch in three forms that take turns: unconverted, while it picks, and committed
to its original activation. All have the same optimizer and the same step, and a ratio is the median of the ratios
within a round, with the 10th and 90th percentiles. A network that picks runs a blend of all candidates, or the
candidates of a trial one after the other; the ratio of a trial therefore includes the difference between the costs of
its candidates and of the original. `whole run` is the time of picking and of 8,000 steps with the pick, relative to
8,000 steps of the unconverted network. On a CPU, times are CPU times of one thread, so other programs do not count;
only the waits of a first run are wall times. On a GPU, ResNet-18 and -34 are measured as in `flexact reproduce
overhead`.

A goal is the maximum value; the column `reached` says whether the value is at most the goal. A part that fails becomes
a row with its error. --only measures some parts, and --join writes the rows of several such runs of one commit into
one file. `benchmarks/cost_table.py` prints the table of docs/overhead.md.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from cost_rows import first_run, resnets, sites, steps
from cost_rows.lines import goal
from cost_rows.networks import CASES
from cost_rows.row import Row, failed

from flexact.io.atomic_files import write_rows
from flexact.ops.triton import extension
from flexact.studies.overhead.options import chosen
from flexact.studies.overhead.timing import release
from flexact.studies.provenance import processor, provenance

RESNET_REPEATS = 8
Part = Callable[[], Iterator[Row]]
Rows = list[dict[str, Any]]


def parts(device: torch.device, repeats: int) -> dict[str, Part]:
    """Return what is measured on a device, in the order of the CSV."""
    found: dict[str, Part] = {name: partial(steps.rows, name, case, repeats, device) for name, case in CASES.items()}
    found["custom-large"] = partial(first_run.custom_candidate, device)
    found["first-run"] = partial(first_run.rows, device)
    if device.type == "cpu":
        return found | {"site": partial(sites.call, repeats), "policy": partial(sites.policy, repeats)}
    for network, modes in resnets.MODES.items():
        ways = [way for way in chosen("cuda").ways if way != "compiled_form" or network == "resnet18"]
        options = chosen("cuda", modes=modes, ways=tuple(ways), repeats=RESNET_REPEATS)
        found[network] = partial(resnets.rows, network, options)
    return found | {"candidates": partial(resnets.candidates, chosen("cuda", repeats=RESNET_REPEATS))}


def made_on(device: torch.device) -> dict[str, str]:
    """Return the columns on how the rows were made."""
    made = provenance()
    if device.type == "cpu":
        made["device"] = f"{processor()}, one thread"
    for package in ("triton", "timm"):
        try:
            made[package] = version(package)
        except PackageNotFoundError:
            made[package] = ""
    return made


def measure(chosen_parts: dict[str, Part], out: Path, device: torch.device) -> None:
    """Measure some parts, and write the file after every row, so that an interrupted run keeps its rows."""
    made, rows = made_on(device), Rows()
    for name, part in chosen_parts.items():
        start = time.perf_counter()
        for row in _or_error(name, part, device):
            took, start = time.perf_counter() - start, time.perf_counter()
            rows.append({"part": name, **row._asdict(), "goal": "", "reached": "", "took_s": f"{took:.2f}", **made})
            write(out, rows)
            show(rows[-1])
    print(f"{out}: {sum(float(row['took_s']) for row in rows):.0f} s")


def _or_error(name: str, part: Part, device: torch.device) -> Iterator[Row]:
    """Yield the rows of a part, and a row with the error if it fails."""
    try:
        release(device)
        yield from part()
    except Exception as error:
        yield failed(name, "", error)


def write(out: Path, rows: Rows) -> None:
    """Set the goals, some of which are values of other rows, and write the file."""
    values = {(row["case"], row["quantity"]): float(row["value"]) for row in rows}
    for row in rows:
        value, row["goal"] = float(row["value"]), goal((row["case"], row["quantity"]), values)
        row["reached"] = "" if math.isinf(row["goal"]) or math.isnan(value) else value <= row["goal"]
    write_rows(out, rows)


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    spread = "" if math.isnan(row["low"]) else f" ({row['low']:.3g} to {row['high']:.3g})"
    reached = {True: "reached", False: "not reached"}.get(row["reached"])
    mark = "" if reached is None else f"goal {row['goal']:.3g}: {reached}"
    print(f"{row['case']:<44}{row['quantity']:<44}{row['value']:.3g}{spread}  {mark}{row['error']}", flush=True)


def join(files: Sequence[Path], out: Path) -> None:
    """Write the rows of several files into one. Raise ValueError if they are of different devices, versions or commits,
    or measured the same parts."""
    rows, measured = Rows(), set[str]()
    for path in files:
        with path.open(encoding="utf-8", newline="") as file:
            own = list(csv.DictReader(file))
        if twice := measured & {row["part"] for row in own}:
            raise ValueError(f"{path} measured {', '.join(sorted(twice))} again; give files with different parts.")
        measured |= {row["part"] for row in own}
        rows += own
    for column in ("device", "torch", "triton", "timm", "commit"):
        if len(found := {row[column] for row in rows}) > 1:
            raise ValueError(f"the files have different values of {column}: {', '.join(sorted(found))}.")
    write(out, rows)
    print(f"{out}: {sum(float(row['took_s']) for row in rows):.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device", type=torch.device, default=device)
    parser.add_argument("--out", type=Path, help="where the CSV goes [default: results/cost/DEVICE.csv]")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (medians are taken)")
    parser.add_argument("--only", help="names of parts, with commas between them; needs --out")
    parser.add_argument("--join", help="files of runs with --only, with commas between them; needs --out")
    arguments = parser.parse_args()
    device = arguments.device
    if (arguments.only or arguments.join) and arguments.out is None:
        parser.error("--only and --join need --out, so that they do not overwrite a complete file.")
    out = arguments.out or Path(f"results/cost/{device.type}.csv")
    if arguments.join:
        join([Path(name) for name in arguments.join.split(",")], out)
        return
    torch.set_num_threads(1)
    known = parts(device, arguments.repeats)
    names = arguments.only.split(",") if arguments.only else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(known)}.")
    if device.type == "cuda":
        extension.wait()
    measure({name: known[name] for name in names}, out, device)


if __name__ == "__main__":
    main()
