"""What a cell's run leaves behind as it goes: its curve, the history of its picks, and a checkpoint when it is time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexact import Recorder
from flexact.errors import FlexActError
from flexact.io.atomic_files import write_rows
from flexact.routing.sites import sites_of
from flexact.studies.glue.encoder import transformers_package
from flexact.studies.grid.curves import CURVE, read_curve

HISTORY = "history.jsonl"
RECORDS = 20
"""Of the picks, over a run."""
WINDOW = 10
"""Steps that are timed together. A window in which kernels were compiled stands out, and is left out."""


class Stopped(FlexActError):
    """The run was asked to stop; it left a checkpoint."""


class Watch(transformers_package().TrainerCallback):  # type: ignore[misc]
    """A callback of the cell's Trainer.

    minutes: from one checkpoint to the next; 0 for none but where the run is stopped.
    """

    def __init__(
        self,
        network: nn.Module,
        folder: Path,
        minutes: float,
        report: Callable[[Any], object] | None,
        stop: Callable[[], bool] | None,
        device: torch.device,
    ) -> None:
        self.network, self.folder, self.minutes, self.device = network, folder, minutes, device
        self.report, self.stop = report or (lambda _: None), stop or (lambda: False)
        self.curve: list[dict[str, Any]] = []
        self.recorder: Recorder | None = None
        self.stopping = False
        self.before = self.aside = 0.0
        self.windows: list[float] = []

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around the run."""
        try:
            yield
        finally:
            if self.recorder is not None:
                self.recorder.close()

    def write_score(self, score: float) -> None:
        """What the run came to, on the last line of the curve."""
        self.curve[-1]["score"] = score
        write_rows(self.folder / CURVE, self.curve)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._go_on_from(int(state.epoch or 0))
        self.every = max(1, state.max_steps // RECORDS)
        if sites_of(self.network):
            self.recorder = Recorder(self.network, self.folder / HISTORY)
            self.recorder.rewind(state.global_step)
            if not self.recorder.history:
                self.recorder.record(0, epoch=0.0)
        self.started = self.saved = time.monotonic()
        self._mark(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.recorder is not None and state.global_step % self.every == 0:
            begun = time.monotonic()
            self.recorder.record(state.global_step, epoch=state.epoch)
            self.aside += time.monotonic() - begun
        if state.global_step - self.marked_at >= WINDOW:
            self._end_window(state)
        due = self.minutes > 0 and time.monotonic() - self.saved >= 60 * self.minutes
        if self.stop() and state.global_step < state.max_steps:
            self.stopping = due = True
        if due:
            self._settle()
            self.saving = time.monotonic()
            control.should_log = control.should_save = True  # what the epoch's loss came to so far is saved, too

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved = time.monotonic()
        self.aside += self.saved - self.saving
        if self.stopping:
            raise Stopped(
                f"stopped after {state.global_step} of {state.max_steps} steps; start it again to go on from "
                f"{args.output_dir}."
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        steps = state.max_steps // round(args.num_train_epochs)
        if "loss" not in (logs or {}) or state.global_step % steps != 0:
            return
        self._settle()
        now = time.monotonic()
        line = {
            "epoch": state.global_step // steps,
            "loss": _mean_loss(state.log_history, state.global_step - steps),
            "score": "",
            "seconds": self.before + now - self.started,
            "step_ms": self._step_ms(state),
        }
        self.curve.append(line)
        write_rows(self.folder / CURVE, self.curve)
        self.report(line)
        self._mark(state)

    def _mark(self, state: Any) -> None:
        """Time steps from here on."""
        self.marked, self.marked_at, self.aside = time.monotonic(), state.global_step, 0.0

    def _end_window(self, state: Any) -> None:
        spent = time.monotonic() - self.marked - self.aside
        self.windows.append(spent * 1e3 / max(state.global_step - self.marked_at, 1))
        self._mark(state)

    def _step_ms(self, state: Any) -> float:
        """Of the epoch that ends here: the mean over its windows, without those three times as long as the median."""
        if not self.windows:
            self._end_window(state)
        usual = [window for window in self.windows if window <= 3 * statistics.median(self.windows)]
        self.windows = []
        return statistics.fmean(usual)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _go_on_from(self, epochs: int) -> None:
        """Take over the curve of an earlier start, as far as its checkpoint goes."""
        found = read_curve(self.folder, "score")
        steps = found.step_ms
        for place, epoch in enumerate(found.epochs):
            if epoch <= epochs:
                line = {"epoch": epoch, "loss": found.loss[place], "score": "", "seconds": found.seconds[place]}
                self.curve.append({**line, "step_ms": steps[place]})
        self.before = self.curve[-1]["seconds"] if self.curve else 0.0


def _mean_loss(history: Sequence[Mapping[str, Any]], after: int) -> float:
    """Over the steps after one, from the Trainer's log, whose entries are means over the steps since the last."""
    last, total = after, 0.0
    for entry in history:
        if "loss" in entry and entry["step"] > after:
            total += entry["loss"] * (entry["step"] - last)
            last = entry["step"]
    return total / max(last - after, 1)
