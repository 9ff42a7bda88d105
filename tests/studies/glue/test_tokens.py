"""Tokens: what the network gets is what its tokenizer makes, in batches of rows of like length."""

from __future__ import annotations

from pathlib import Path

import torch

from flexact.studies.glue.data import load
from flexact.studies.glue.encoder import find_encoder, tokenizer_of
from flexact.studies.glue.tokens import ByLength, encoded


def test_a_batch_is_what_the_tokenizer_makes_of_its_rows(glue_folder: Path, tiny_encoder: Path) -> None:
    encoder, data = find_encoder(str(tiny_encoder)), load("rte", glue_folder)
    train, dev = encoded(data, encoder, 128)
    chosen = [3, 0, 7]
    batch = train.__getitems__(chosen)
    pairs = [[data.train.texts[row][side] for row in chosen] for side in (0, 1)]
    expected = tokenizer_of(encoder)(*pairs, padding=True, pad_to_multiple_of=8, return_tensors="pt")
    assert batch.keys() - {"labels"} == expected.keys()
    for name, table in expected.items():
        assert torch.equal(batch[name], table)
    assert batch["labels"].tolist() == [data.train.labels[row] for row in chosen]
    assert batch["labels"].dtype == torch.int64
    assert len(dev) == 20
    assert encoded(load("stsb", glue_folder), encoder, 128)[0].labels.dtype == torch.float32


def test_long_rows_are_cut(glue_folder: Path, tiny_encoder: Path) -> None:
    train, _ = encoded(load("rte", glue_folder), find_encoder(str(tiny_encoder)), 8)
    assert max(train.lengths) == 8


def test_an_epoch_has_every_row_once_in_batches_of_like_length() -> None:
    lengths = torch.randint(4, 120, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = ByLength(lengths, 32, seed=0)
    first = list(sampler)
    assert sorted(first) == list(range(1000))
    assert list(ByLength(lengths, 32, seed=0)) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(ByLength(lengths, 32, seed=1)) != first

    def padded(order: list[int]) -> int:
        batches = [order[k : k + 32] for k in range(0, 1000, 32)]
        return sum(max(lengths[row] for row in batch) * len(batch) for batch in batches)

    assert padded(first) < 1.1 * sum(lengths) < padded(list(range(1000)))
