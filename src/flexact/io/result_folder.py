"""A study's folder: its config.json, and whether a run may begin or resume there."""

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
_SYNTHETIC_ROWS = b"study,model,truth,seed,"
"""How results.csv of the synthetic studies begins: they are recognised by it where config.json is lost."""


def enter(
    folder: Path,
    study: str,
    *,
    resume: bool,
    overwrite: bool,
    writes: Sequence[str],
    ignored: Collection[str] = (),
) -> dict[str, Any] | None:
    """The configuration of the run to resume in a folder; None where a run begins there.

    Raises where the folder holds something else. With `overwrite`, removes what an earlier run of the study wrote.

    writes: the files and folders that the study writes. ignored: files that do not count as something else.
    """
    if resume and overwrite:
        raise FlexActError("--resume continues a run and --overwrite starts it again; give one of the two.")
    if folder.exists() and not folder.is_dir():
        raise FlexActError(f"{folder} is a file; give --out a folder.")
    others = {path.name for path in folder.iterdir()} - {CONFIG + ".new", *ignored} if folder.exists() else set()
    if not others:
        return None
    if not holds_a_study(folder):
        raise FlexActError(
            f"{folder} is not empty and holds no run of a study ({', '.join(sorted(others)[:3])}); give --out another "
            "folder."
        )
    try:
        found = read_config(folder) or {}
    except FlexActError:
        if not overwrite:
            raise
        found = {"study": study}
    if found.get("study") != study:
        raise FlexActError(
            f"{folder} holds a run of the study {found.get('study')!r}, not of {study!r}; give --out another folder."
        )
    if overwrite:
        _clear(folder, writes)
        return None
    if not resume:
        raise FlexActError(
            f"{folder} holds a run of this study already; continue it with --resume, replace it with --overwrite, or "
            "give --out another folder."
        )
    return found


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, and create its folder where there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise FlexActError(f"cannot write to {folder}: {error.strerror}; give another --out.") from None


def holds_a_study(folder: Path) -> bool:
    """Whether a folder is recognisably a study's, even if its config.json is damaged or lost."""
    config, results = folder / CONFIG, folder / RESULTS
    if config.is_file() and b'"flexact_study"' in config.read_bytes():
        return True
    return results.is_file() and results.read_bytes().startswith(_SYNTHETIC_ROWS)


def read_config(folder: Path) -> dict[str, Any] | None:
    """A study's config.json, checked; None where there is none, or a file of some other program."""
    path = folder / CONFIG
    if not holds_a_study(folder):
        return None
    if not path.is_file():
        raise FlexActError(f"{folder} holds the results of a study without its {CONFIG}. {REMEDY}")
    try:
        found = parsed_json(read_text(path))
    except json.JSONDecodeError as error:
        raise damaged(path, error.lineno, f"not valid JSON ({error.msg} at column {error.colno})") from None
    except ValueError as error:
        raise damaged(path, 1, f"not valid JSON ({error})") from None
    version = found.get("flexact_study") if isinstance(found, dict) else None
    if not isinstance(version, int):
        return None
    if version != VERSION:
        raise FlexActError(f"{path} has version {version}, and this flexact reads version {VERSION} only.")
    if not isinstance(found.get("study"), str):
        raise FlexActError(f'{path} does not name its study, such as "synthetic". {REMEDY}')
    return dict(found)


def check_same(folder: Path, before: dict[str, Any], now: dict[str, Any], groups: Iterable[str]) -> None:
    """Raise where two configurations differ in one of these groups, and show the differences."""
    changes = []
    for group in groups:
        old, new = _flat(before.get(group)), _flat(now.get(group))
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        changes += [f"{name}: {_shown(old.get(name))} → {_shown(new.get(name))}" for name in names]
    if changes:
        shown = changes[:6] + ([f"and {len(changes) - 6} more"] if len(changes) > 6 else [])
        raise FlexActError(
            f"the run in {folder} has another configuration ({'; '.join(shown)}); --resume needs the same. Give --out "
            "another folder, or --overwrite to start again."
        )


def _clear(folder: Path, names: Sequence[str]) -> None:
    """Remove what a study writes, and nothing else."""
    for name in (CONFIG, TABLE, REPORT, "figures", *names):
        for path in (folder / name, folder / (name + ".new")):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _flat(group: Any) -> dict[str, Any]:
    """One level of names: a policy's fields become "model.field"."""
    flat: dict[str, Any] = {}
    for name, value in (group if isinstance(group, dict) else {}).items():
        flat.update({f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value})
    return flat


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
