"""The run of one cell, from its last checkpoint to its end: epochs, evaluations, checkpoints and results."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexact import Recorder, extract, selection
from flexact.errors import FlexActError
from flexact.io.atomic_files import write_rows
from flexact.io.result_folder import check_same
from flexact.routing.sites import sites_of
from flexact.studies.cifar import checkpoint
from flexact.studies.cifar.methods import build, picking_sites
from flexact.studies.cifar.protocol import Cell, Protocol
from flexact.studies.cifar.ranks import Ranks, synced
from flexact.studies.cifar.step import SCHEDULE, TOTALS, Training, deterministic
from flexact.studies.cifar_data.augment import normalised
from flexact.studies.cifar_data.data import Images
from flexact.studies.device_lock import wait
from flexact.studies.grid.cell_task import CURVE, Stopped

HISTORY = "history.jsonl"
NETWORK = "network.safetensors"
AGREE_EVERY = 20
"""Steps between two waits for the device, and between two collectives that ask all ranks whether to stop or to save."""


class NanLoss(FlexActError):
    """The loss or a weight is not finite."""


class Epoch(NamedTuple):
    """One line of curve.csv."""

    epoch: int
    """From 1."""
    loss: float
    """Mean cross-entropy over the epoch's steps."""
    train_accuracy: float
    """In percent, on the augmented images, over the epoch."""
    test_accuracy: float | None
    """In percent, of the network as it would be extracted; None (an empty cell) if it was not evaluated."""
    lr: float
    """The learning rate of the epoch's last step."""
    seconds: float
    """Training time since the start of the run."""
    step_ms: float
    """Milliseconds per step, without evaluations and checkpoints."""


@dataclass(frozen=True)
class Outcome:
    """The result of a cell."""

    accuracy: float
    """In percent, of the extracted network on the test images; NaN on ranks other than the first."""
    losses: tuple[float, ...]
    """By epoch."""
    seconds: float
    step_ms: float
    """Training time per step of the final network: the median over its epochs, plus its share of picking."""
    picks: dict[str, str]
    """By site, in depth order; empty for methods that do not pick."""
    epochs: int
    devices: tuple[str, ...]
    """The devices on which the cell was trained; several if it was resumed on another one."""


