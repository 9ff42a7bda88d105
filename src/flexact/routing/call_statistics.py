"""The sensitivities that the calls of one step leave behind, averaged by row of the routing.

Adding a call appends its tensor to a list. Averaging takes a constant number of operations, whatever the depth: the
list becomes one table, from which each row of the routing takes its own calls.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor
from torch.nn import functional as F

from flexact.errors import FlexActError

Call = tuple[int, int]
"""The first row of a call's site, and how many rows the site has."""


def rank_count() -> int:
    """The number of processes that train together; 1 where torch.distributed is not in use."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()


def mean_over_ranks(values: Tensor) -> Tensor:
    """The mean of a tensor over all ranks, each of which has to call this.

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
    """Mean |σ_k′(h)| of all calls since the last `clear`, by row of the routing."""

    def __init__(self, rows: int, k: int) -> None:
        self.rows, self.k = rows, k
        self._calls: list[Call] = []
        self._tables: list[Tensor] = []
        self._pattern: tuple[torch.device | None, tuple[Call, ...]] = (None, ())
        self._flat_pattern: tuple[torch.device, tuple[Call, ...], int, bool] | None = None

    def clear(self) -> None:
        self._calls, self._tables = [], []

    def forget(self, first_rows: Set[int]) -> None:
        """Remove the calls of the sites that begin at these rows."""
        left = [i for i, (first_row, _) in enumerate(self._calls) if first_row not in first_rows]
        self._calls, self._tables = [self._calls[i] for i in left], [self._tables[i] for i in left]

    def add(self, first_row: int, sensitivity: Tensor) -> None:
        """Add one call's sensitivities, (rows of its site, K of its site)."""
        self._calls.append((first_row, sensitivity.shape[0]))
        self._tables.append(sensitivity)

    def means(self, device: torch.device) -> Tensor:
        """The mean over the calls of each row and over the ranks, (rows, K); 0 for rows that were not called."""
        self._arrange(device)
        tables = [
            F.pad(table, (0, self.k - table.shape[1])) if table.shape[1] < self.k else table for table in self._tables
        ]
        if not self._even:  # a row of zeros, for rows that were called less often than others
            tables.append(torch.zeros(1, self.k, device=device))
        return mean_over_ranks(torch.cat(tables)[self._places].sum(1) / self._counts)

    def flat(self, device: torch.device, start: int, means: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """The calls for a kernel that averages them itself: flat tensors, and where each row finds its calls once these
        are joined behind `start` other numbers, in the form of `flexact.ops.triton.policy`.

        means: the means over several ranks, which then replace the calls.
        """
        calls, tables = (self._calls, self._tables) if means is None else ([(0, self.rows)], [means])
        pattern = (device, tuple(self._calls), start, means is None)
        if pattern != self._flat_pattern:
            _refuse_capture(device)
            self._flat_pattern = pattern
            self._flat_calls = torch.tensor(self._flat_places(calls, tables, start), device=device)
        return [table.flatten() for table in tables], self._flat_calls

    def called(self, device: torch.device) -> Tensor:
        """Which rows were called, (rows, 1)."""
        self._arrange(device)
        return self._called

    def _arrange(self, device: torch.device) -> None:
        """Find the place of each row's calls in the joined table, where the set of calls has changed."""
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
        """For each row: whether it was called, its number of tables, and where its part of each begins."""
        called = {row for first_row, rows in self._calls for row in range(first_row, first_row + rows)}
        own: list[list[int]] = [[] for _ in range(self.rows)]
        for (first_row, rows), table in zip(calls, tables, strict=True):
            for i in range(rows):
                own[first_row + i].append(start + i * table.shape[1])
            start += table.numel()
        most = max(1, *(len(places) for places in own))
        return [
            [int(row in called), len(places), *places, *[0] * (most - len(places))] for row, places in enumerate(own)
        ]


def _refuse_capture(device: torch.device) -> None:
    """Raise during a CUDA-graph capture: finding the places of new calls copies from the host."""
    if device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise FlexActError(
            "this CUDA graph's step calls its sites otherwise than the steps before it, so that it cannot be captured. "
            "Warm up with whole steps, schedule.step() after each optimizer.step(), and capture one of the same kind: "
            "without schedule.step() every forward counts as one more micro-batch of the same step."
        )
