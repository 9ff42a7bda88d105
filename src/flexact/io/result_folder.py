"""A study's folder: its config.json, and whether a run may start or resume there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.io.csv_rows import REMEDY, damaged, read_text
from flexact.io.json_input import parsed_json

VERSION = 1
CONFIG, RESULTS, TABLE, REPORT = "config.json", "results.csv", "table.md", "report.html"


def enter(
    folder: Path, study: str, *, resume: bool, overwrite: bool, writes: Sequence[str], ignored: Collection[str] = ()
) -> dict[str, Any] | None:
    """Return the configuration of the run to resume in a folder; None if a new run starts there.

    Raise if the folder has other content. With `overwrite`, remove the files of an earlier run of the study.

    writes: the files and folders that the study writes. ignored: files that do not count as other content.
    """
    if resume and overwrite:
        raise FlexActError("--resume resumes a run, and --overwrite replaces it; give only one of the two.")
    if folder.exists() and not folder.is_dir():
        raise FlexActError(f"{folder} is a file; give --out a folder.")
    others = {path.name for path in folder.iterdir()} - {CONFIG + ".new", *ignored} if folder.exists() else set()
    if not others:
        return None
    try:
        found = read_config(folder)
    except FlexActError:  # the configuration of a study is damaged
        if not overwrite:
            raise
        found = {"study": study}
    if found is None:
        raise FlexActError(
            f"{folder} is not empty and holds no run of a study ({', '.join(sorted(others)[:3])}); pass another folder "
            "to --out."
        )
    if found["study"] != study:
        raise FlexActError(
            f"{folder} holds a run of the study {found['study']!r}, not of {study!r}; pass another folder to --out."
        )
    if overwrite:
        _clear(folder, writes)
        return None
    if not resume:
        raise FlexActError(
            f"{folder} already holds a run of this study; resume it with --resume, replace it with --overwrite, or "
            "pass another folder to --out."
        )
    return found


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, and create its folder if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise FlexActError(f"cannot write to {folder}: {error.strerror}; give another --out.") from None


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return a study's checked config.json; None if it is missing or from another program."""
    path = folder / CONFIG
    if not path.is_file() or b'"flexact_study"' not in path.read_bytes():
        return None
    try:
        found = parsed_json(read_text(path))
    except ValueError as error:
        raise damaged(path, getattr(error, "lineno", 1), f"not valid JSON ({error})") from None
    version = found.get("flexact_study") if isinstance(found, dict) else None
    if not isinstance(version, int):
        return None
    if version != VERSION:
        raise FlexActError(f"{path} has version {version}, but this flexact only reads version {VERSION}.")
    if not isinstance(found.get("study"), str):
        raise FlexActError(f'{path} does not name its study, such as "synthetic". {REMEDY}')
    return dict(found)


def check_same(folder: Path, before: dict[str, Any], now: dict[str, Any], groups: Iterable[str]) -> None:
    """Raise an error that shows the differences if two configurations differ in one of these groups."""
    changes = []
    for group in groups:
        old, new = _flat(before.get(group)), _flat(now.get(group))
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        changes += [f"{name}: {_shown(old.get(name))} → {_shown(new.get(name))}" for name in names]
    if changes:
        shown = changes[:6] + ([f"and {len(changes) - 6} more"] if len(changes) > 6 else [])
        raise FlexActError(
            f"the run in {folder} has another configuration ({'; '.join(shown)}), and can be resumed only "
            "with its own. Pass another folder to --out, or give --overwrite to start again."
        )


def _clear(folder: Path, names: Sequence[str]) -> None:
    """Remove the files that a study writes, and no others."""
    for name in (CONFIG, TABLE, REPORT, "figures", *names):
        for path in (folder / name, folder / (name + ".new")):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _flat(group: Any) -> dict[str, Any]:
    """Flatten one level of nested dictionaries: {"relu": {"seed": 0}} becomes {"relu.seed": 0}."""
    flat: dict[str, Any] = {}
    for name, value in (group if isinstance(group, dict) else {}).items():
        flat.update({f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value})
    return flat


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
