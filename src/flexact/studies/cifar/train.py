"""The training of one cell, from its last checkpoint to its end.

A cell's folder contains checkpoint.pt while it is trained, curve.csv with one line per epoch, history.jsonl with the
probabilities of all sites during training, and in the end network.safetensors, the extracted network.
"""

from __future__ import annotations

import gc
import io
import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from flexact import Recorder, extract, selection
from flexact.errors import FlexActError, missing_extra
from flexact.io.atomic_files import write_rows, write_whole
from flexact.routing.sites import sites_of
from flexact.studies.cifar.methods import build, picking_sites
from flexact.studies.cifar.protocol import Cell, Protocol, Result
from flexact.studies.cifar.training import Training, deterministic
from flexact.studies.cifar_data.augment import normalised
from flexact.studies.cifar_data.data import Images
from flexact.studies.cuda_graph import DEVICE, study_stream, wait
from flexact.studies.grid.cell_task import CURVE, Stopped
from flexact.studies.grid.study import DONE, picks_column

CHECKPOINT, HISTORY, NETWORK = "checkpoint.pt", "history.jsonl", "network.safetensors"
WAIT_EVERY = 20
"""Steps between two waits for the device."""


class Epoch(NamedTuple):
    """One line of curve.csv."""

    epoch: int
    """The number of the epoch, from 1."""
    loss: float
    """Mean cross-entropy over the epoch's steps."""
    train_accuracy: float
    """The accuracy on the augmented images of the epoch, in percent."""
    test_accuracy: float | None
    """The accuracy of the extracted network, in percent; None (an empty cell) if it was not evaluated."""
    lr: float
    """The learning rate of the epoch's last step."""
    seconds: float
    """Training time since the start of the run."""
    step_ms: float
    """Milliseconds per step, without evaluations and checkpoints."""


