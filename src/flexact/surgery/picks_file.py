"""flexact.json: the picks of an extracted network, for checkpoints whose format cannot record them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexact.candidates.recognition import key_of
from flexact.candidates.registry import ALIASES, ORIGINAL, lookup
from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.io.json_input import parsed_json, path_of
from flexact.observe.selection import VERSION as SELECTION_VERSION
from flexact.observe.selection import Selection
from flexact.routing.sites import sites_of
from flexact.surgery.choosing import check_convertible
from flexact.surgery.finding import Findings, Found
from flexact.surgery.swapping import swap_in, swap_out, take_over_hooks

FILE = "flexact.json"
CONFIG_FIELD = "flexact"
"""The field of a transformers configuration with the same content, which `save_pretrained` writes."""
VERSION = 1
_KEY = "flexact_picks"
_GIVEN = "the selection"
"""The name, in error messages, of picks that were not read from a file."""


class Unpicked(nn.Module):
    """A placeholder for an activation until `load_picks` replaces it; its forward raises an error."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        raise FlexActError(
            "this network was trained with flexact and its activations are not in place yet. Call "
            "flexact.load_picks(model, path), where path is the folder that it was loaded from."
        )


def described(picks: Mapping[str, str], original: Mapping[str, str], committed: bool = True) -> dict[str, Any]:
    """Return the content of flexact.json, in plain JSON types.

    picks: the pick of each site. original: the activation settings of the network's configuration before conversion.
    """
    return {_KEY: VERSION, "committed": committed, "picks": dict(picks), "original": dict(original)}


def write_picks(folder: Path, description: Mapping[str, Any]) -> None:
    """Write flexact.json into a folder."""
    write_whole(folder / FILE, json.dumps(description, indent=2) + "\n")


