"""The sensitivities of all calls in one step, averaged per row of the routing tables.

Adding a call appends its tensor to a list. Averaging concatenates the list into one table, from which each row gathers
its calls, so the number of operations does not depend on the depth.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor
from torch.nn import functional as F

from flexact.errors import FlexActError

Call = tuple[int, int]
"""The first row of a call's site, and the number of its rows."""


def rank_count() -> int:
    """Return the number of ranks; 1 if torch.distributed is not in use."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()


def mean_over_ranks(values: Tensor) -> Tensor:
    """Return the mean of a tensor over all ranks. Every rank must call this.

    DistributedDataParallel averages only gradients. If the policy used the statistics of its own rank, the logits of
    the ranks would diverge.
    """
    ranks = rank_count()
    if ranks == 1:
        return values
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total / ranks


class Gathered:
    """The mean |σ_k′(h)| of all calls since the last `clear`, per row of the routing tables."""

    def __init__(self, rows: int, k: int) -> None:
        self.rows, self.k = rows, k
        self._calls: list[Call] = []
        self._tables: list[Tensor] = []
        self._pattern: tuple[torch.device | None, tuple[Call, ...]] = (None, ())
        self._flat_pattern: tuple[torch.device, tuple[Call, ...], int, bool] | None = None

    def clear(self) -> None:
        self._calls, self._tables = [], []

    def forget(self, first_rows: Set[int]) -> None:
        """Remove the calls of the sites that start at these rows."""
        left = [i for i, (first_row, _) in enumerate(self._calls) if first_row not in first_rows]
        self._calls, self._tables = [self._calls[i] for i in left], [self._tables[i] for i in left]

    def add(self, first_row: int, sensitivity: Tensor) -> None:
        """Add the sensitivities of one call, (rows of its site, K of its site)."""
        if type(sensitivity) is not Tensor:  # a user's subclass may not support deepcopy
            with torch._C.DisableTorchFunctionSubclass():
                sensitivity = sensitivity.detach()
        self._calls.append((first_row, sensitivity.shape[0]))
        self._tables.append(sensitivity)

    def means(self, device: torch.device) -> Tensor:
        """Return the mean over the calls of each row and over the ranks, (rows, K); 0 for rows without calls."""
        self._arrange(device)
        tables = [
            F.pad(table, (0, self.k - table.shape[1])) if table.shape[1] < self.k else table for table in self._tables
        ]
        if self._in_order:
            return mean_over_ranks(torch.cat(tables))
        tables.append(torch.zeros(1, self.k, device=device))  # pads the rows with fewer calls
        return mean_over_ranks(torch.cat(tables)[self._positions].sum(1) / self._counts)

    def flat(self, device: torch.device, start: int, means: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Return the sensitivities of all calls as flat tensors, and the table `calls` of `flexact.ops.triton.policy`.

        start: the offset of the first flat tensor in the kernel's `values`.
        means: the means over several ranks; if given, they replace the calls.
        """
        calls, tables = (self._calls, self._tables) if means is None else ([(0, self.rows)], [means])
        pattern = (device, tuple(self._calls), start, means is None)
        if pattern != self._flat_pattern:
            _refuse_capture(device)
            self._flat_pattern = pattern
            called = _offsets(self.rows, self._calls, [1] * len(self._calls))
            own = _offsets(self.rows, calls, [table.shape[1] for table in tables], start)
            found = [
                [int(bool(was_called)), len(offsets), *padded]
                for was_called, offsets, padded in zip(called, own, _padded(own, 0), strict=True)
            ]
            self._flat_calls = torch.tensor(found, device=device)
        return [table.flatten() for table in tables], self._flat_calls

    def called(self, device: torch.device) -> Tensor:
        """Return a mask of the rows that were called, (rows, 1)."""
        self._arrange(device)
        return self._called

    def _arrange(self, device: torch.device) -> None:
        """Compute the positions of each row's calls in the concatenated table, if the set of calls has changed."""
        pattern = (device, tuple(self._calls))
        if pattern == self._pattern:
            return
        _refuse_capture(device)
        self._pattern = pattern
        own = _offsets(self.rows, self._calls, [1] * len(self._calls))
        self._positions = torch.tensor(_padded(own, sum(rows for _, rows in self._calls)), device=device)
        self._counts = torch.tensor([[max(len(offsets), 1)] for offsets in own], device=device)
        self._called = torch.tensor([[len(offsets) > 0] for offsets in own], device=device)
        self._in_order = own == [[row] for row in range(self.rows)]  # one call per row


def _offsets(rows: int, calls: list[Call], lengths: list[int], start: int = 0) -> list[list[int]]:
    """Return, for each row of the routing tables, the offsets of its calls in the concatenated calls.

    lengths: the length of one row of each call. start: the offset of the first call.
    """
    own: list[list[int]] = [[] for _ in range(rows)]
    for (first_row, count), length in zip(calls, lengths, strict=True):
        for row in range(first_row, first_row + count):
            own[row].append(start)
            start += length
    return own


def _padded(lists: list[list[int]], value: int) -> list[list[int]]:
    """Pad lists with a value to the same length, at least 1."""
    longest = max(1, *(len(one) for one in lists))
    return [one + [value] * (longest - len(one)) for one in lists]


def _refuse_capture(device: torch.device) -> None:
    """Raise during a CUDA-graph capture, in which the offsets of new calls cannot be copied from the host."""
    if device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise FlexActError(
            "this CUDA graph cannot be captured, because its step calls the sites differently from earlier steps. "
            "Warm up with full steps, with schedule.step() after each optimizer.step(), and capture such a step: "
            "without schedule.step(), every forward counts as another micro-batch of the same step."
        )
