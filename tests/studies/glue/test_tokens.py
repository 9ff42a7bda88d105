"""Tests of tokens: the network receives the tokenizer's output, in batches of rows of similar length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from flexact.studies.glue.data import load
from flexact.studies.glue.encoder import encoded, tokenizer_of
from flexact.studies.glue.trainer import ByLength


def test_rows_equal_the_tokenizers_output(glue_folder: Path, tiny_encoder: Path) -> None:
    encoder, data = str(tiny_encoder), load("rte", glue_folder)
    train, dev = encoded(data, encoder, 128)
    assert train[3] == {**tokenizer_of(encoder)(*data.train[3][0]), "label": data.train[3][1]}
    assert [row["label"] for row in dev] == [int(label) for _, label in data.dev]
    assert isinstance(train[0]["label"], int)
    assert isinstance(encoded(load("stsb", glue_folder), encoder, 128)[0][0]["label"], float)


def test_long_rows_are_truncated(glue_folder: Path, tiny_encoder: Path) -> None:
    train, _ = encoded(load("rte", glue_folder), str(tiny_encoder), 8)
    assert max(len(row["input_ids"]) for row in train) == 8


def test_an_epoch_has_every_row_once_in_batches_of_similar_length() -> None:
    lengths = torch.randint(4, 120, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": [0] * length} for length in lengths]
    sampler = ByLength(rows, 32, seed=0)
    first = list(sampler)
    assert sorted(first) == list(range(1000))
    assert list(ByLength(rows, 32, seed=0)) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(ByLength(rows, 32, seed=1)) != first

    def padded(order: list[int]) -> int:
        batches = [order[k : k + 32] for k in range(0, 1000, 32)]
        return sum(max(lengths[row] for row in batch) * len(batch) for batch in batches)

    assert padded(first) < 1.2 * sum(lengths) < padded(list(range(1000)))
