"""A digits MLP, a tiny timm model and a tiny transformers model, each with its own training.

The text of this file is also executed as a notebook cell, where its definitions belong to no module.
"""

from __future__ import annotations

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

import flexact


def build_mlp():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))


def train_mlp(model, seed, make_schedule):
    x, y = load_digits(return_X_y=True)
    yield from _trained(model, torch.tensor(x / 16).float(), torch.tensor(y), 60, make_schedule)


def build_timm():
    import timm  # imported here, because it takes longer than the training

    return timm.create_model("resnet10t", pretrained=False, in_chans=1, num_classes=10)


def train_timm(model, seed, make_schedule):
    x, y = load_digits(return_X_y=True)
    images = nn.functional.interpolate(torch.tensor(x / 16).float().view(-1, 1, 8, 8), size=16)
    *_, last = _trained(model, images[:128], torch.tensor(y[:128]), 6, make_schedule)
    return last


def _trained(model, x, y, steps, make_schedule):
    """Yields the accuracy on the training data."""
    optimizer = torch.optim.AdamW(flexact.param_groups(model), lr=3e-3)
    schedule = make_schedule and make_schedule(total_steps=2 * steps, optimizer=optimizer)
    for step in range(1, (2 * steps if schedule else steps) + 1):
        rows = torch.randint(len(x), (32,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step(loss)
        if step % 6 == 0:
            with torch.no_grad():
                yield 100 * float((model.eval()(x).argmax(1) == y).float().mean())
            model.train()


def build_bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=60, max_position_embeddings=8, **sizes))


def train_bert(model, seed, make_schedule):
    """Uses transformers' own loop: a callback replaces the schedule."""
    from transformers import Trainer, TrainingArguments

    from flexact.integrations.transformers import FlexActCallback

    data = [{"input_ids": torch.randint(10, 60, (8,)), "labels": row % 2} for row in range(64)]
    for row in data[::2]:
        row["input_ids"][3] = 7
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=20, per_device_train_batch_size=16, learning_rate=5e-3, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, seed=seed, logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=data)
        if make_schedule is not None:
            trainer = FlexActCallback().wrap(trainer)
        trainer.train()
    with torch.no_grad():
        return -float(
            model.eval()(
                **{
                    key: torch.tensor([[*row[key]] if key == "input_ids" else row[key] for row in data])
                    for key in data[0]
                }
            ).loss
        )
