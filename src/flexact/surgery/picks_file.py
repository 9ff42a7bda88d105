"""flexact.json: what each site of an extracted network picked, for a checkpoint whose own format cannot say so."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexact.activations import key_of
from flexact.candidates import ORIGINAL, lookup
from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.io.json_input import parsed_json, path_of
from flexact.observe.selection import Selection
from flexact.routing.sites import sites_of
from flexact.surgery.convert import convert, extract
from flexact.surgery.finding import find

FILE = "flexact.json"
CONFIG_FIELD = "flexact"
"""The field of a configuration of transformers that holds the same; it travels with `save_pretrained`."""
VERSION = 1
_KEY = "flexact_picks"
_GIVEN = "the selection"
"""What errors call picks that came from no file."""


class Unpicked(nn.Module):
    """Stands where a pick belongs until `load_picks` puts it there; it computes nothing."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        raise FlexActError(
            "this network was trained with flexact and its activations are not in place yet; put them in with "
            "flexact.load_picks(model, path), where path is the folder that it was loaded from."
        )


def described(picks: Mapping[str, str], original: Mapping[str, str], committed: bool = True) -> dict[str, Any]:
    """What flexact.json holds, in plain JSON types.

    picks: by site; original: the settings of the network's own configuration that say what stood there before.
    """
    return {_KEY: VERSION, "committed": committed, "picks": dict(picks), "original": dict(original)}


def write_picks(folder: Path, description: Mapping[str, Any]) -> None:
    """Write flexact.json into a folder."""
    write_whole(folder / FILE, json.dumps(description, indent=2) + "\n")


def load_picks(model: nn.Module, picks: str | Path | Selection | Mapping[str, Any]) -> nn.Module:
    """Put the activations that a trained network picked into a network that was built anew; returns the model.

    picks: what `selection` returned for the trained network, or its `to_dict()`; or a JSON file of that; or
    flexact.json, or the folder of a checkpoint that it lies in. The folder of a plain checkpoint, whose own config.json
    says what was picked, leaves the model as it is.

    >>> import json, pathlib, tempfile, torch, flexact
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> folder = tempfile.TemporaryDirectory()
    >>> picks = {"flexact_picks": 1, "committed": True, "picks": {"1": "tanh"}, "original": {}}
    >>> _ = pathlib.Path(folder.name, "flexact.json").write_text(json.dumps(picks))
    >>> flexact.load_picks(model, folder.name)[1]
    Tanh()
    >>> model[1] = torch.nn.ReLU()
    >>> trained = flexact.commit(flexact.convert(model, config=flexact.FlexConfig(candidates=("silu", "gelu", "relu"))))
    >>> fresh = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> flexact.load_picks(fresh, flexact.selection(trained))[1]
    SiLU()
    """
    if not isinstance(model, nn.Module):
        raise FlexActError(f"load_picks needs a torch.nn.Module and its picks, in this order; got {model!r:.80}.")
    if sites_of(model):
        raise FlexActError("this model has FlexAct sites: it is still picking. load_picks is for a plain network.")
    given = picks.to_dict() if isinstance(picks, Selection) else picks
    file: Path | str = _GIVEN
    description: dict[str, Any] | None
    if isinstance(given, Mapping):
        description = _checked(file, dict(given))
    else:
        file, description = read_picks(path_of(given, FILE))
    if description is None:
        if any(isinstance(module, Unpicked) for module in model.modules()):
            raise FlexActError(
                f"there is no {FILE} in {picks}, and {file} names no picks, but this model's activations are not in "
                "place yet; give the folder that it was loaded from."
            )
        return model
    if not description["committed"] and file is _GIVEN:
        raise FlexActError(
            f"{file} is of a run that had not committed to its picks yet. Take the selection after the commitment, or "
            "of flexact.commit(model)."
        )
    if not description["committed"]:
        raise FlexActError(
            f"{file} is of a run that had not committed to its picks yet; go on with that run "
            "(trainer.train(resume_from_checkpoint=...)) and load what it saves at its end. If you committed the model "
            "yourself since, give load_picks a JSON file of flexact.selection(model).to_dict() from before extract."
        )
    restored = _restore_originals(model, description["original"] or _originals_of(model))
    try:
        _put_in(model, _named_here(model, description["picks"], file), file)
    except FlexActError:
        for owner, name in restored:  # or the network would run with them
            owner._modules[name] = Unpicked()
        raise
    return model


