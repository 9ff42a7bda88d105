"""Prepares a comparison: builds and checks the network, finds what identifies it, and chooses its engine."""

from __future__ import annotations

import hashlib
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flexact.config import FlexConfig
from flexact.errors import FlexActError, missing_extra
from flexact.io.value_checks import check_known
from flexact.routing.random_state import same_random_state
from flexact.routing.sites import sites_of
from flexact.studies.compare.functions import Build, Functions, name_of
from flexact.studies.compare.protocol import ALONE, Protocol
from flexact.studies.grid.cell_task import CellTask, Ended, Engine
from flexact.studies.grid.engines import devices
from flexact.studies.grid.engines import engine as grid_engine
from flexact.surgery.convert import convert


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, numpy and torch, and restore their states at the end."""
    import numpy  # scipy, which the comparison needs, depends on it

    with same_random_state():
        random.seed(seed)
        numpy.random.seed(seed % 2**32)  # noqa: NPY002  # the generator of users' code
        torch.manual_seed(seed)
        yield


def network(build: Build, seed: int) -> nn.Module:
    """The network of a seed, which is the same for every method."""
    with seeded(seed):
        model = build()
    if not isinstance(model, nn.Module):
        raise FlexActError(f"build() must return a torch.nn.Module; it returned {model!r:.80}.")
    return model


def digest(model: nn.Module) -> str:
    """A digest of a network's architecture: its modules, and the shapes of its parameters and buffers."""
    lines = [re.sub(r" at 0x[0-9a-f]+", "", repr(model))]
    for name, one in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        lines.append(f"{name}: {one.dtype} {'uninitialized' if is_lazy(one) else tuple(one.shape)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def checked_network(build: Build, seeds: tuple[int, int]) -> nn.Module:
    """A network of the first seed. Raises if `build` makes different architectures, and warns if it makes different
    weights from one seed."""
    first, again, other = (network(build, seed) for seed in (seeds[0], *seeds))
    if first is again:
        raise FlexActError("build() returned the same network twice; make a new one in each call.")
    if len({digest(one) for one in (first, again, other)}) > 1:
        raise FlexActError(
            "build() made two different architectures. A comparison needs the same network in every run: make its "
            "random choices once, outside build()."
        )
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    if not all(is_lazy(a) or a.is_meta or torch.equal(a, b) for a, b in pairs):
        warnings.warn(
            "build() made different weights after the same seed of torch, numpy and random, so runs of one seed do not "
            "start from the same network, and the paired differences contain that noise. Seed every other generator in "
            "build().",
            stacklevel=3,
        )
    return first


def prepared(functions: Functions, config: FlexConfig, seeds: Sequence[int]) -> tuple[Protocol, str | None]:
    """Build the network and convert it once; raise if that is not possible.

    Returns the settings that identify the comparison, and the candidate that all sites of the original network have:
    None if they differ, or if it is not a candidate.
    """
    try:
        import scipy.stats  # noqa: F401  # fail before the training rather than after it
    except ImportError:
        raise missing_extra("scipy", "studies") from None
    model = checked_network(functions.build, (seeds[0], seeds[-1] if len(seeds) > 1 else seeds[0] + 1))
    architecture, where = digest(model), functions.where
    sites = sites_of(convert(model, where, config))
    originals = {site.candidates[site.original_index] if site.original_index >= 0 else None for site in sites}
    protocol = Protocol(
        build=name_of(functions.build),
        train=name_of(functions.train),
        architecture=architecture,
        config=config.to_dict(),
        where=where if isinstance(where, str) else name_of(where) if callable(where) else sorted(where),
        sites=[site.name for site in sites],
    )
    return protocol, originals.pop() if len(originals) == 1 else None


def engine_for(functions: Functions, name: str, device: str | None, jobs: int | None, address: str | None) -> Engine:
    """An engine by its name. Raises if the functions cannot be sent to its processes."""
    check_known("engine", name, ("local", "inline", "ray"))
    if name == "inline":
        return grid_engine("streams", device, jobs=1)
    _ = functions.packed  # raises if the functions cannot be sent
    own = grid_engine(name, device, jobs, address)
    one_at_a_time = name == "local" and (jobs or len(devices(device))) == 1
    return own if one_at_a_time else _picks_first(own)


def _picks_first(engine: Engine) -> Engine:
    """The engine for parallel runs: runs that need the picks of other runs start after all others have ended.
    If one runs at a time, the order of the cells is enough."""

    def run(tasks: Sequence[CellTask], ended: Ended, has_to_stop: Callable[[], bool]) -> None:
        for alone in (False, True):
            part = [task for task in tasks if (task.cell.method == ALONE) is alone]
            if part and not has_to_stop():
                engine(part, ended, has_to_stop)

    return run
