"""A cell's run, from where its folder stands to its end: epochs, evaluations, checkpoints, what it leaves behind."""

from __future__ import annotations

import math
import platform
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexact import Recorder, extract, selection
from flexact.errors import FlexActError
from flexact.io.atomic_files import write_rows
from flexact.io.markdown_tables import counted
from flexact.routing.sites import sites_of
from flexact.studies.cifar import checkpoint
from flexact.studies.cifar.methods import build, picking_sites
from flexact.studies.cifar.protocol import Cell, Protocol
from flexact.studies.cifar.ranks import Ranks, synced
from flexact.studies.cifar.step import Training
from flexact.studies.cifar_data.augment import normalised
from flexact.studies.cifar_data.data import Images
from flexact.studies.grid.curves import CURVE

HISTORY = "history.jsonl"
NETWORK = "network.safetensors"
CURVE_SECONDS = 5.0
"""From one writing of the curve to the next, where epochs are short; evaluations and checkpoints write it as well."""
AGREE_EVERY = 20
"""Steps from one question to all ranks, whether to stop or to save, to the next."""
_OPERATIONAL = ("checkpoint_minutes",)
"""What a run may be gone on with changed: it decides nothing about the results."""


class NanLoss(FlexActError):
    """The loss, or a weight, is not a finite number any more."""


class Stopped(FlexActError):
    """The run was asked to stop; it left a checkpoint."""

    exit_code = 128 + signal.SIGTERM


class Epoch(NamedTuple):
    """One line of curve.csv."""

    epoch: int
    """From 1."""
    loss: float
    """Cross-entropy, the mean over the epoch's steps."""
    train_accuracy: float
    """In percent, of the network in training on the augmented images, over the epoch."""
    test_accuracy: float | None
    """In percent, of the network as it would be extracted; None (an empty cell) where it was not evaluated."""
    lr: float
    """At the epoch's last step."""
    seconds: float
    """From the start of the run, time between a stop and going on left out."""
    step_ms: float
    """Milliseconds a step, evaluation and checkpoints left out."""


@dataclass(frozen=True)
class Outcome:
    """What a cell came to."""

    accuracy: float
    """In percent, of the extracted network on the test images; NaN on ranks other than the first."""
    losses: tuple[float, ...]
    """By epoch."""
    seconds: float
    step_ms: float
    """The median over epochs."""
    picks: dict[str, str]
    """By site, in depth order; none for methods that do not pick."""
    epochs: int
    devices: tuple[str, ...]
    """Where it was trained: one, unless it was gone on with on another."""


