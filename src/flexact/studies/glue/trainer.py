"""The Hugging Face Trainer of the study, and its callback, which records the curve and the picks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexact import Recorder
from flexact.io.atomic_files import write_rows
from flexact.routing.sites import sites_of
from flexact.studies.glue.encoder import MULTIPLE, tokenizer_of, transformers_package
from flexact.studies.glue.protocol import Cell, Protocol
from flexact.studies.grid.cell_task import CURVE, Stopped
from flexact.studies.named_seeds import seed_of

HISTORY = "history.jsonl"
RECORDS = 20
"""The number of records of the picks during a run."""
WINDOW = 10
"""The number of steps that are timed together."""

_package = transformers_package()


class CellCallback(_package.TrainerCallback):  # type: ignore[misc,name-defined]
    """A callback of the cell's Trainer. It writes the curve and the history of the picks, and stops the run."""

    def __init__(self, network: nn.Module, folder: Path, stop: Callable[[], bool], device: torch.device) -> None:
        self.network, self.folder, self.stop, self.device = network, folder, stop, device
        self.curve: list[dict[str, Any]] = []
        self.recorder: Recorder | None = None

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record_every = max(1, state.max_steps // RECORDS)
        if sites_of(self.network):
            self.recorder = Recorder(self.network, self.folder / HISTORY, overwrite=True)
            self.recorder.record(0, epoch=0.0)
        self.started = time.monotonic()
        self.times = [(0, self.started)]
        """(step, time) at the end of each timed window of this epoch, and at its start."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.recorder is not None and state.global_step % self.record_every == 0:
            self.recorder.record(state.global_step, epoch=state.epoch)
        if state.global_step % WINDOW == 0:
            self.times.append((state.global_step, time.monotonic()))
        if self.stop() and state.global_step < state.max_steps:
            raise Stopped(f"stopped after {state.global_step} of {state.max_steps} steps; --resume starts it again.")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in (logs or {}):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        self.times.append((state.global_step, now))
        windows = [1e3 * (end - begin) / (b - a) for (a, begin), (b, end) in pairwise(self.times) if b > a]
        line = {
            "epoch": round(state.epoch),
            "loss": logs["loss"],
            "score": "",
            "seconds": now - self.started,
            "step_ms": statistics.median(windows),  # not the mean: some windows include compiling kernels
        }
        self.curve.append(line)
        write_rows(self.folder / CURVE, self.curve)
        self.times = [(state.global_step, time.monotonic())]


class ByLength(_package.trainer_pt_utils.LengthGroupedSampler):  # type: ignore[misc,name-defined]
    """Batches of rows of similar length, in an order that depends only on seed and epoch, so every method has the same
    one."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], batch: int, seed: int) -> None:
        super().__init__(batch, rows, model_input_name="input_ids", generator=torch.Generator())
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; accelerate's loaders call this."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(seed_of(f"rows, seed {self.seed}, epoch {self.epoch}"))
        indices: Iterator[int] = super().__iter__()
        return indices


class StudyTrainer(_package.Trainer):  # type: ignore[misc,name-defined]
    """A Trainer with batches of rows of similar length and evaluation in float32. It does not count operations."""

    def _get_train_sampler(self, train_dataset: Any = None) -> ByLength:
        rows = self.train_dataset if train_dataset is None else train_dataset
        return ByLength(rows, self.args.per_device_train_batch_size, self.args.seed)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict in float32, also after training in bf16, which would round the scores that a correlation ranks."""
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)  # removes autocast from its forward
        return super().predict(*args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # counting would iterate over all parameters at every step


def trainer_for(
    network: Any,
    train: Sequence[Mapping[str, Any]],
    dev: Sequence[Mapping[str, Any]],
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
        save_strategy="no",
        logging_strategy="epoch",
        logging_nan_inf_filter=False,  # it would synchronize at every step; train_cell checks at the end
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        do_eval=False,
    )
    if device.type == "cuda":
        arguments._n_gpu = 1  # one GPU per cell, even if the machine has several
    trainer = StudyTrainer(
        model=network,
        args=arguments,
        train_dataset=train,
        eval_dataset=dev,
        data_collator=_package.DataCollatorWithPadding(tokenizer_of(protocol.folder), pad_to_multiple_of=MULTIPLE),
    )
    trainer.remove_callback(_package.PrinterCallback)
    trainer.model_accepts_loss_kwargs = False  # a step is one batch, so the loss needs no count of items
    return trainer
