"""The figures to reach on an H200, each from the rows that were measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flexact.studies.overhead.networks import BASELINE
from flexact.studies.overhead.options import MODES, NETWORKS, WAYS
from flexact.studies.overhead.rows import OperationRow, OverheadRow, SweepRow

LIBRARYS = tuple(way for way in WAYS if way != "plain")
"""The ways that are the library's own."""


@dataclass(frozen=True)
class Goal:
    """One figure: what was found, and whether it is within the limit; a value of None was not measured."""

    figure: str
    network: str
    limit: float
    value: float | None
    found_in: str
    """Way and mode of the value."""

    @property
    def reached(self) -> bool | None:
        return None if self.value is None else round(self.value, 3) <= self.limit


def goals(table: Sequence[OverheadRow], operation: Sequence[OperationRow], ks: Sequence[SweepRow]) -> list[Goal]:
    """All figures. Those of a step are of one way in each network and mode: the library's fastest at all sites."""
    fastest = fastest_ways(table)
    found = []
    networks = [network for network in NETWORKS if any(row.network == network for row in table)]
    for network in networks:
        rows = [row for row in table if row.network == network]
        own = [row for row in rows if row.way == fastest.get((network, row.mode))]
        every = [row for row in own if row.placement == "all"]
        last = [row for row in own if row.placement == "penultimate"]
        found.append(
            _least(
                "training step, CUDA graph, to the compiled ReLU in one",
                network,
                1.05,
                [(row, row.train_ratio_to_compiled_graph) for row in every],
            )
        )
        found.append(_worst("training step, eager", network, 1.15, _in_mode(every, "eager"), _training))
        for mode in MODES:
            found.append(_worst(f"penultimate only, {mode}", network, 1.01, _in_mode(last, mode), _training))
        for mode in MODES:
            if measured := _in_mode(every, mode):
                found.append(_worst(f"peak memory in training, {mode}", network, 1.02, measured, _memory))
        extracted = [row for row in rows if row.placement != BASELINE]
        found.append(_worst("inference after extraction, any mode", network, 1.0, extracted, _inference))
    found.append(_operation(operation))
    found.append(_fourteen(ks, fastest))
    return found


def fastest_ways(table: Sequence[OverheadRow]) -> dict[tuple[str, str], str]:
    """The library's fastest way by network and mode: the least median ratio to ReLU at all sites.

    Not the fewest milliseconds: of an eager step they are the host's, and vary more than the ways differ; a ratio is
    taken within a round.
    """
    routed = [row for row in table if row.placement == "all" and row.way in LIBRARYS and row.train_ratio is not None]
    routed.sort(key=lambda row: row.train_ratio or 0.0, reverse=True)
    return {(row.network, row.mode): row.way for row in routed}  # the last one of each stays


def _least(figure: str, network: str, limit: float, pairs: Sequence[tuple[OverheadRow, float | None]]) -> Goal:
    known = [(value, row) for row, value in pairs if value is not None]
    if not known:
        return Goal(figure, network, limit, None, "")
    value, row = min(known, key=lambda pair: pair[0])
    return Goal(figure, network, limit, value, f"{row.way}, {row.mode}")


def _worst(
    figure: str,
    network: str,
    limit: float,
    rows: Sequence[OverheadRow],
    value_of: Callable[[OverheadRow], float | None],
) -> Goal:
    known = [(value, row) for row in rows if (value := value_of(row)) is not None]
    if not known:
        return Goal(figure, network, limit, None, "")
    value, row = max(known, key=lambda pair: pair[0])
    return Goal(figure, network, limit, value, f"{row.way}, {row.mode}")


def _in_mode(rows: Sequence[OverheadRow], mode: str) -> list[OverheadRow]:
    return [row for row in rows if row.mode == mode]


def _training(row: OverheadRow) -> float | None:
    return row.train_ratio


def _memory(row: OverheadRow) -> float | None:
    return row.memory_ratio


def _inference(row: OverheadRow) -> float | None:
    """1 where the same modules take the same time, within the spread and half a percent; otherwise the ratio."""
    if row.inference_ratio is None or row.inference_ratio_p10 is None:
        return None
    return 1.0 if row.same_modules and row.inference_ratio_p10 <= 1.005 else row.inference_ratio


def _operation(rows: Sequence[OperationRow]) -> Goal:
    both = [row for row in rows if row.operation in LIBRARYS and row.direction == "both" and row.ratio is not None]
    modes = [row for row in both if row.mode == "graph"] or both
    figure = "the operation alone, forward + backward, in a graph, to ReLU"
    if not modes:
        return Goal(figure, "", 1.15, None, "")
    best = min(modes, key=lambda row: row.ratio or 0.0)
    return Goal(figure, "", 1.15, best.ratio, f"{best.operation}, {best.mode}")


def _fourteen(rows: Sequence[SweepRow], fastest: Mapping[tuple[str, str], str]) -> Goal:
    """Of the way that the table has as the fastest; where it lacks the mode, of the sweep's own."""
    steps = [row for row in rows if row.what == "step" and row.candidates == 14 and row.ratio_to_five is not None]
    figure = "14 candidates to five, training step"
    if not steps:
        return Goal(figure, "", 1.10, None, "")
    chosen = [row for row in steps if row.way == fastest.get((row.network, row.mode))]
    best = min(chosen or steps, key=lambda row: row.ratio or 0.0)
    return Goal(figure, best.network, 1.10, best.ratio_to_five, f"{best.way}, {best.mode}")
