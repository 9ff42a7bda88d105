"""Fixtures of the integration tests: a tiny BERT, training data for it, and Trainers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flexact
from configs import flat

transformers = pytest.importorskip("transformers")

collect_ignore = ["train_tiny.py", "fit_lightning.py"]  # for programs that tests start


class Rows(torch.utils.data.Dataset):
    """Sequences of five tokens. The label says whether the second token is even."""

    def __init__(self, count: int = 48, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, 40, (count, 5), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[1] % 2}


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def tiny_bert() -> Callable[..., Any]:
    """Returns a function that builds a BERT of two small layers with random weights, reproducible by seed."""

    def build(seed: int = 0, **settings: Any) -> Any:
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
        config = transformers.BertConfig(**{**sizes, "vocab_size": 40, "max_position_embeddings": 8, **settings})
        return transformers.BertForSequenceClassification(config)

    return build


@pytest.fixture
def routed(tiny_bert: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that builds a tiny BERT and converts it."""

    def build(where: Any = "all", seed: int = 0, settings: dict[str, Any] | None = None, **choices: Any) -> Any:
        config = flat(**{"init": "original", **choices})
        return flexact.convert(tiny_bert(seed, **(settings or {})), where, config)

    return build


@pytest.fixture
def trainer_of(rows: Rows, tmp_path: Path) -> Callable[..., Any]:
    """Returns a function that builds a Trainer of a model, on the CPU, without output."""

    def build(model: nn.Module, name: str = "out", **settings: Any) -> Any:
        quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
        sizes = {"per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 1e-3, "use_cpu": True}
        trainer_settings = {key: settings.pop(key) for key in ("callbacks", "optimizers") if key in settings}
        args = transformers.TrainingArguments(output_dir=str(tmp_path / name), **{**quiet, **sizes, **settings})
        trainer = transformers.Trainer(
            model=model, args=args, train_dataset=rows, eval_dataset=rows, **trainer_settings
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    return build