class CellRun:
    """A cell's run from where its folder stands to its end."""

    def __init__(
        self,
        cell: Cell,
        protocol: Protocol,
        images: Images,
        folder: Path,
        device: torch.device,
        report: Callable[[Epoch], object] | None,
        stop: Callable[[], bool] | None,
        blocks: Sequence[int] | None,
    ) -> None:
        self.cell, self.protocol, self.folder, self.device = cell, protocol, folder, device
        self.images = images.to(device)
        self.blocks = blocks
        self.report, self.stop = report or (lambda _: None), stop or (lambda: False)
        self.ranks = Ranks.current()
        self.devices = [torch.cuda.get_device_name(device) if device.type == "cuda" else device.type]
        self.curve: list[Epoch] = []
        self.seconds_before = 0.0
        self.saved_at = -1
        self.curve_written = 0.0

    def outcome(self) -> Outcome:
        found = checkpoint.load(self.folder)
        self.ranks.check_same(
            -1 if found is None else found[0]["step"],
            self.device,
            f"the ranks find different checkpoints in {self.folder}; it must be one folder that all hosts see.",
        )
        if found is not None:
            self._check(found[0])
            if found[0].get("outcome") is not None:
                return _outcome(self.folder, found[0])
        self.training = Training(self._built(), self.images, self.protocol, self.cell.seed, self.device, self.ranks)
        if found is not None:
            self._go_on(*found)
        recorder = self._recorder()
        try:
            self._train(recorder)
            return self._finish()
        finally:
            if recorder is not None:
                with suppress(OSError):  # of a full disk, which was told already
                    recorder.close()

    def _built(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.cell.seed)
            config = self.protocol.config(self.cell.seed)
            network = build(
                self.cell.model, self.cell.method, self.images.classes, config, self.protocol.width, self.blocks
            )
        if self.protocol.norm == "synced":
            synced(network)
        if self.device.type == "cuda":
            return network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
        return network

    def _train(self, recorder: Recorder | None) -> None:
        training, steps = self.training, self.training.steps_an_epoch
        self.started = self.saved = time.monotonic()
        self._mark()
        while training.steps_done < training.total_steps:
            self._interrupt()
            training.step()
            if training.steps_done % steps == 0:
                self._end_epoch(recorder)
                if self.protocol.checkpoint_minutes == 0 and training.steps_done < training.total_steps:
                    self._save()

    def _mark(self) -> None:
        """Time steps from here on."""
        self.marked_at, self.marked = self.training.steps_done, time.monotonic()
        self.aside = 0.0

    def _interrupt(self) -> None:
        """Stop or save between two steps where it is time to."""
        at_once = self.ranks.count == 1 or self.training.steps_done % AGREE_EVERY == 0
        if not at_once:
            return
        if self.ranks.agree(self.stop(), self.device):
            self._save()
            raise Stopped(
                f"{self.cell.name} was stopped after step {self.training.steps_done} of {self.training.total_steps}; "
                f"start it again to go on from {self.folder / checkpoint.ABOUT}."
            )
        minutes = self.protocol.checkpoint_minutes
        due = minutes > 0 and time.monotonic() - self.saved >= 60 * minutes
        if self.ranks.agree(due and self.ranks.writes, self.device):
            self._save()

    def _end_epoch(self, recorder: Recorder | None) -> None:
        training = self.training
        loss, right = training.totals()
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss of epoch {training.epochs_done} is {loss}")
        now = time.monotonic()
        step_ms = (now - self.marked - self.aside) * 1e3 / (training.steps_done - self.marked_at)
        epoch = training.epochs_done
        last = epoch == self.protocol.epochs
        accuracy = None
        if self.ranks.writes and (last or epoch % self.protocol.evaluate_every == 0):
            accuracy = self._accuracy(extracted(training.network))
        lr = training.lr(training.steps_done - 1)
        line = Epoch(epoch, loss, 100 * right, accuracy, lr, self._seconds(), step_ms)
        self.curve.append(line)
        if self.ranks.writes:
            if recorder is not None:
                with checkpoint.naming(self.folder / HISTORY):
                    recorder.record(training.steps_done, epoch=epoch, loss=loss)
            if accuracy is not None or time.monotonic() - self.curve_written > CURVE_SECONDS:
                self._write_curve()
            self.report(line)
        self._mark()

    def _accuracy(self, network: nn.Module) -> float:
        """In percent, on the test images."""
        x, y = self.images.test_x, self.images.test_y
        size = 2000 if self.device.type == "cuda" else 250
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        training = network.training
        network.eval()
        with torch.inference_mode(), self.training.autocast():
            for first in range(0, len(y), size):
                batch = normalised(x[first : first + size], self.images.mean, self.images.std)
                if self.device.type == "cuda":
                    batch = batch.contiguous(memory_format=torch.channels_last)
                right += (network(batch).argmax(1) == y[first : first + size]).sum()
        network.train(training)
        return 100 * right.item() / len(y)

    def _finish(self) -> Outcome:
        """Keep what extraction leaves behind, and say what it came to."""
        network = self.training.network
        accuracy = self.curve[-1].test_accuracy  # of the network as extracted, from the last epoch
        outcome = Outcome(
            accuracy=math.nan if accuracy is None else accuracy,
            losses=tuple(line.loss for line in self.curve),
            seconds=self._seconds(),
            step_ms=statistics.median(line.step_ms for line in self.curve),
            picks=selection(network).leading if picking_sites(network) else {},
            epochs=len(self.curve),
            devices=tuple(self.devices),
        )
        if self.ranks.writes:
            about = self._about() | {"outcome": asdict(outcome)}
            state = extracted(network).state_dict()
            self._check_finite(state)
            self._write_curve()
            checkpoint.save(self.folder, NETWORK, state, about)
        return outcome

    def _save(self) -> None:
        """Write a checkpoint; all ranks come here together, and the first writes."""
        training, begun = self.training, time.monotonic()
        state = training.state()
        self.saved = time.monotonic()
        if training.steps_done == self.saved_at:
            return
        if self.ranks.writes:
            self._check_finite(state)
            self._write_curve()
            checkpoint.save(self.folder, f"checkpoint-{training.steps_done}.safetensors", state, self._about())
        self.saved_at = training.steps_done
        self.saved = time.monotonic()
        self.aside += self.saved - begun

    def _about(self) -> dict[str, Any]:
        return {
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "devices": self.devices,
            "cell": self.cell.to_dict(),
            "protocol": self.protocol.to_dict(),
            "images": [len(self.images.train_y), len(self.images.test_y)],
            "sha256": self.images.sha256,
            "step": self.training.steps_done,
            "epoch": self.training.epochs_done,
            "seconds": self._seconds(),
            "curve": [line._asdict() for line in self.curve],
        }

    def _check(self, about: dict[str, Any]) -> None:
        """Refuse the checkpoint of another run."""
        path = self.folder / checkpoint.ABOUT
        own = {
            "cell": self.cell.to_dict(),
            "protocol": self.protocol.to_dict(),
            "images": {
                "training and test": [len(self.images.train_y), len(self.images.test_y)],
                "SHA-256": self.images.sha256,
            },
        }
        found = {**about, "images": {"training and test": about.get("images"), "SHA-256": about.get("sha256")}}
        for part, wanted in own.items():
            there = found.get(part)
            there = there if isinstance(there, dict) else {}
            names = [name for name in {**there, **wanted} if there.get(name) != wanted.get(name)]
            names = [name for name in names if name not in _OPERATIONAL]
            if names:
                told = "; ".join(f"{name}: {there.get(name)} → {wanted.get(name)}" for name in names)
                raise FlexActError(
                    f"{path} is of another run ({part}: {told}). Give another folder, or remove this one to start anew."
                )

    def _go_on(self, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        path = self.folder / checkpoint.ABOUT
        try:
            self.curve = [Epoch(**line) for line in about["curve"]]
            self.devices = list(dict.fromkeys([*about["devices"], *self.devices]))
            self.seconds_before = float(about["seconds"])
            step = about["step"]
            if not 0 <= step <= self.training.total_steps or len(self.curve) != step // self.training.steps_an_epoch:
                raise ValueError(f"step {step} and {counted(len(self.curve), 'epoch')} do not belong together")
            self.training.load(step, tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FlexActError(
                f"{path} or the tensors it names do not fit this run ({type(error).__name__}: {error}). Remove "
                f"{self.folder} to train this cell from the start."
            ) from None
        self.saved_at = step
        if self.ranks.writes:
            self._write_curve()

    def _recorder(self) -> Recorder | None:
        """The history of the picks, cut to where this run goes on."""
        if not self.ranks.writes or not picking_sites(self.training.network):
            return None
        with checkpoint.naming(self.folder / HISTORY):
            recorder = Recorder(self.training.network, self.folder / HISTORY)
            recorder.rewind(self.saved_at)
            if not recorder.history:
                recorder.record(0, epoch=0)
            return recorder

    def _write_curve(self) -> None:
        self.curve_written = time.monotonic()
        with checkpoint.naming(self.folder / CURVE):
            if self.curve:
                lines = [{**line._asdict(), "test_accuracy": _cell(line.test_accuracy)} for line in self.curve]
                write_rows(self.folder / CURVE, lines)
            else:
                (self.folder / CURVE).unlink(missing_ok=True)

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _check_finite(self, tensors: dict[str, Tensor]) -> None:
        # The evidence of candidates that were not dropped is NaN.
        found = [tensor.isfinite().all() for name, tensor in tensors.items() if not name.endswith(".evidence")]
        devices = {one.device for one in found}  # the weights that a rewind restores are in host memory
        if not all(bool(torch.stack([one for one in found if one.device == device]).all()) for device in devices):
            raise self._not_finite(f"a weight or the loss after step {self.training.steps_done} is not finite")

    def _not_finite(self, what: str) -> NanLoss:
        kept = f"the last good checkpoint, of step {self.saved_at}, is kept"
        kept = kept if self.saved_at >= 0 else "no checkpoint was due yet"
        return NanLoss(f"{what}; the cell is given up, and {kept}. Try a smaller lr, in another --out.")


def extracted(network: nn.Module) -> nn.Module:
    """The network as extraction leaves it, with the picks of now; itself where there are no sites."""
    return extract(network, commit=True) if sites_of(network) else network


def _cell(value: float | None) -> float | str:
    return "" if value is None else value


def _outcome(folder: Path, about: dict[str, Any]) -> Outcome:
    fields = about["outcome"]
    try:
        return Outcome(**{**fields, "losses": tuple(fields["losses"]), "devices": tuple(about["devices"])})
    except (KeyError, TypeError) as error:
        raise FlexActError(
            f"{folder / checkpoint.ABOUT} has no outcome of a cell ({error}). Remove {folder} to train it anew."
        ) from None