def load_picks(model: nn.Module, picks: str | Path | Selection | Mapping[str, Any]) -> nn.Module:
    """Replace the activations of a newly built network by the picks of a trained one, and return the model.

    picks: the `selection` of the trained network, its `to_dict()`, or a JSON file with that; or flexact.json, or the
    folder of a checkpoint that contains it. The folder of a plain checkpoint, whose config.json already names the
    picks, leaves the model unchanged.

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
        raise FlexActError("this model has FlexAct sites: it is still picking. Pass a plain network to load_picks.")
    given = picks.to_dict() if isinstance(picks, Selection) else picks
    file: Path | str = _GIVEN
    if isinstance(given, Mapping):
        description: dict[str, Any] | None = _checked(file, dict(given))
    else:
        file, description = read_picks(path_of(given, FILE))
    if description is None:
        if any(isinstance(module, Unpicked) for module in model.modules()):
            raise FlexActError(
                f"there is no {FILE} in {picks}, and {file} names no picks, but this model's activations are not in "
                "place yet. Pass the folder that it was loaded from."
            )
        return model
    if not description["committed"]:
        remedy = (
            "Resume that run (trainer.train(resume_from_checkpoint=...)) and load its final checkpoint. If you have "
            "committed the model yourself since, pass a JSON file of flexact.selection(model).to_dict() from before "
            "extract."
        )
        if file is _GIVEN:
            remedy = "Take the selection after the commitment, or after flexact.commit(model)."
        raise FlexActError(f"{file} is from a run that had not committed to its picks yet. {remedy}")
    restored = _restore_originals(model, description["original"] or _originals_of(model))
    try:
        findings = Findings(model, per_call=False)
        return _with_picks(model, findings, _named_here(model, findings.found, description["picks"], file), file)
    except FlexActError:
        for owner, name in restored:  # otherwise the network would run with its original activations
            owner._modules[name] = Unpicked()
        raise


def read_picks(path: Path) -> tuple[Path, dict[str, Any] | None]:
    """Return the path of the picks file and its checked content. A config.json with that content is accepted as well;
    the content is None if it has no picks, that is, if the checkpoint is a plain one."""
    try:
        file = path / FILE if path.is_dir() else path
    except OSError as error:
        raise FlexActError(
            f"{str(path)[:80]!r} is not a path ({error.strerror}). Pass the path of {FILE}, or picks in memory as a "
            "dictionary, such as json.loads(text)."
        ) from None
    inside = None
    if not file.is_file() and (path / "config.json").is_file():
        file, inside = path / "config.json", CONFIG_FIELD
    if not file.is_file():
        missing = f"no {FILE} in {path}" if path.is_dir() else f"no file {path}"
        raise FlexActError(
            f"there is {missing}. Pass the folder that the trained network was saved to, its {FILE}, or a JSON file of "
            "flexact.selection(model).to_dict()."
        )
    try:
        data = parsed_json(file.read_bytes())
    except ValueError as error:
        raise FlexActError(f"{file} is truncated or damaged: invalid JSON ({error}). Save the network again.") from None
    if inside is not None and isinstance(data, dict):
        if inside not in data and ("model_type" in data or "architectures" in data):
            return file, None
        if inside not in data:
            raise FlexActError(
                f"there is no {FILE} in {path}, and {file} is not a configuration of transformers. Pass the folder "
                "that the trained network was saved to."
            )
        data = data[inside]
    data = _checked(file, data)
    if inside is None and path.is_dir():
        _check_agrees(file, data, path / "config.json")
    return file, data


def _checked(file: Path | str, data: Any) -> dict[str, Any]:
    """Return the content of flexact.json, or of a selection in the same form. Raise if it is neither."""
    if isinstance(data, dict) and "flexact_selection" in data:
        data = _of_selection(file, data)
    elif isinstance(data, dict) and data and _KEY not in data and all(isinstance(one, str) for one in data.values()):
        data = described(data, {}, True)  # the form of `Selection.picks`
    checked: dict[str, Any] = data if isinstance(data, dict) else {}
    version = checked.get(_KEY)
    if isinstance(version, bool) or not isinstance(version, int):
        raise FlexActError(f"{file} has no picks of flexact: it needs {_KEY!r} with a version number.")
    if version > VERSION:
        raise FlexActError(f"{file} has version {version}, but this flexact reads up to {VERSION}; update flexact.")
    for name in ("picks", "original"):
        named = checked.get(name)
        if not isinstance(named, dict) or not all(isinstance(value, str) for value in named.values()):
            raise FlexActError(f"{file}: {name!r} must map each site or setting to a name; got {named!r:.80}.")
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
    """Raise if flexact.json and the configuration in the same folder, written with the weights, name other picks."""
    try:
        beside = parsed_json(config.read_bytes())[CONFIG_FIELD]
        agrees = all(beside[name] == data[name] for name in ("picks", "committed"))
    except (OSError, ValueError, KeyError, TypeError):
        return  # the configuration has no picks
    if not agrees:
        raise FlexActError(
            f"{file} and {config} name different picks: two networks were saved to this folder. If the weights belong "
            f"to {config.name}, as after model.save_pretrained, remove {FILE}; otherwise save the network again."
        )


def _of_selection(file: Path | str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the content of flexact.json for a `Selection.to_dict`."""
    version = data["flexact_selection"]
    rows: Any = data.get("rows")
    if version != SELECTION_VERSION:
        raise FlexActError(
            f"{file} has version {version!r:.80}, and this flexact reads selections of version {SELECTION_VERSION}. "
            "Use the flexact that wrote it, or write it again with flexact.selection(model).to_dict()."
        )
    try:
        by_channel = any(row["channel"] is not None for row in rows)
        picks = {row["site"]: row["pick"] for row in rows}
        committed = all(row["committed"] for row in rows)
    except (KeyError, TypeError):
        raise FlexActError(
            f"{file} is not a selection: 'rows' must be a list of sites with their picks; got {rows!r:.80}."
        ) from None
    if by_channel:
        raise FlexActError(_by_channel(file))
    if None in picks.values():
        raise FlexActError(
            f"{file} has no picks, because it was taken before any pick was made. Take the selection after training, "
            "or after flexact.commit(model)."
        )
    return described(picks, {}, committed)


def built_with(model: nn.Module, settings: Mapping[str, str]) -> nn.Module:
    """Return the transformers model that `from_pretrained` would build with these settings, on the meta device."""
    config: Any = model.config
    with torch.device("meta"):
        return type(model)(type(config).from_dict({**config.to_dict(), **settings}))


def _originals_of(model: nn.Module) -> dict[str, str]:
    """Return the activation settings before conversion, from a model's configuration."""
    kept = getattr(getattr(model, "config", None), CONFIG_FIELD, None)
    return dict(kept.get("original", {})) if isinstance(kept, dict) else {}


