"""The figures to reach on an H200, each from the rows that were measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """All figures. A step's time and memory are those of the fastest way of the library in each mode."""
    found = []
    networks = [network for network in NETWORKS if any(row.network == network for row in table)]
    for network in networks:
        rows = [row for row in table if row.network == network]
        every = [row for row in rows if row.placement == "all" and row.way in LIBRARYS]
        found.append(
            _least(
                "training step, CUDA graph, to the compiled ReLU in one",
                network,
                1.05,
                [(row, row.train_ratio_to_compiled_graph) for row in every],
            )
        )
        found.append(
            _least(
                "training step, eager", network, 1.15, [(row, row.train_ratio) for row in every if row.mode == "eager"]
            )
        )
        for mode in MODES:
            fastest = _fastest(rows, "penultimate", mode)
            found.append(_worst(f"penultimate only, {mode}", network, 1.01, [fastest], lambda row: row.train_ratio))
        for mode in MODES:
            fastest = _fastest(rows, "all", mode)
            if fastest is not None:
                found.append(_worst(f"peak memory in training, {mode}", network, 1.02, [fastest], _memory))
        extracted = [row for row in rows if row.placement != BASELINE]
        found.append(_worst("inference after extraction, any mode", network, 1.0, extracted, _inference))
    found.append(_operation(operation))
    found.append(_fourteen(ks))
    return found


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
    rows: Sequence[OverheadRow | None],
    value_of: Callable[[OverheadRow], float | None],
) -> Goal:
    known = [(value, row) for row in rows if row is not None and (value := value_of(row)) is not None]
    if not known:
        return Goal(figure, network, limit, None, "")
    value, row = max(known, key=lambda pair: pair[0])
    return Goal(figure, network, limit, value, f"{row.way}, {row.mode}")


def _fastest(rows: Sequence[OverheadRow], placement: str, mode: str) -> OverheadRow | None:
    """The library's fastest way in a mode."""
    of_mode = [row for row in rows if (row.placement, row.mode) == (placement, mode) and row.way in LIBRARYS]
    return min((row for row in of_mode if row.train_ms is not None), key=lambda row: row.train_ms or 0.0, default=None)


def _memory(row: OverheadRow) -> float | None:
    return row.memory_ratio


def _inference(row: OverheadRow) -> float | None:
    """1 where the same modules take the same time within the spread; otherwise the ratio."""
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


def _fourteen(rows: Sequence[SweepRow]) -> Goal:
    steps = [row for row in rows if row.what == "step" and row.candidates == 14 and row.ratio_to_five is not None]
    figure = "14 candidates to five, training step"
    if not steps:
        return Goal(figure, "", 1.10, None, "")
    best = min(steps, key=lambda row: row.ms or 0.0)
    return Goal(figure, best.network, 1.10, best.ratio_to_five, f"{best.way}, {best.mode}")
