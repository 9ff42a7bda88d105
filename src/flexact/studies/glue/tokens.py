"""Rows as tokens: tokenized once, kept on the device, and served in batches of rows of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexact.studies.glue.data import Rows, TextData
from flexact.studies.glue.encoder import MULTIPLE, Encoder, tokenizer_of
from flexact.studies.named_seeds import generator_of

POOL = 16
"""The number of batches whose rows are sorted by length together."""


@dataclass(frozen=True)
class Encoded:
    """A data set for torch's DataLoader whose items are complete batches (with `whole` as `collate_fn`)."""

    inputs: dict[str, Tensor]
    """The network's inputs by name, each (rows, tokens), padded."""
    lengths: tuple[int, ...]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        width = _rounded(max(self.lengths[index] for index in indices))
        chosen = torch.tensor(indices)
        if self.labels.is_cuda:
            chosen = chosen.pin_memory().to(self.labels.device, non_blocking=True)  # the host does not wait
        batch = {name: table[chosen, :width] for name, table in self.inputs.items()}
        return {**batch, "labels": self.labels[chosen]}

    def to(self, device: torch.device) -> Encoded:
        """The same rows on a device, so that no step waits for a copy."""
        moved = {name: table.to(device) for name, table in self.inputs.items()}
        return Encoded(moved, self.lengths, self.labels.to(device))


def whole(batch: Any) -> Any:
    """The `collate_fn` of `Encoded`, whose items are batches already."""
    return batch


@lru_cache(maxsize=8)
def encoded(data: TextData, encoder: Encoder, length: int) -> tuple[Encoded, Encoded]:
    """Training and dev rows as tokens, which the cells of a worker share. Dev rows are sorted by length."""
    tokenizer = tokenizer_of(encoder)
    order = sorted(range(len(data.dev)), key=lambda row: sum(map(len, data.dev.texts[row])))
    dev = Rows(tuple(data.dev.texts[row] for row in order), tuple(data.dev.labels[row] for row in order))
    kind = torch.float32 if data.task.is_regression else torch.int64
    return _encoded(data.train, tokenizer, length, kind), _encoded(dev, tokenizer, length, kind)


def _encoded(rows: Rows, tokenizer: Any, length: int, kind: torch.dtype) -> Encoded:
    columns = [list(column) for column in zip(*rows.texts, strict=True)]
    found = tokenizer(*columns, truncation=True, max_length=length)
    lengths = tuple(len(ids) for ids in found["input_ids"])
    padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    width = _rounded(max(lengths))
    inputs = {
        name: torch.tensor([[*one, *[padding.get(name, 0)] * (width - len(one))] for one in lists])
        for name, lists in found.items()
    }
    return Encoded(inputs, lengths, torch.tensor(rows.labels).to(kind))


def _rounded(width: int) -> int:
    return -(-width // MULTIPLE) * MULTIPLE


class ByLength(torch.utils.data.Sampler[int]):
    """The order of an epoch: random, sorted by length within pools of batches, with the batches shuffled.

    It depends only on seed and epoch, so a resumed run and every method have the same order.

    >>> list(ByLength([3, 1, 2, 1], batch=2, seed=0))
    [3, 1, 0, 2]
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed, self.epoch = lengths, batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; accelerate's loaders call this."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = generator_of(f"rows, seed {self.seed}, epoch {self.epoch}")
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        pool = POOL * self.batch
        pools = [order[first : first + pool] for first in range(0, len(order), pool)]
        rows = [row for one in pools for row in sorted(one, key=lambda row: -self.lengths[row])]
        batches = [rows[first : first + self.batch] for first in range(0, len(rows), self.batch)]
        last = [batches.pop()] if len(batches[-1]) < self.batch else []  # an incomplete batch comes last
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return iter([row for one in [*(batches[place] for place in shuffled), *last] for row in one])