def _restore_originals(model: nn.Module, settings: Mapping[str, str]) -> list[tuple[nn.Module, str]]:
    """Replace every `Unpicked` by the original activation, and return the owners and names of those replaced."""
    paths = [path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, Unpicked)]
    if not paths:
        return []
    unknown = f"the original activation of the network is unknown: 'original' is {settings!r}"
    remedy = "Load the checkpoint of the trained network with its own class of transformers."
    try:
        built = built_with(model, settings)
        originals = [built.get_submodule(path) for path in paths]
    except Exception as error:  # transformers raises errors of many types
        raise FlexActError(f"{unknown} ({type(error).__name__}: {error!s:.200}). {remedy}") from None
    if any(isinstance(original, Unpicked) or original.state_dict() for original in originals):
        raise FlexActError(f"{unknown}. {remedy}")
    slots = [(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths]
    for (owner, name), original in zip(slots, originals, strict=True):
        owner._modules[name] = original
    return slots


def _named_here(model: nn.Module, found: list[Found], picks: Mapping[str, str], file: Path | str) -> dict[str, str]:
    """Return the picks by the names of the sites in this model, whose head may be missing or different."""
    here = {name for one in found for name in one.names}
    prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
    ways = [picks]
    if len(prefix) > 1:
        ways.append({name.removeprefix(prefix): pick for name, pick in picks.items()})
        ways.append({f"{prefix}{name}": pick for name, pick in picks.items()})
    named = max(ways, key=lambda way: len(way.keys() & here))
    missing = [name for name in named if name not in here]
    absent = [name for name in missing if not _has_part(model, name, prefix)]
    if any(name.rpartition(":")[0] in here for name in missing):
        raise FlexActError(_by_channel(file))
    if len(absent) < len(missing) or len(missing) == len(named) > 0:
        wrong = next((name for name in missing if name not in absent), missing[0])
        how = "as before flexact.convert" if file is _GIVEN else "from the checkpoint beside that file"
        raise FlexActError(
            f"{file} belongs to another network: this {type(model).__name__} has no activation {wrong!r}. Build the "
            f"model {how}, with the class that was trained, or its encoder alone."
        )
    if absent:
        warnings.warn(
            f"{file}: this {type(model).__name__} has no {', '.join(absent[:5])}; these picks are ignored.",
            stacklevel=3,
        )
    return {name: ALIASES.get(pick, pick) for name, pick in named.items() if name in here}


def _has_part(model: nn.Module, name: str, prefix: str) -> bool:
    """Return whether a model has the part that a site belongs to: a head, or a child of the base network."""
    base = getattr(model, prefix[:-1], None) if name.startswith(prefix) else None
    owner, rest = (base, name.removeprefix(prefix)) if isinstance(base, nn.Module) else (model, name)
    return getattr(owner, rest.partition(".")[0], None) is not None


def _by_channel(file: Path | str) -> str:
    return (
        f"{file} has picks per channel, but load_picks supports one function per site. Save the extracted network as a "
        "whole instead."
    )


def _with_picks(model: nn.Module, findings: Findings, picks: Mapping[str, str], file: Path | str) -> nn.Module:
    """Replace the activations whose function is not the picked one, and return the model."""
    there = {one.name: one for one in findings.found}
    apart = [name for name in picks if name not in there]
    if apart:
        raise FlexActError(
            f"{file} has a separate pick for {apart[0]!r}, which is one of several names of one activation: the model "
            "was converted with per_call=True, which load_picks does not support. Save the extracted network as a "
            "whole instead."
        )
    wanted = {there[name]: pick for name, pick in picks.items() if pick != ORIGINAL}
    wanted = {one: pick for one, pick in wanted.items() if key_of(one.original) != pick}
    if not wanted:
        return model
    check_convertible(model, "load_picks")
    modules = [lookup(pick).module() for pick in wanted.values()]
    for one, module in zip(wanted, modules, strict=True):
        take_over_hooks(one.original, module)
    for owner, cls in findings.rewritten(list(wanted)).items():
        object.__setattr__(owner, "__class__", cls)
    return swap_out(swap_in(model, list(wanted), modules))
