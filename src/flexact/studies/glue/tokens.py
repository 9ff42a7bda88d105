"""Rows as tokens: made once, kept where the network is, and given out in batches of rows of like length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexact.studies.glue.data import Rows, TextData
from flexact.studies.glue.encoder import Encoder, tokenizer_of

MULTIPLE = 8
"""A batch is as wide as its longest row, rounded up to this."""
POOL = 16
"""How many batches' rows are sorted by length among themselves."""


@dataclass(frozen=True)
class Encoded:
    """A data set for torch's DataLoader that gives out whole batches (with `whole` as its `collate_fn`)."""

    inputs: dict[str, Tensor]
    """By the network's own names, each (rows, tokens), padded."""
    lengths: tuple[int, ...]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        widest = max(self.lengths[index] for index in indices)
        width = -(-widest // MULTIPLE) * MULTIPLE
        chosen = torch.tensor(indices)
        if self.labels.is_cuda:
            chosen = chosen.pin_memory().to(self.labels.device, non_blocking=True)  # otherwise the host would wait
        batch = {name: table[chosen, :width] for name, table in self.inputs.items()}
        return {**batch, "labels": self.labels[chosen]}

    def to(self, device: torch.device) -> Encoded:
        """Where the network is, so that no step waits for a copy."""
        moved = {name: table.to(device) for name, table in self.inputs.items()}
        return Encoded(moved, self.lengths, self.labels.to(device))


def whole(batch: Any) -> Any:
    """What `Encoded` gives out is a batch already."""
    return batch


@lru_cache(maxsize=8)
def encoded(data: TextData, encoder: Encoder, length: int) -> tuple[Encoded, Encoded]:
    """Training and dev rows as tokens; a worker's cells share them. Dev rows come by length."""
    tokenizer = tokenizer_of(encoder)
    order = sorted(range(len(data.dev)), key=lambda row: sum(map(len, data.dev.texts[row])))
    dev = Rows(tuple(data.dev.texts[row] for row in order), tuple(data.dev.labels[row] for row in order))
    kind = torch.float32 if data.task.is_regression else torch.int64
    return _encoded(data.train, tokenizer, length, kind), _encoded(dev, tokenizer, length, kind)


def _encoded(rows: Rows, tokenizer: Any, length: int, kind: torch.dtype) -> Encoded:
    columns = [list(column) for column in zip(*rows.texts, strict=True)]
    found = tokenizer(*columns, truncation=True, max_length=length)
    lengths = tuple(len(ids) for ids in found["input_ids"])
    width = -(-max(lengths) // MULTIPLE) * MULTIPLE
    inputs = {name: _table(lists, width, _padding(name, tokenizer)) for name, lists in found.items()}
    return Encoded(inputs, lengths, torch.tensor(rows.labels).to(kind))


def _table(lists: Sequence[Sequence[int]], width: int, padding: int) -> Tensor:
    return torch.tensor([[*one, *[padding] * (width - len(one))] for one in lists])


def _padding(name: str, tokenizer: Any) -> int:
    return int({"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}.get(name, 0))


class ByLength(torch.utils.data.Sampler[int]):
    """The order of an epoch: random, then sorted by length within pools of batches, and the batches shuffled.

    It depends on seed and epoch alone, so that a run can be gone on with, and is the same for every method.

    >>> list(ByLength([3, 1, 2, 1], batch=2, seed=0))
    [3, 1, 0, 2]
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed, self.epoch = lengths, batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """accelerate's loaders say which one begins."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        digest = hashlib.sha256(f"rows, seed {self.seed}, epoch {self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        pool = POOL * self.batch
        pools = [order[first : first + pool] for first in range(0, len(order), pool)]
        rows = [row for one in pools for row in sorted(one, key=lambda row: -self.lengths[row])]
        batches = [rows[first : first + self.batch] for first in range(0, len(rows), self.batch)]
        last = [batches.pop()] if len(batches[-1]) < self.batch else []  # a part of a batch comes last
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return iter([row for one in [*(batches[place] for place in shuffled), *last] for row in one])