def train_cell(
    cell: Cell,
    protocol: Protocol,
    images: Images,
    folder: Path,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train a cell, or resume it from the checkpoint in its folder. A resumed run is bit-identical to an uninterrupted
    one on the same device.

    stop: called before each step; once it returns True, a checkpoint is written and `Stopped` raised.
    """
    try:
        with DEVICE, study_stream(device):
            return _CellRun(cell, protocol, images.to(device), folder, device, stop).result()
    finally:
        gc.collect()  # a CUDA graph is part of a reference cycle, which holds its memory


@dataclass
class _CellRun:
    """The run of a cell."""

    cell: Cell
    protocol: Protocol
    images: Images
    folder: Path
    device: torch.device
    stop: Callable[[], bool]

    def __post_init__(self) -> None:
        device = self.device
        self.training = Training(self._network(), self.images, self.protocol, self.cell.seed, device)
        self.devices = [torch.cuda.get_device_name(device) if device.type == "cuda" else device.type]
        self.curve: list[Epoch] = []
        self.picking_ms: list[float] = []
        """Milliseconds per step, for each epoch of picking."""
        self.seconds_before = 0.0
        if (self.folder / CHECKPOINT).is_file():
            self._resume()
        self._write_curve()
        self.started = self.saved = time.monotonic()

    def result(self) -> Result:
        """Train the cell to its end, and return the result."""
        recorder = self._recorder() if picking_sites(self.training.network) else None
        try:
            self._train(recorder)
            return self._finish()
        finally:
            if recorder is not None:
                with suppress(OSError):  # a full disk has already raised an error
                    recorder.close()

    def _network(self) -> nn.Module:
        cell, protocol = self.cell, self.protocol
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(cell.seed)
            network = build(cell.model, cell.method, self.images.classes, protocol.config(cell.seed), protocol.width)
        if self.device.type == "cuda":
            return network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
        return network

    def _train(self, recorder: Recorder | None) -> None:
        training = self.training
        self._restart_timing()
        while not training.is_done:
            if training.steps_done % WAIT_EVERY == 0:
                wait(self.device)
            if self.stop():
                self._save()
                raise Stopped(
                    f"{self.cell.name} was stopped after step {training.steps_done} of {training.total_steps}; start "
                    f"it again to resume from {self.folder / CHECKPOINT}."
                )
            if 0 < 60 * self.protocol.checkpoint_minutes <= time.monotonic() - self.saved:
                self._save()
            was_picking = training.is_picking
            training.step()
            if training.trained_steps % training.steps_per_epoch == 0:  # also at the rewind
                self._end_epoch(recorder, was_picking)
                if self.protocol.checkpoint_minutes == 0 and not training.is_done:
                    self._save()

    def _restart_timing(self) -> None:
        self.timed_from, self.timing_started = self.training.steps_done, time.monotonic()

    def _end_epoch(self, recorder: Recorder | None, was_picking: bool) -> None:
        """Record an epoch. The epochs in which the sites picked are not part of the curve."""
        training = self.training
        loss, right = training.totals()
        step_ms = (time.monotonic() - self.timing_started) * 1e3 / (training.steps_done - self.timed_from)
        if was_picking:
            self.picking_ms.append(step_ms)
        else:
            self._extend_curve(loss, right, step_ms)
        if recorder is not None:
            recorder.record(training.steps_done, epoch=training.steps_done / training.steps_per_epoch, loss=loss)
        self._restart_timing()

    def _extend_curve(self, loss: float, right: float, step_ms: float) -> None:
        training, epoch = self.training, len(self.curve) + 1
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss of epoch {epoch} is {loss}")
        accuracy = None
        if epoch == self.protocol.epochs or epoch % self.protocol.evaluate_every == 0:
            accuracy = self._accuracy(extracted(training.network))
        lr = training.lr(training.trained_steps - 1)
        self.curve.append(Epoch(epoch, loss, 100 * right, accuracy, lr, self._seconds(), step_ms))
        self._write_curve()

    def _accuracy(self, network: nn.Module) -> float:
        """The accuracy on the test images, in percent."""
        images, on_gpu = self.images, self.device.type == "cuda"
        layout = torch.channels_last if on_gpu else torch.contiguous_format
        answers = []
        network.eval()
        with torch.inference_mode(), deterministic(self.device), self.training.autocast():
            for part in images.test_x.split(2000 if on_gpu else 250):
                batch = normalised(part, images.mean, images.std).contiguous(memory_format=layout)
                answers.append(network(batch).argmax(1))
        network.train()
        right = (torch.cat(answers) == images.test_y).sum()
        wait(self.device)
        return 100 * right.item() / len(images.test_y)

    def _finish(self) -> Result:
        """Save the extracted network, and return the result."""
        network, steps = self.training.network, self.training.network_steps
        step_ms = statistics.median(line.step_ms for line in self.curve)
        if self.picking_ms:  # the median of two epochs is the faster one, because the other also compiled kernels
            step_ms += statistics.median_low(self.picking_ms) * (self.training.steps_done - steps) / steps
        self._check_weights()
        picking = {site.name for site in picking_sites(network)}
        try:
            from safetensors.torch import save
        except ImportError:
            raise missing_extra("safetensors", "safetensors") from None
        weights = {name: one.cpu().contiguous() for name, one in extracted(network).state_dict().items()}
        write_whole(self.folder / NETWORK, save(weights))
        (self.folder / CHECKPOINT).unlink(missing_ok=True)
        picks = {row.key: str(row.pick) for row in (selection(network) if picking else ()) if row.site in picking}
        return Result(
            **self.cell.to_dict(),
            state=DONE,
            accuracy=self.curve[-1].test_accuracy or 0.0,
            loss=self.curve[-1].loss,
            epochs=len(self.curve),
            seconds=self._seconds(),
            step_ms=step_ms if len(self.devices) == 1 else math.nan,
            picks=picks_column(picks),
            device=" + ".join(self.devices),
        )

    def _save(self) -> None:
        """Replace the checkpoint atomically, if every weight is finite. The time that it takes is not counted."""
        begun = time.monotonic()
        self._check_weights()
        state = {
            "training": self.training.state_dict(),
            "devices": self.devices,
            "seconds": self._seconds(),
            "curve": [tuple(line) for line in self.curve],
            "picking_ms": self.picking_ms,
        }
        data = io.BytesIO()
        torch.save(state, data)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / CHECKPOINT, data.getvalue())
        self.saved = time.monotonic()
        self.timing_started += self.saved - begun

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.training.load_state_dict(state["training"])
            self.devices = list(dict.fromkeys([*state["devices"], *self.devices]))
            self.seconds_before = state["seconds"]
            self.curve, self.picking_ms = [Epoch(*line) for line in state["curve"]], state["picking_ms"]
        except Exception as error:  # torch raises many types
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise FlexActError(
                f"{path} is damaged, or does not fit this run ({words}). Remove {self.folder} to train this cell from "
                "the start."
            ) from None

    def _recorder(self) -> Recorder:
        """Return the Recorder of the picks. Its history ends at the step from which this run resumes."""
        recorder = Recorder(self.training.network, self.folder / HISTORY, resume=True)
        recorder.rewind(self.training.steps_done)
        if not recorder.history:
            recorder.record(0, epoch=0)
        return recorder

    def _write_curve(self) -> None:
        if self.curve:
            write_rows(self.folder / CURVE, [line._asdict() for line in self.curve])
        else:
            (self.folder / CURVE).unlink(missing_ok=True)

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _check_weights(self) -> None:
        weights = [parameter.isfinite().all() for parameter in self.training.network.parameters()]
        if not bool(torch.stack(weights).all()):
            raise self._not_finite(f"a weight after step {self.training.steps_done} is not finite")

    def _not_finite(self, what: str) -> FlexActError:
        return FlexActError(f"{what}; the last checkpoint is kept. Try a smaller --lr, with another --out.")


def extracted(network: nn.Module) -> nn.Module:
    """The network as extraction would return it with the current picks; itself if it has no sites."""
    return extract(network, commit=True) if sites_of(network) else network