class CellRun:
    """The run of a cell."""

    def __init__(
        self,
        cell: Cell,
        protocol: Protocol,
        images: Images,
        folder: Path,
        device: torch.device,
        report: Callable[[Epoch], object] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.cell, self.protocol, self.folder, self.device = cell, protocol, folder, device
        self.images = images.to(device)
        self.report, self.stop = report or (lambda _: None), stop or (lambda: False)
        self.ranks = Ranks.current()
        self.devices = [torch.cuda.get_device_name(device) if device.type == "cuda" else device.type]
        self.curve: list[Epoch] = []
        self.picking_ms: list[float] = []
        """Milliseconds per step, for each epoch of picking."""
        self.seconds_before = 0.0
        self.saved_at = -1

    def outcome(self) -> Outcome:
        """Train the cell to its end, and return the result; a finished cell is not trained again."""
        found = checkpoint.load(self.folder)
        if found is not None:
            about = found[0]
            check_same(self.folder, _identity(about), _identity(self._about(0)), ("cell", "protocol", "data"))
            if about.get("outcome") is not None:
                outcome = about["outcome"]
                return Outcome(**{**outcome, "losses": tuple(outcome["losses"]), "devices": tuple(about["devices"])})
        self.training = Training(self._network(), self.images, self.protocol, self.cell.seed, self.device, self.ranks)
        if found is not None:
            self._resume(*found)
        recorder = self._recorder()
        try:
            self._train(recorder)
            return self._finish()
        finally:
            if recorder is not None:
                with suppress(OSError):  # a full disk, which has raised already
                    recorder.close()

    def _network(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.cell.seed)
            config = self.protocol.config(self.cell.seed)
            network = build(self.cell.model, self.cell.method, self.images.classes, config, self.protocol.width)
        if self.protocol.norm == "synced":
            synced(network)
        if self.device.type == "cuda":
            return network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
        return network

    def _train(self, recorder: Recorder | None) -> None:
        training = self.training
        self.started = self.saved = time.monotonic()
        self._restart_timing()
        while not training.is_done:
            if training.steps_done % AGREE_EVERY == 0:
                wait(self.device)
            if self.ranks.count == 1 or training.steps_done % AGREE_EVERY == 0:
                self._stop_or_save()
            was_picking = training.is_picking
            training.step()
            if training.trained_steps % training.steps_per_epoch == 0:  # also at the rewind
                self._end_epoch(recorder, was_picking)
                if self.protocol.checkpoint_minutes == 0 and not training.is_done:
                    self._save()

    def _restart_timing(self) -> None:
        self.timed_from, self.timing_started, self.untimed = self.training.steps_done, time.monotonic(), 0.0

    def _stop_or_save(self) -> None:
        if self.ranks.any(self.stop(), self.device):
            self._save()
            raise Stopped(
                f"{self.cell.name} was stopped after step {self.training.steps_done} of {self.training.total_steps}; "
                f"start it again to resume from {self.folder / checkpoint.ABOUT}."
            )
        minutes = self.protocol.checkpoint_minutes
        due = minutes > 0 and time.monotonic() - self.saved >= 60 * minutes
        if self.ranks.any(due and self.ranks.writes, self.device):
            self._save()

    def _end_epoch(self, recorder: Recorder | None, was_picking: bool) -> None:
        """Record an epoch. The epochs in which the sites picked are not part of the curve."""
        training = self.training
        loss, right = training.totals()
        spent = time.monotonic() - self.timing_started - self.untimed
        step_ms = spent * 1e3 / (training.steps_done - self.timed_from)
        if was_picking:
            self.picking_ms.append(step_ms)
        else:
            self._extend_curve(loss, right, step_ms)
        if recorder is not None:
            with checkpoint.naming(self.folder / HISTORY):
                recorder.record(training.steps_done, epoch=training.steps_done / training.steps_per_epoch, loss=loss)
        self._restart_timing()

    def _extend_curve(self, loss: float, right: float, step_ms: float) -> None:
        training, epoch = self.training, len(self.curve) + 1
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss of epoch {epoch} is {loss}")
        accuracy = None
        if self.ranks.writes and (epoch == self.protocol.epochs or epoch % self.protocol.evaluate_every == 0):
            accuracy = self._accuracy(extracted(training.network))
        lr = training.lr(training.trained_steps - 1)
        line = Epoch(epoch, loss, 100 * right, accuracy, lr, self._seconds(), step_ms)
        self.curve.append(line)
        if self.ranks.writes:
            self._write_curve()
            self.report(line)

    def _accuracy(self, network: nn.Module) -> float:
        """The accuracy on the test images, in percent."""
        x, y = self.images.test_x, self.images.test_y
        size = 2000 if self.device.type == "cuda" else 250
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        training = network.training
        network.eval()
        with torch.inference_mode(), deterministic(self.device), self.training.autocast():
            for first in range(0, len(y), size):
                batch = normalised(x[first : first + size], self.images.mean, self.images.std)
                if self.device.type == "cuda":
                    batch = batch.contiguous(memory_format=torch.channels_last)
                right += (network(batch).argmax(1) == y[first : first + size]).sum()
        network.train(training)
        wait(self.device)
        return 100 * right.item() / len(y)

    def _finish(self) -> Outcome:
        """Save the extracted network, and return the result."""
        network, steps = self.training.network, self.training.network_steps
        step_ms = statistics.median(line.step_ms for line in self.curve)
        if self.picking_ms:  # the low median leaves out an epoch that compiled kernels, if there are two
            step_ms += statistics.median_low(self.picking_ms) * (self.training.steps_done - steps) / steps
        accuracy = self.curve[-1].test_accuracy
        picking = {site.name for site in picking_sites(network)}
        outcome = Outcome(
            accuracy=math.nan if accuracy is None else accuracy,
            losses=tuple(line.loss for line in self.curve),
            seconds=self._seconds(),
            step_ms=step_ms,
            picks={row.key: str(row.pick) for row in (selection(network) if picking else ()) if row.site in picking},
            epochs=len(self.curve),
            devices=tuple(self.devices),
        )
        if self.ranks.writes:
            about = self._about(self.training.steps_done) | {"outcome": asdict(outcome)}
            self._write(NETWORK, extracted(network).state_dict(), about)
        return outcome

    def _save(self) -> None:
        """Write a checkpoint. All ranks call this, and the first one writes."""
        training, begun = self.training, time.monotonic()
        state = training.state()
        if training.steps_done != self.saved_at:
            if self.ranks.writes:
                name = f"checkpoint-{training.steps_done}.safetensors"
                self._write(name, state, self._about(training.steps_done))
            self.saved_at = training.steps_done
        self.saved = time.monotonic()
        self.untimed += self.saved - begun

    def _write(self, name: str, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Write curve and checkpoint; raises before anything is written if a tensor is not finite."""
        # The evidence of candidates that were not dropped is NaN. A rewind does not reset
        # the NaNs that a diverged blend left in the schedule and the totals.
        found = [
            tensor.isfinite().all()
            for name, tensor in tensors.items()
            if not name.endswith(".evidence") and not name.startswith((SCHEDULE, TOTALS))
        ]
        if not bool(torch.stack(found).all()):
            raise self._not_finite(f"a weight after step {self.training.steps_done} is not finite")
        self._write_curve()
        checkpoint.save(self.folder, name, tensors, about)

    def _about(self, step: int) -> dict[str, Any]:
        return {
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "devices": self.devices,
            "cell": self.cell.to_dict(),
            "protocol": self.protocol.to_dict(),
            "images": [len(self.images.train_y), len(self.images.test_y)],
            "sha256": self.images.sha256,
            "step": step,
            "seconds": self._seconds() if step else 0.0,
            "curve": [line._asdict() for line in self.curve],
            "picking_ms": self.picking_ms,
        }

    def _resume(self, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        try:
            self.curve, self.picking_ms = [Epoch(**line) for line in about["curve"]], list(about["picking_ms"])
            self.devices = list(dict.fromkeys([*about["devices"], *self.devices]))
            self.seconds_before = float(about["seconds"])
            self.training.load(about["step"], tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FlexActError(
                f"{self.folder / checkpoint.ABOUT} does not fit this run ({type(error).__name__}: {error}). Remove "
                f"{self.folder} to train this cell from the start."
            ) from None
        self.saved_at = self.training.steps_done
        if self.ranks.writes:
            self._write_curve()

    def _recorder(self) -> Recorder | None:
        """The history of the picks, up to the step from which this run resumes."""
        if not self.ranks.writes or not picking_sites(self.training.network):
            return None
        with checkpoint.naming(self.folder / HISTORY):
            recorder = Recorder(self.training.network, self.folder / HISTORY, resume=True)
            recorder.rewind(self.saved_at)
            if not recorder.history:
                recorder.record(0, epoch=0)
            return recorder

    def _write_curve(self) -> None:
        with checkpoint.naming(self.folder / CURVE):
            if self.curve:
                write_rows(self.folder / CURVE, [line._asdict() for line in self.curve])
            else:
                (self.folder / CURVE).unlink(missing_ok=True)

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _not_finite(self, what: str) -> NanLoss:
        kept = f"the checkpoint of step {self.saved_at} is kept" if self.saved_at >= 0 else "there is no checkpoint yet"
        return NanLoss(f"{what}; the cell has failed, and {kept}. Try a smaller lr, in another --out.")


def extracted(network: nn.Module) -> nn.Module:
    """The network as extraction would return it with the current picks; itself if it has no sites."""
    return extract(network, commit=True) if sites_of(network) else network


def _identity(about: dict[str, Any]) -> dict[str, Any]:
    """The parts of a checkpoint that must be those of the run that resumes from it."""
    protocol = {name: value for name, value in about.get("protocol", {}).items() if name != "checkpoint_minutes"}
    data = {"images": about.get("images"), "sha256": about.get("sha256")}
    return {"cell": about.get("cell"), "protocol": protocol, "data": data}
