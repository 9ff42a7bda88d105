"""Fixtures of the text study: small GLUE files, and a tiny encoder with its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

WORDS = [
    "the",
    "a",
    "man",
    "dog",
    "ship",
    "rock",
    "sailed",
    "barked",
    "danced",
    "sank",
    "slept",
    "ate",
    "quickly",
    "never",
    "well",
    ".",
    "?",
]
LINES: dict[str, Callable[[int, str, str], str]] = {
    "CoLA": lambda i, a, b: f"gj04\t{i % 2}\t{'*' if i % 2 else ''}\t{a}",
    "MRPC": lambda i, a, b: f"{i % 2}\t{i}\t{i + 1}\t{a}\t{b}",
    "STS-B": lambda i, a, b: (
        f"{i}\tmain\tMSRvid\t2012\t{i}\tnone\tnone\t{a}\t{b}\t{i % 6}.{'5' if i % 6 < 5 else '0'}00"
    ),
    "QNLI": lambda i, a, b: f"{i}\t{a}\t{b}\t{'entailment' if i % 2 else 'not_entailment'}",
    "RTE": lambda i, a, b: f"{i}\t{a}\t{b}\t{'entailment' if i % 2 else 'not_entailment'}",
    "WNLI": lambda i, a, b: f"{i}\t{a}\t{b}\t{i % 2}",
}
HEADERS = {
    "CoLA": "",
    "MRPC": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n",
    "STS-B": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n",
    "QNLI": "index\tquestion\tsentence\tlabel\n",
    "RTE": "index\tsentence1\tsentence2\tlabel\n",
    "WNLI": "index\tsentence1\tsentence2\tlabel\n",
}


def sentence(i: int, length: int) -> str:
    return " ".join(WORDS[(i * 7 + k * k) % len(WORDS)] for k in range(length))


@pytest.fixture
def glue_folder(tmp_path: Path) -> Path:
    """All six tasks with a few made-up rows. QNLI has no training file."""
    folder = tmp_path / "glue"
    for title, line in LINES.items():
        (folder / title).mkdir(parents=True)
        for name, count in (("train", 24), ("dev", 20)):
            rows = [line(i, sentence(i, 3 + i % 5), sentence(i + 3, 4)) for i in range(count)]
            if (title, name) != ("QNLI", "train"):
                (folder / title / f"{name}.tsv").write_text(HEADERS[title] + "\n".join(rows) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a BERT of one small layer and a tokenizer that knows `WORDS`."""
    folder = tmp_path_factory.mktemp("tiny_encoder")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    tokenizer: Any = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=128)
    transformers.BertModel(config).save_pretrained(folder)
    return folder
