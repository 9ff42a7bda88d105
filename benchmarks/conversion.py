"""Check that published architectures survive conversion, extraction, saving and loading with bit-identical outputs.

    python benchmarks/conversion.py [--library timm] [--name resnet18] [--out results/conversion/conversion.csv]

Each architecture of benchmarks/architectures.py has small sizes, random weights and four checks:

- kept: every activation is converted (where="*"), committed to the original and extracted. The result is compared with
  a network that was never converted: outputs in eval and in training mode under the same seed, types of outputs and
  modules, and keys and values of the state afterwards.
- picked: the hidden activations are converted (where="all"), committed to random picks and extracted. The output in
  eval mode must be that of the committed network.
- pickled: another process loads the pickled network. Its output must be the same.
- loaded: another process builds the network, loads its `state_dict` and passes the selection to `load_picks`. For
  transformers, it loads a checkpoint as the Trainer saves it after FlexActCallback. The output must be the same.

A check is "identical", "refused: " with the library's own error, or a failure: "DIFFERENT: " or "FAILED: " with the
reason. Architectures run in batches: one process converts and saves, another one loads. If an architecture crashes its
process, that is a failure, and a new process runs the rest of the batch. Rows that are already in the file are skipped,
so an interrupted sweep resumes. Takes about 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import pickle
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from architectures import NAMES, build
from torch import Tensor, nn
from torch.nn.utils import parametrize

import flexact
from flexact.io.atomic_files import write_rows
from flexact.studies.provenance import processor, provenance

ROOT = Path(__file__).resolve().parents[1]
CHECKS = ("kept", "picked", "pickled", "loaded")
BATCH = 8
LIMIT = 600
"""Timeout in seconds for the rest of a batch."""


class Different(Exception):
    """Two networks differ; the message says in what."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=NAMES, help="run only this library")
    parser.add_argument("--name", help="run only this architecture, even if the file has it")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "conversion" / "conversion.csv")
    parser.add_argument("--stage", choices=("convert", "reload"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage is not None:
        torch.set_num_threads(1)
        stage = convert_and_save if arguments.stage == "convert" else reload
        for name in arguments.name.split(","):
            print(json.dumps({"name": name, **stage(arguments.library, name, arguments.folder / name)}), flush=True)
        return
    rows = _rows(arguments.out)
    made = {**provenance(), "device": processor()}
    for library, names in NAMES.items():
        wanted = names if arguments.library in (None, library) else []
        if arguments.name is not None:
            wanted = [name for name in wanted if name == arguments.name]
        else:
            wanted = [name for name in wanted if (library, name) not in rows]
        for first in range(0, len(wanted), BATCH):
            for row in _batch(library, wanted[first : first + BATCH]):
                rows[library, row["name"]] = {**row, **made}
                print(row, flush=True)
            write_rows(arguments.out, list(rows.values()))
    failures = [row for row in rows.values() if any(is_failure(row[check]) for check in CHECKS)]
    print(f"{len(rows)} architectures, {len(failures)} with failures")
    sys.exit(bool(failures))


def is_failure(outcome: str) -> bool:
    return outcome != "identical" and not outcome.startswith("refused: ")


def _rows(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    if not file.is_file():
        return {}
    with file.open(newline="") as lines:
        return {(row["library"], row["name"]): dict(row) for row in csv.DictReader(lines)}


def _batch(library: str, names: list[str]) -> list[dict[str, Any]]:
    """Return the rows of some architectures."""
    rows = {name: {"library": library, "name": name, "sites": 0, "hidden": 0, "left_alone": 0} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (Path(folder) / name).mkdir()
        for stage, checks in (("convert", CHECKS[:2]), ("reload", CHECKS[2:])):
            for name, outcome in _run_stage(library, names, stage, folder).items():
                rows[name] |= outcome if isinstance(outcome, dict) else dict.fromkeys(checks, outcome)
    return list(rows.values())


def _run_stage(library: str, names: list[str], stage: str, folder: str) -> dict[str, dict[str, Any] | str]:
    """Run one stage in a process. Return its result for each architecture, or the reason why the process ended."""
    found: dict[str, dict[str, Any] | str] = {}
    while left := [name for name in names if name not in found]:
        command = [sys.executable, __file__, "--library", library, "--name", ",".join(left), "--stage", stage]
        try:
            done = subprocess.run(
                [*command, "--folder", folder], capture_output=True, text=True, timeout=LIMIT, check=False
            )
            output, ended = done.stdout, done.stderr.strip()[-300:]
        except subprocess.TimeoutExpired as error:
            output, ended = (error.stdout or b"").decode(), f"not done after {LIMIT} seconds"
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]
        found |= {line.pop("name"): line for line in lines}
        if len(lines) < len(left):
            found[left[len(lines)]] = f"FAILED: {ended}"
    return found


def convert_and_save(library: str, name: str, folder: Path) -> dict[str, Any]:
    """Run the checks `kept` and `picked`, and save the files that another process loads."""
    warnings.simplefilter("ignore")
    row: dict[str, Any] = {}
    _, inputs = build(library, name)

    def kept() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = flexact.convert(build(library, name)[0], "*", flexact.FlexConfig(init="original"))
        sites = _sites(model)
        messages = "\n".join(str(warning.message) for warning in caught)
        row.update(sites=len(sites), left_alone=messages.count("\n  "))
        for site in sites:
            site.commit(0, site.original_index)
        _compare(build(library, name)[0], flexact.extract(model), inputs)

    def picked() -> None:
        model = flexact.convert(build(library, name)[0])
        draw = random.Random(0)
        sites = _sites(model)
        row["hidden"] = len(sites)
        for site in sites:
            site.commit(0, draw.randrange(site.k))
        expected = _run(model.eval(), inputs)
        if not all(tensor.isfinite().all() for tensor in _tensors(expected)):
            raise Different("the output with these picks is not finite, so there is nothing to compare")
        extracted = flexact.extract(model)
        _same(expected, _run(extracted.eval(), inputs), "output")
        torch.save({"inputs": inputs, "expected": _tensors(expected)}, folder / "expected.pt")
        (folder / "selection.json").write_text(json.dumps(flexact.selection(model).to_dict()))
        torch.save(extracted.state_dict(), folder / "state.pt")
        _pickle(extracted, lambda: build(library, name)[0], folder)
        if library == "transformers":
            _save_pretrained(extracted, flexact.selection(model).picks, folder)

    row["kept"] = _outcome(kept)
    row["picked"] = _outcome(picked)
    return row


def _pickle(model: nn.Module, plain: Callable[[], nn.Module], folder: Path) -> None:
    """Pickle a model. If the plain network cannot be pickled either, write the reason to a file."""
    try:
        (folder / "model.pickle").write_bytes(pickle.dumps(model))
    except Exception:
        try:
            pickle.dumps(plain())
        except Exception as error:
            (folder / "no_pickle.txt").write_text(f"not even the plain network can be pickled: {error}")
        else:
            raise


def _save_pretrained(model: Any, picks: Mapping[str, str], folder: Path) -> None:
    """Save a model as the Trainer does after FlexActCallback has ended its run."""
    from flexact.integrations.transformers_config import problem_with_recording, record_picks

    problem = problem_with_recording(model)
    if problem is not None:
        (folder / "refused.txt").write_text(problem)
        return
    record_picks(model, picks)
    model.save_pretrained(folder / "checkpoint")


def reload(library: str, name: str, folder: Path) -> dict[str, Any]:
    """Run the checks `pickled` and `loaded`, from the files alone."""
    warnings.simplefilter("ignore")
    model, _ = build(library, name)  # also imports the library, which loading needs
    if not (folder / "expected.pt").is_file():
        return dict.fromkeys(("pickled", "loaded"), "refused: nothing to load, see the column picked")
    saved = torch.load(folder / "expected.pt", weights_only=False)

    def check(loaded: nn.Module) -> None:
        _same_tensors(saved["expected"], _tensors(_run(loaded.eval(), saved["inputs"])), "output")

    def pickled() -> None:
        _check_allowed(folder / "no_pickle.txt")
        check(pickle.loads((folder / "model.pickle").read_bytes()))

    def loaded() -> None:
        _check_allowed(folder / "refused.txt")
        if library == "transformers":
            importlib.import_module("flexact.integrations.transformers")  # from_pretrained raises without it
            check(flexact.load_picks(type(model).from_pretrained(folder / "checkpoint"), folder / "checkpoint"))
        else:
            model.load_state_dict(torch.load(folder / "state.pt"))
            check(flexact.load_picks(model, folder / "selection.json"))

    return {"pickled": _outcome(pickled), "loaded": _outcome(loaded)}


def _check_allowed(refusal: Path) -> None:
    """Raise the error that an earlier process wrote to a file."""
    if refusal.is_file():
        raise flexact.FlexActError(refusal.read_text())


def _outcome(check: Callable[[], None]) -> str:
    """Run a check and return its result as text."""
    try:
        check()
    except flexact.FlexActError as error:
        return f"refused: {_line(error)}"
    except Different as error:
        return f"DIFFERENT: {_line(error)}"
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {_line(error)}"
    return "identical"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _sites(model: nn.Module) -> list[flexact.FlexAct]:
    return [module for module in model.modules() if isinstance(module, flexact.FlexAct)]


def _compare(plain: nn.Module, back: nn.Module, inputs: Any) -> None:
    """Raise `Different` if two networks have different module types, outputs or states."""
    types = [{name: _type(module) for name, module in model.named_modules()} for model in (plain, back)]
    if types[0] != types[1]:
        names = sorted(name for name in types[0].keys() | types[1].keys() if types[0].get(name) != types[1].get(name))
        raise Different(f"types of the modules: {names[:3]}")
    for training in (False, True):
        results = [_run(model.train(training), inputs) for model in (plain, back)]
        _same(*results, f"output in {'training' if training else 'eval'} mode")
    states = [model.state_dict() for model in (plain, back)]
    if list(states[0]) != list(states[1]):
        raise Different("keys of the state_dict")
    _same_tensors(list(states[0].values()), list(states[1].values()), "state_dict")


def _type(module: nn.Module) -> Any:
    """Return the type of a module. torch creates a type for each parametrized module; its bases stand for it."""
    return type(module).__bases__ if parametrize.is_parametrized(module) else type(module)


def _run(model: nn.Module, inputs: Any) -> Any:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  # Wav2Vec2 draws its masks from this generator
    random.seed(1)
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def _same(one: Any, other: Any, where: str) -> None:
    if _structure(one) != _structure(other):
        raise Different(f"{where}: {_structure(one)!s:.100} and {_structure(other)!s:.100}")
    _same_tensors(_tensors(one), _tensors(other), where)


def _same_tensors(ones: list[Tensor], others: list[Tensor], where: str) -> None:
    if len(ones) != len(others):
        raise Different(f"{where}: {len(ones)} and {len(others)} tensors")
    for one, other in zip(ones, others, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            raise Different(f"{where}: {tuple(one.shape)}, {one.dtype} and {tuple(other.shape)}, {other.dtype}")
        if not torch.equal(one.nan_to_num(12345.0), other.nan_to_num(12345.0)):
            raise Different(f"{where}: values differ by up to {float((one - other).abs().max()):.3g}")


def _parts(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (tuple, list)) else None


def _structure(value: Any) -> Any:
    parts = _parts(value)
    return type(value) if parts is None else (type(value), [_structure(part) for part in parts])


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in _parts(value) or () for tensor in _tensors(part)]


if __name__ == "__main__":
    main()
