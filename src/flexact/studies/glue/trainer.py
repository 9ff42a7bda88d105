"""The Hugging Face Trainer of the study, and its callback, which records the curve and the picks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexact import Recorder
from flexact.io.atomic_files import write_rows
from flexact.routing.sites import sites_of
from flexact.studies.glue.encoder import transformers_package
from flexact.studies.glue.protocol import Cell, Protocol
from flexact.studies.glue.tokens import ByLength, Encoded, whole
from flexact.studies.grid.cell_task import CURVE, Stopped, read_curve

HISTORY = "history.jsonl"
RECORDS = 20
"""The number of records of the picks during a run."""
WINDOW = 10
"""The number of steps that are timed together."""


class CellCallback(transformers_package().TrainerCallback):  # type: ignore[misc]
    """A callback of the cell's Trainer.

    minutes: the time between two checkpoints; 0 for none except when the run is stopped.
    """

    def __init__(
        self, network: nn.Module, folder: Path, minutes: float, stop: Callable[[], bool] | None, device: torch.device
    ) -> None:
        self.network, self.folder, self.minutes, self.device = network, folder, minutes, device
        self.stop = stop or (lambda: False)
        self.curve: list[dict[str, Any]] = []
        self.recorder: Recorder | None = None
        self.stopping = False
        self.windows: list[float] = []

    def write_score(self, score: float) -> None:
        """Write the final score to the last line of the curve."""
        self.curve[-1]["score"] = score
        write_rows(self.folder / CURVE, self.curve)

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = read_curve(self.folder)  # from an earlier start, up to its checkpoint
        self.curve = [line | {"score": ""} for line in found if line["epoch"] <= int(state.epoch or 0)]
        self.seconds_before = self.curve[-1]["seconds"] if self.curve else 0.0
        self.record_every = max(1, state.max_steps // RECORDS)
        if sites_of(self.network):
            self.recorder = Recorder(self.network, self.folder / HISTORY, resume=True)
            self.recorder.rewind(state.global_step)
            if not self.recorder.history:
                self.recorder.record(0, epoch=0.0)
        self.started = self.saved = time.monotonic()
        self._start_window(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.recorder is not None and state.global_step % self.record_every == 0:
            begun = time.monotonic()
            self.recorder.record(state.global_step, epoch=state.epoch)
            self.untimed += time.monotonic() - begun
        if state.global_step - self.window_start >= WINDOW:
            self._end_window(state)
        due = self.minutes > 0 and time.monotonic() - self.saved >= 60 * self.minutes
        if self.stop() and state.global_step < state.max_steps:
            self.stopping = due = True
        if due:
            self._synchronize()
            self.saving = time.monotonic()
            control.should_log = control.should_save = True  # the epoch's loss so far is saved as well

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved = time.monotonic()
        self.untimed += self.saved - self.saving
        if self.stopping:
            raise Stopped(
                f"stopped after {state.global_step} of {state.max_steps} steps; start it again to resume from "
                f"{args.output_dir}."
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        steps = state.max_steps // round(args.num_train_epochs)
        if "loss" not in (logs or {}) or state.global_step % steps != 0:
            return
        self._synchronize()
        line = {
            "epoch": state.global_step // steps,
            "loss": _mean_loss(state.log_history, state.global_step - steps),
            "score": "",
            "seconds": self.seconds_before + time.monotonic() - self.started,
            "step_ms": self._step_ms(state),
        }
        self.curve.append(line)
        write_rows(self.folder / CURVE, self.curve)
        self._start_window(state)

    def _start_window(self, state: Any) -> None:
        self.window_begun, self.window_start, self.untimed = time.monotonic(), state.global_step, 0.0

    def _end_window(self, state: Any) -> None:
        spent = time.monotonic() - self.window_begun - self.untimed
        self.windows.append(spent * 1e3 / max(state.global_step - self.window_start, 1))
        self._start_window(state)

    def _step_ms(self, state: Any) -> float:
        """The mean over the epoch's windows. Windows above three medians, which compiled kernels, are excluded."""
        if not self.windows:
            self._end_window(state)
        usual = [window for window in self.windows if window <= 3 * statistics.median(self.windows)]
        self.windows = []
        return statistics.fmean(usual)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _mean_loss(history: Sequence[Mapping[str, Any]], after: int) -> float:
    """The mean loss of the steps after a step. Each entry of the log is the mean since the previous entry."""
    last, total = after, 0.0
    for entry in history:
        if "loss" in entry and entry["step"] > after:
            total += entry["loss"] * (entry["step"] - last)
            last = entry["step"]
    return total / max(last - after, 1)


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
