"""The Hugging Face Trainer of the study: its usual loop, without the parts that slow down short runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flexact.studies.glue.encoder import transformers_package
from flexact.studies.glue.protocol import Cell, Protocol
from flexact.studies.glue.tokens import ByLength, Encoded, whole

_package = transformers_package()


class StudyTrainer(_package.Trainer):  # type: ignore[misc,name-defined]
    """A Trainer with batches of rows of similar length, evaluation in float32, and no count of operations."""

    def _get_train_sampler(self, train_dataset: Any = None) -> ByLength:
        rows: Encoded = self.train_dataset if train_dataset is None else train_dataset
        return ByLength(rows.lengths, self.args.per_device_train_batch_size, self.args.seed)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict in float32, also after training in bf16, which would round the scores that a correlation ranks."""
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)  # removes autocast from its forward
        return super().predict(*args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # counting iterates over all parameters at every step


def trainer_for(
    network: Any,
    train: Encoded,
    dev: Encoded,
    cell: Cell,
    protocol: Protocol,
    device: torch.device,
    folder: Path,
) -> StudyTrainer:
    """The Trainer of a cell."""
    steps = -(-len(train) // protocol.batch) * protocol.epochs_of(cell.task)
    arguments = _package.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=protocol.epochs_of(cell.task),
        per_device_train_batch_size=protocol.batch,
        per_device_eval_batch_size=max(protocol.batch, 128),
        learning_rate=protocol.lr,
        weight_decay=protocol.weight_decay,
        warmup_steps=round(protocol.warmup * steps),
        lr_scheduler_type="linear",
        seed=cell.seed,
        bf16=device.type == "cuda" and protocol.precision == "bf16",
        use_cpu=device.type == "cpu",
        save_strategy="no",  # CellCallback requests checkpoints
        save_total_limit=1,
        logging_strategy="epoch",
        logging_nan_inf_filter=False,  # it would synchronize at every step; train_cell checks at the end
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,  # the rows are on the device already
        do_eval=False,
    )
    if device.type == "cuda":
        arguments._n_gpu = 1  # one per cell, even if there are several
    trainer = StudyTrainer(
        model=network,
        args=arguments,
        train_dataset=train.to(device),
        eval_dataset=dev.to(device),
        data_collator=whole,
    )
    trainer.remove_callback(_package.PrinterCallback)
    trainer.model_accepts_loss_kwargs = False  # a step is one batch, so the loss needs no count of items
    return trainer
