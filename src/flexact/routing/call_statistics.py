"""The statistics that the calls of one step leave behind, kept until the policy asks.

Keeping costs nothing: a call's tensor goes on a list. Averaging costs a constant number of operations, whatever the
depth: the list becomes one table, from which each row of the routing takes the calls that were its own.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor
from torch.nn import functional as F

from flexact.errors import FlexActError

Call = tuple[int, int]
"""The first row of a call's site, and how many it has."""


def rank_count() -> int:
    """How many processes train together; 1 where torch.distributed is not in use."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()


def own_rank() -> int:
    """Which of the processes this is."""
    return torch.distributed.get_rank() if rank_count() > 1 else 0


def mean_over_ranks(values: Tensor) -> Tensor:
    """The mean of a tensor over all ranks; with several, each of them has to call this.

    DistributedDataParallel averages gradients and nothing else: a policy that read its own rank's statistics would move
    the logits apart from the other ranks'.
    """
    ranks = rank_count()
    if ranks == 1:
        return values
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total / ranks


class Gathered:
    """Statistics of all calls since the last `clear`, by row of the routing."""

    def __init__(self, rows: int, k: int) -> None:
        self.rows, self.k = rows, k
        self._calls: list[Call] = []
        self._tables: list[Tensor] = []
        self._pattern: tuple[torch.device | None, tuple[Call, ...]] = (None, ())
        self._flat_pattern: tuple[torch.device, tuple[Call, ...], int, bool] | None = None

    def clear(self) -> None:
        self._calls, self._tables = [], []

    def forget(self, first_rows: Set[int]) -> None:
        """Clear the calls of the sites that begin at these rows."""
        left = [
            (call, table) for call, table in zip(self._calls, self._tables, strict=True) if call[0] not in first_rows
        ]
        self._calls, self._tables = [call for call, _ in left], [table for _, table in left]

    def add(self, first_row: int, statistics: Tensor) -> None:
        """One call's, (2, rows of its site, K)."""
        self._calls.append((first_row, statistics.shape[1]))
        self._tables.append(statistics)

    def means(self, device: torch.device) -> Tensor:
        """Over the calls of each row and over the ranks, (2, rows, K); 0 where there were none."""
        self._arrange(device)
        tables = [
            F.pad(table, (0, self.k - table.shape[2])) if table.shape[2] < self.k else table for table in self._tables
        ]
        if not self._even:  # a row of zeros, for rows that were called less often than others
            tables.append(torch.zeros(2, 1, self.k, device=device))
        of_row = torch.cat(tables, dim=1)[:, self._places]
        return mean_over_ranks(of_row.sum(2) / self._counts)

    def flat(self, device: torch.device, start: int, means: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """The same for a kernel, which adds up by itself: flat tensors, and where each row finds its calls in them once
        they are joined behind `start` other numbers, as `flexact.ops.triton.policy` has it.

        means: those over several ranks, which then take the place of the calls.
        """
        calls, tables = (self._calls, self._tables) if means is None else ([(0, self.rows)], [means])
        pattern = (device, tuple(self._calls), start, means is None)
        if pattern != self._flat_pattern:
            _refuse_capture(device)
            self._flat_pattern = pattern
            self._flat_calls = torch.tensor(self._flat_places(calls, tables, start), device=device)
        return [table.flatten() for table in tables], self._flat_calls

    def called(self, device: torch.device) -> Tensor:
        """Which rows were called at all, (rows, 1)."""
        self._arrange(device)
        return self._called

    def _arrange(self, device: torch.device) -> None:
        """Where each row finds its calls in the one table; made anew only when the calls are other ones."""
        pattern = (device, tuple(self._calls))
        if pattern == self._pattern:
            return
        _refuse_capture(device)
        self._pattern = pattern
        own: list[list[int]] = [[] for _ in range(self.rows)]
        place = 0
        for first_row, rows in self._calls:
            for row in range(first_row, first_row + rows):
                own[row].append(place)
                place += 1
        most = max(1, *(len(places) for places in own))
        self._places = torch.tensor([places + [place] * (most - len(places)) for places in own], device=device)
        self._counts = torch.tensor([[max(len(places), 1)] for places in own], device=device)
        self._called = torch.tensor([[len(places) > 0] for places in own], device=device)
        self._even = all(len(places) == most for places in own)

    def _flat_places(self, calls: list[Call], tables: list[Tensor], start: int) -> list[list[int]]:
        """A line for each row: whether it was called; how many tables are its own; how far behind the sensitivities of
        one its deviations are; where the sensitivities of each begin."""
        called = {row for first_row, rows in self._calls for row in range(first_row, first_row + rows)}
        own: list[list[int]] = [[] for _ in range(self.rows)]
        distances = [0] * self.rows
        for (first_row, rows), table in zip(calls, tables, strict=True):
            k = table.shape[2]
            for i in range(rows):
                own[first_row + i].append(start + i * k)
                distances[first_row + i] = rows * k
            start += table.numel()
        most = max(1, *(len(places) for places in own))
        return [
            [int(row in called), len(places), distance, *places, *[0] * (most - len(places))]
            for row, (places, distance) in enumerate(zip(own, distances, strict=True))
        ]


def _refuse_capture(device: torch.device) -> None:
    """Where calls are counted anew, which copies from the host, in the midst of a capture."""
    if device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise FlexActError(
            "this CUDA graph's step calls its sites otherwise than the steps before it, so that it cannot be captured. "
            "Warm up with whole steps, schedule.step() after each optimizer.step(), and capture one of the same kind: "
            "without schedule.step() every forward counts as one more micro-batch of the same step."
        )
