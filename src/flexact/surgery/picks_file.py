"""`load_picks`: reads the picks of a trained network, from a file or memory, and puts them into a newly built one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexact.candidates.recognition import key_of
from flexact.candidates.registry import ALIASES, ORIGINAL, lookup
from flexact.errors import FlexActError
from flexact.io.json_input import parsed_json, path_of
from flexact.observe.selection import VERSION as SELECTION_VERSION
from flexact.observe.selection import Selection
from flexact.routing.sites import sites_of
from flexact.surgery.choosing import check_convertible
from flexact.surgery.finding import Findings, Found
from flexact.surgery.swapping import swap_in, swap_out, take_over_hooks

CONFIG_FIELD = "flexact"
"""The field of a transformers configuration that contains picks which its own settings cannot express."""
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
    """Return the content of `CONFIG_FIELD`, in plain JSON types.

    picks: the pick of each site. original: the activation settings of the network's configuration before conversion.
    """
    return {_KEY: VERSION, "committed": committed, "picks": dict(picks), "original": dict(original)}


def load_picks(model: nn.Module, picks: str | Path | Selection | Mapping[str, Any]) -> nn.Module:
    """Replace the activations of a newly built network by the picks of a trained one, and return the model.

    picks: the `selection` of the trained network, its `to_dict()` or `picks`, or a JSON file with one of those; or the
    folder of a checkpoint of transformers. If the config.json in that folder needs no flexact, because its own settings
    express the picks, the model is returned unchanged.

    >>> import torch, flexact
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> trained = flexact.commit(flexact.convert(model, config=flexact.FlexConfig(candidates=("silu", "gelu", "relu"))))
    >>> fresh = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> flexact.load_picks(fresh, flexact.selection(trained))[1]
    SiLU()
    >>> flexact.load_picks(fresh, {"1": "tanh"})[1]
    Tanh()
    """
    if not isinstance(model, nn.Module):
        raise FlexActError(f"load_picks needs a torch.nn.Module and its picks, in this order; got {model!r:.80}.")
    if sites_of(model):
        raise FlexActError("this model has FlexAct sites: it is still picking. Pass a plain network to load_picks.")
    given = picks.to_dict() if isinstance(picks, Selection) else picks
    if not isinstance(given, Mapping | str | os.PathLike):
        raise FlexActError(
            f"load_picks needs a selection, its dictionary, or the path of a file with it; got {given!r:.80}. Pass "
            "flexact.selection(model) of the trained network."
        )
    source, data = (_GIVEN, dict(given)) if isinstance(given, Mapping) else _read(path_of(given, "picks"))
    description = _description(source, data)
    if description is None:
        if any(isinstance(module, Unpicked) for module in model.modules()):
            raise FlexActError(
                f"{source} has no picks, but this model's activations are not in place yet. Pass the folder that it "
                "was loaded from."
            )
        return model
    if not description["committed"]:
        raise FlexActError(
            f"{source} is from a run that had not committed to its picks yet. Resume that run "
            "(trainer.train(resume_from_checkpoint=...)) and load its final checkpoint, or pass "
            "flexact.selection(model).to_dict(), taken after flexact.commit(model)."
        )
    restored = _restore_originals(model, description["original"] or _originals_of(model))
    try:
        findings = Findings(model, per_call=False)
        return _with_picks(model, findings, _named_here(model, findings.found, description["picks"], source), source)
    except FlexActError:
        for owner, name in restored:  # otherwise the network would run with its original activations
            owner._modules[name] = Unpicked()
        raise


def _read(path: Path) -> tuple[str, Any]:
    """Return the path of the file with the picks, and its content. In a folder, that file is config.json."""
    try:
        file = path / "config.json" if path.is_dir() else path
        text = file.read_bytes() if file.is_file() else None
    except OSError as error:
        raise FlexActError(
            f"{str(path)[:80]!r} cannot be read ({error.strerror}). Pass the path of a file, or picks in memory as a "
            "dictionary, such as json.loads(text)."
        ) from None
    if text is None:
        raise FlexActError(
            f"there is no file {file}. Pass a JSON file of flexact.selection(model).to_dict(), or the folder of a "
            "checkpoint of transformers."
        )
    try:
        return str(file), parsed_json(text)
    except ValueError as error:
        raise FlexActError(f"{file} is truncated or damaged: invalid JSON ({error}). Save the network again.") from None


def _description(source: str, data: Any) -> dict[str, Any] | None:
    """Return the picks in the form of `described`; None for a transformers configuration that has none."""
    found: dict[str, Any] = data if isinstance(data, dict) else {}
    if "model_type" in found or "architectures" in found:
        if CONFIG_FIELD not in found:
            return None
        found = found[CONFIG_FIELD] if isinstance(found[CONFIG_FIELD], dict) else {}
    elif "flexact_selection" in found:
        found = _of_selection(source, found)
    elif found and all(isinstance(pick, str) for pick in found.values()):
        found = described(found, {})  # the form of `Selection.picks`
    named = [found.get("picks"), found.get("original")]
    are_names = all(isinstance(one, dict) and all(isinstance(name, str) for name in one.values()) for one in named)
    if found.get(_KEY) != VERSION or not isinstance(found.get("committed"), bool) or not are_names:
        raise FlexActError(
            f"{source} has no picks that this version of flexact can read; got {data!r:.80}. It needs {_KEY!r}, which "
            f"is {VERSION}, 'committed', which is true or false, and 'picks' and 'original', which map each site or "
            "setting to a name."
        )
    for site, pick in found["picks"].items():
        if pick != ORIGINAL:
            try:
                lookup(pick)
            except FlexActError as error:
                raise FlexActError(f"{source}, site {site!r}: {error}") from None
    return found


def _of_selection(source: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the picks of a `Selection.to_dict`."""
    version = data["flexact_selection"]
    rows: Any = data.get("rows")
    if version != SELECTION_VERSION:
        raise FlexActError(
            f"{source} has version {version!r:.80}, and this flexact reads selections of version {SELECTION_VERSION}. "
            "Use the flexact that wrote it, or write it again with flexact.selection(model).to_dict()."
        )
    try:
        by_channel = any(row["channel"] is not None for row in rows)
        picks = {row["site"]: row["pick"] for row in rows}
        committed = all(row["committed"] for row in rows)
    except (KeyError, TypeError):
        raise FlexActError(
            f"{source} is not a selection: 'rows' must be a list of sites with their picks; got {rows!r:.80}."
        ) from None
    if by_channel:
        raise FlexActError(_by_channel(source))
    if not rows or None in picks.values():
        raise FlexActError(
            f"{source} has no picks, because it was taken before any pick was made. Take the selection after training, "
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
    try:
        built = built_with(model, settings)
        originals = [built.get_submodule(path) for path in paths]
        if any(isinstance(original, Unpicked) or original.state_dict() for original in originals):
            raise ValueError("these settings do not determine them")
    except Exception as error:  # transformers raises errors of many types
        raise FlexActError(
            f"the original activations of the network are unknown: 'original' is {settings!r} ({type(error).__name__}: "
            f"{error!s:.200}). Load the checkpoint of the trained network with its own class of transformers."
        ) from None
    slots = [(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths]
    for (owner, name), original in zip(slots, originals, strict=True):
        owner._modules[name] = original
    return slots


def _named_here(model: nn.Module, found: list[Found], picks: Mapping[str, str], source: str) -> dict[str, str]:
    """Return the picks by the names of the sites in this model, whose head may be missing or different."""
    here = {name for one in found for name in one.names}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    ways = [
        dict(picks),
        {name.removeprefix(prefix): pick for name, pick in picks.items()},
        {f"{prefix}{name}": pick for name, pick in picks.items()},
    ]
    named = max(ways, key=lambda way: len(way.keys() & here))
    missing = [name for name in named if name not in here]
    if any(name.rpartition(":")[0] in here for name in missing):
        raise FlexActError(_by_channel(source))
    wrong = [name for name in missing if len(missing) == len(named) or _has_part(model, name, prefix)]
    if wrong:
        raise FlexActError(
            f"{source} belongs to another network: this {type(model).__name__} has no activation {wrong[0]!r}. Build "
            "the network with the class that was trained, or its encoder alone."
        )
    if missing:
        warnings.warn(
            f"{source}: this {type(model).__name__} has no {', '.join(missing[:5])}; these picks are ignored.",
            stacklevel=3,
        )
    return {name: ALIASES.get(pick, pick) for name, pick in named.items() if name in here}


def _has_part(model: nn.Module, name: str, prefix: str) -> bool:
    """Return whether a model has the part that a site belongs to: a head, or a child of the base network."""
    base = getattr(model, prefix[:-1], None) if name.startswith(prefix) else None
    owner, rest = (base, name.removeprefix(prefix)) if isinstance(base, nn.Module) else (model, name)
    return getattr(owner, rest.partition(".")[0], None) is not None


def _by_channel(source: str) -> str:
    return (
        f"{source} has picks per channel, but load_picks supports one function per site. Save the extracted network "
        "as a whole instead."
    )


def _with_picks(model: nn.Module, findings: Findings, picks: Mapping[str, str], source: str) -> nn.Module:
    """Replace the activations whose function is not the picked one, and return the model."""
    there = {one.name: one for one in findings.found}
    apart = [name for name in picks if name not in there]
    if apart:
        raise FlexActError(
            f"{source} has a separate pick for {apart[0]!r}, which is one of several names of one activation: the "
            "model was converted with per_call=True, which load_picks does not support. Save the extracted network as "
            "a whole instead."
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