def read_picks(path: Path) -> tuple[Path, dict[str, Any] | None]:
    """The file and what it holds, checked. A config.json that has it inside does as well; None where it has not: the
    checkpoint is a plain one."""
    file = path / FILE if path.is_dir() else path
    inside = None
    if not file.is_file() and (path / "config.json").is_file():
        file, inside = path / "config.json", CONFIG_FIELD
    if not file.is_file():
        raise FlexActError(f"there is no {FILE} at {path}; give the folder that the trained network was saved to.")
    try:
        data = parsed_json(file.read_bytes())
    except ValueError as error:
        raise FlexActError(f"{file} is cut off or damaged: no valid JSON ({error}). Save the network again.") from None
    if inside is not None and isinstance(data, dict):
        if inside not in data and ("model_type" in data or "architectures" in data):
            return file, None
        if inside not in data:
            raise FlexActError(
                f"there is no {FILE} in {path}, and {file} is no configuration of transformers; give the folder "
                "that the trained network was saved to."
            )
        data = data[inside]
    data = _checked(file, data)
    if inside is None and path.is_dir():
        _check_agrees(file, data, path / "config.json")
    return file, data


def _checked(file: Path | str, data: Any) -> dict[str, Any]:
    """What flexact.json holds, or a selection in that form; refused where it is neither."""
    if isinstance(data, dict) and "flexact_selection" in data:
        data = _of_selection(file, data)
    elif isinstance(data, dict) and data and _KEY not in data and all(isinstance(one, str) for one in data.values()):
        data = described(data, {}, True)  # as `Selection.picks` has them
    checked: dict[str, Any] = data if isinstance(data, dict) else {}
    version = checked.get(_KEY)
    if isinstance(version, bool) or not isinstance(version, int):
        raise FlexActError(f"{file} has no picks of flexact: it needs {_KEY!r}, a version.")
    if version > VERSION:
        raise FlexActError(f"{file} has version {version}, and this flexact reads up to {VERSION}; update flexact.")
    for name in ("picks", "original"):
        named = checked.get(name)
        if not isinstance(named, dict) or not all(isinstance(value, str) for value in named.values()):
            raise FlexActError(f"{file}: {name!r} must have a name for each site or setting; got {named!r:.80}.")
    if not isinstance(checked.get("committed"), bool):
        raise FlexActError(f"{file}: 'committed' must be true or false; got {checked.get('committed')!r}.")
    for site, pick in checked["picks"].items():
        if pick != ORIGINAL:
            try:
                lookup(pick)
            except FlexActError as error:
                raise FlexActError(f"{file}, site {site!r}: {error}") from None
    return checked


def _check_agrees(file: Path, data: Mapping[str, Any], config: Path) -> None:
    """Refuse flexact.json where the configuration beside it, which is written with the weights, names other picks."""
    try:
        beside = parsed_json(config.read_bytes())[CONFIG_FIELD]
        agrees = all(beside[name] == data[name] for name in ("picks", "committed"))
    except (OSError, ValueError, KeyError, TypeError):
        return  # it says nothing about picks
    if not agrees:
        raise FlexActError(
            f"{file} and {config} name different picks: two networks were saved to this folder. If the weights in it "
            f"are the latter's, as model.save_pretrained leaves them, remove {FILE}; otherwise save the network again."
        )


def _of_selection(file: Path | str, data: dict[str, Any]) -> dict[str, Any]:
    """The same from what `Selection.to_dict` gave."""
    try:
        rows = Selection.from_dict(data).rows
    except FlexActError as error:
        raise FlexActError(f"{file}: {error}") from None
    if any(row.channel is not None for row in rows):
        raise FlexActError(_by_channel(file))
    picks = {row.site: row.pick for row in rows if row.pick is not None}
    if len(picks) < len(rows):
        raise FlexActError(
            f"{file} is a selection from before any pick was made. Take it after the training, or after "
            "flexact.commit(model)."
        )
    return described(picks, {}, all(row.committed for row in rows))


def built_with(model: nn.Module, settings: Mapping[str, str]) -> nn.Module:
    """What `from_pretrained` would build for a model of transformers whose configuration had these settings, without
    memory for its weights."""
    config: Any = model.config
    with torch.device("meta"):
        return type(model)(type(config).from_dict({**config.to_dict(), **settings}))


def _originals_of(model: nn.Module) -> dict[str, str]:
    """What a model's own configuration keeps of the settings before flexact."""
    kept = getattr(getattr(model, "config", None), CONFIG_FIELD, None)
    return dict(kept.get("original", {})) if isinstance(kept, dict) else {}


def _restore_originals(model: nn.Module, settings: Mapping[str, str]) -> list[tuple[nn.Module, str]]:
    """Put what the network's own configuration would have built in the place of `Unpicked`; returns where."""
    paths = [path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, Unpicked)]
    if not paths:
        return []
    unknown = f"what the network's activation was before flexact is not known: 'original' is {settings!r}"
    todo = "Load the checkpoint that the trained network was saved to, with its own class of transformers."
    try:
        built = built_with(model, settings)
        originals = [built.get_submodule(path) for path in paths]
    except Exception as error:  # transformers raises what its many classes raise
        raise FlexActError(f"{unknown} ({type(error).__name__}: {error!s:.200}). {todo}") from None
    if any(isinstance(original, Unpicked) or original.state_dict() for original in originals):
        raise FlexActError(f"{unknown}. {todo}")
    places = [(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths]
    for (owner, name), original in zip(places, originals, strict=True):
        owner._modules[name] = original
    return places


def _named_here(model: nn.Module, picks: Mapping[str, str], file: Path | str) -> dict[str, str]:
    """The picks by the sites' names in this model, which may be the trained one without its head, or with another."""
    here = {name for found in find(model, per_call=False).found for name in found.names}
    prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
    ways = [picks]
    if len(prefix) > 1:
        ways.append({name.removeprefix(prefix): pick for name, pick in picks.items()})
        ways.append({f"{prefix}{name}": pick for name, pick in picks.items()})
    named = max(ways, key=lambda way: len(way.keys() & here))
    missing = [name for name in named if name not in here]
    absent = [name for name in missing if not _has_part(model, name, prefix)]
    by_channel = [name for name in missing if name.rpartition(":")[0] in here]
    if by_channel:
        raise FlexActError(_by_channel(file))
    if len(absent) < len(missing) or len(missing) == len(named) > 0:
        wrong = next((name for name in missing if name not in absent), missing[0])
        how = "as before flexact.convert" if file is _GIVEN else "from the checkpoint that the file lies beside"
        raise FlexActError(
            f"{file} is of another network: this {type(model).__name__} has no activation {wrong!r}. Build the model "
            f"{how}, with the class that was trained, or its encoder alone."
        )
    if absent:
        warnings.warn(
            f"{file}: this {type(model).__name__} has no {', '.join(absent[:5])}; the picks for it are left out.",
            stacklevel=3,
        )
    return {name: pick for name, pick in named.items() if name in here}


def _has_part(model: nn.Module, name: str, prefix: str) -> bool:
    """Whether a model has the part that a site belongs to: a head, or a child of the network under the head."""
    base = getattr(model, prefix[:-1], None) if name.startswith(prefix) else None
    owner, rest = (base, name.removeprefix(prefix)) if isinstance(base, nn.Module) else (model, name)
    return getattr(owner, rest.partition(".")[0], None) is not None


def _by_channel(file: Path | str) -> str:
    return (
        f"{file} has picks by channel, and load_picks puts one function in each site; save the extracted network as a "
        "whole instead."
    )


def _put_in(model: nn.Module, picks: Mapping[str, str], file: Path | str) -> None:
    there = {found.name: found.original for found in find(model, per_call=False).found}
    apart = [name for name in picks if name not in there]
    if apart:
        raise FlexActError(
            f"{file} has a pick for {apart[0]!r} alone, which is one of several places of one activation: it was "
            "converted with per_call=True, and load_picks puts one function in all of them. Save the extracted network "
            "as a whole instead."
        )
    wanted = {name: pick for name, pick in picks.items() if pick != ORIGINAL and key_of(there[name]) != pick}
    if not wanted:
        return
    candidates = (*dict.fromkeys(wanted.values()), ORIGINAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what convert left alone is none of these sites
        convert(model, list(wanted), FlexConfig(candidates=candidates, init="original"))
    for site in sites_of(model):
        chosen = torch.zeros(site.rows, site.k, dtype=torch.bool)
        chosen[:, site.candidates.index(wanted[site.name])] = True
        site.drop(~chosen, step=0)
    extract(model, inplace=True)
