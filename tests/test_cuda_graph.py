"""Tests of captured training steps: they train like eager ones, over drops, rewinds and the commitment."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexact
from flexact import FlexConfig, Schedule
from flexact.cuda_graph import MANY, WARM_UP, CapturedStep
from flexact.errors import FlexActError
from flexact.ops import dispatch

NETWORK_STEPS = 60
REWINDS = FlexConfig(rewind=True)

PLAIN = (nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
NORMALISED = (nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))


@pytest.fixture(autouse=True)
def few_steps() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*steps are few")
        yield


class Run:
    """A training of a small network. It picks by a trial without normalisation layers, and by a blend with them."""

    def __init__(
        self, layers: Sequence[nn.Module], device: str, adam: bool = True, config: FlexConfig = REWINDS
    ) -> None:
        torch.manual_seed(0)
        self.model = flexact.convert(copy.deepcopy(nn.Sequential(*layers)).to(device), config=config)
        self.lr = torch.tensor(0.01, device=device)
        if adam:
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
                self.model.parameters(), lr=self.lr, fused=True, capturable=device == "cuda"
            )
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, NETWORK_STEPS)
        self.schedule = Schedule(self.model, 4 * NETWORK_STEPS, self.optimizer, [self.scheduler])
        self.generator = torch.Generator().manual_seed(1)

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def batch(self, size: int = 8) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 4, generator=self.generator)
        return x, x.prod(1, keepdim=True).tanh()

    def losses(self, step: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
        torch.manual_seed(2)  # for dropout
        found = []
        for number in range(self.schedule.total_steps):
            loss = step(*self.batch(5 if number % 17 == 16 else 8))  # the last batch of an epoch is smaller
            self.scheduler.step()
            self.schedule.step(loss)
            found.append(loss)
            if number % 40 == 39:
                self.evaluate()
        return torch.stack(found).tolist()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        self.model(torch.zeros(3, 4, device=self.lr.device))
        self.model.train()

    def picks(self) -> list[str]:
        return [row.pick for row in flexact.selection(self.model)]

    def routing(self) -> tuple[Any, ...]:
        """Returns the network's output, and the memory of the optimizer's state."""
        sites = self.schedule.router.sites
        state = [id(one.get("exp_avg")) for one in self.optimizer.state.values()]
        return self.schedule.router.trying, [site.alive for site in sites], state


@pytest.mark.parametrize("layers", [PLAIN, NORMALISED], ids=["trial", "blend"])
def test_on_a_cpu_the_steps_are_eager(layers: Sequence[nn.Module]) -> None:
    plain, ours = Run(layers, "cpu"), Run(layers, "cpu")
    step = CapturedStep(ours.train, ours.schedule)
    assert ours.losses(step) == plain.losses(lambda *batch: plain.train(*batch).detach())
    assert ours.schedule.committed
    assert ours.picks() == plain.picks()
    assert not step.captured


class Imitated(CapturedStep):
    """A captured step on a CPU. Its fake graphs check at every replay that nothing they hold has changed."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.train, run.schedule)
        self.run, self.captures, self.replays = run, 0, 0

    def __call__(self, *batch: Tensor) -> Tensor:
        return self._replayed_or_run(batch, torch.device("cpu"))

    def _capture(self, batch: Sequence[Tensor], device: torch.device) -> Any:
        self.captures += 1
        self._inputs = [torch.empty_like(tensor) for tensor in batch]
        return _Graph(self, self.run.routing(), [dict(group) for group in self.run.optimizer.param_groups])


class _Graph:
    def __init__(self, step: Imitated, routing: tuple[Any, ...], groups: list[dict[str, Any]]) -> None:
        self.step, self.routing, self.groups = step, routing, groups

    def replay(self) -> None:
        assert self.step.run.routing() == self.routing
        assert all(a[key] is b[key] for a, b in zip(self.groups, self.step.run.optimizer.param_groups, strict=True)
                   for key in a)  # fmt: skip
        self.step._loss = self.step._run(self.step._inputs)
        self.step.replays += 1


@pytest.mark.parametrize("layers", [PLAIN, NORMALISED], ids=["trial", "blend"])
def test_it_is_captured_again_whenever_the_network_changes(layers: Sequence[nn.Module]) -> None:
    plain, ours = Run(layers, "cpu"), Run(layers, "cpu")
    step = Imitated(ours)
    assert ours.losses(step) == plain.losses(lambda *batch: plain.train(*batch).detach())
    assert ours.schedule.rewound_at is not None
    assert step.captures >= 4
    assert step.replays > ours.schedule.total_steps / 2


def test_it_is_captured_again_after_a_state_is_loaded_and_after_a_reset() -> None:
    run = Run(PLAIN, "cpu")
    step = Imitated(run)
    for change in (lambda: run.optimizer.load_state_dict(run.optimizer.state_dict()), step.reset):
        for _ in range(WARM_UP + 2):
            run.schedule.step(step(*run.batch()))
        assert step.captured
        change()
        eager = step.replays
        run.schedule.step(step(*run.batch()))
        assert step.replays == eager
    assert step.captures == 2


def test_a_number_that_keeps_changing_is_never_captured_and_warns() -> None:
    run = Run(PLAIN, "cpu")
    step = Imitated(run)

    def train(steps: int) -> None:
        for number in range(steps):
            run.optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            run.schedule.step(step(*run.batch()))

    with pytest.warns(UserWarning, match="learning rate on the GPU") as caught:
        train(2 * MANY)
    assert step.captures == 0
    assert len([one for one in caught if "not captured" in str(one.message)]) == 1


def test_persistent_new_shapes_are_captured() -> None:
    run = Run(NORMALISED, "cpu")
    step = Imitated(run)
    for size in [8] * 5 + [6] * 5:
        run.schedule.step(step(*run.batch(size)))
    assert (step.captures, step.replays) == (2, 4)


def test_arguments_that_are_no_tensors_are_refused() -> None:
    run = Run(PLAIN, "cpu")
    with pytest.raises(FlexActError, match="takes the tensors of a batch; got 3"):
        CapturedStep(run.train, run.schedule)(run.batch()[0], 3)  # type: ignore[arg-type]
    with pytest.raises(FlexActError, match="must return the loss, a tensor; got None"):
        CapturedStep(lambda *batch: None, run.schedule)(*run.batch())  # type: ignore[arg-type,return-value]


gpu_marks = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


def gpu_param(*values: Any, **options: Any) -> Any:
    return pytest.param(*values, marks=gpu_marks, **options)


WITHOUT_DROPOUT = tuple(layer for layer in NORMALISED if not isinstance(layer, nn.Dropout))


@pytest.mark.parametrize(
    ("layers", "adam", "config", "kernels"),
    [
        gpu_param(PLAIN, True, REWINDS, "auto", id="trial"),
        gpu_param(PLAIN, False, REWINDS, "auto", id="trial-sgd"),
        gpu_param(WITHOUT_DROPOUT, True, REWINDS, "auto", id="blend"),
        gpu_param(WITHOUT_DROPOUT, True, REWINDS, "closed_form", id="blend-closed-form"),
        gpu_param(WITHOUT_DROPOUT, False, FlexConfig(rewind=True, share="site"), "auto", id="blend-sgd"),
        gpu_param(WITHOUT_DROPOUT, True, FlexConfig(init="original", warmup=0.2, rewind=False), "auto", id="warm-up"),
    ],
)
def test_on_a_gpu_the_losses_equal_those_of_eager_steps(
    layers: Sequence[nn.Module],
    adam: bool,
    config: FlexConfig,
    kernels: dispatch.Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, kernels)
    plain, ours = (Run(layers, "cuda", adam, config) for _ in range(2))
    step = CapturedStep(ours.train, ours.schedule)
    captures: list[int] = []
    capture = step._capture
    step._capture = lambda *arguments: captures.append(ours.schedule.steps_done) or capture(*arguments)  # type: ignore
    expected = plain.losses(lambda *batch: plain.train(*(tensor.cuda() for tensor in batch)).detach())
    assert ours.losses(step) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert ours.picks() == plain.picks()
    assert len(captures) >= 3, captures
    assert step.captured


@pytest.mark.parametrize("device", [gpu_param("cuda")])
def test_on_a_gpu_dropout_differs_between_replays(device: str) -> None:
    run = Run(NORMALISED, device)
    run.lr.zero_()
    step = CapturedStep(run.train, run.schedule)
    batch = run.batch()
    losses = []
    for _ in range(WARM_UP + 4):
        losses.append(step(*batch))
        run.schedule.step(losses[-1])
    assert step.captured
    assert len({loss.item() for loss in losses}) == len(losses)


def refuse_a_step_that_reads_a_value() -> None:
    run = Run(PLAIN, "cuda")

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = run.train(x, y)
        assert loss.item() < 1e6
        return loss

    step = CapturedStep(train, run.schedule)
    for _ in range(WARM_UP):
        run.schedule.step(step(*run.batch()))
    batch = run.batch()
    with pytest.raises(FlexActError, match="must not read values on the host"):
        step(*batch)


@pytest.mark.parametrize("program", [gpu_param("import test_cuda_graph as t; t.refuse_a_step_that_reads_a_value()")])
def test_on_a_gpu_a_step_that_reads_a_value_is_refused_by_name(program: str) -> None:
    """A failed capture leaves torch's random generator in capture mode, so the test runs in its own process."""
    path = os.pathsep.join([str(Path(__file__).parent), *map(os.path.abspath, sys.path)])
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, check=True)


@pytest.mark.parametrize("device", [gpu_param("cuda")])
def test_on_a_gpu_a_small_step_is_faster(device: str) -> None:
    def seconds(captures: bool) -> float:
        run = Run([nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU()] + [nn.Linear(64, 64), nn.ReLU()] * 6, device)
        x = torch.randn(64, 4, device=device)
        y = torch.zeros(64, 64, device=device)
        step = CapturedStep(run.train, run.schedule) if captures else run.train
        for _ in range(10):
            run.schedule.step(step(x, y))
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            run.schedule.step(step(x, y))
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 20

    eager, captured = seconds(False), seconds(True)
    print(f"a step takes {1e3 * eager:.2f} ms eagerly and {1e3 * captured:.2f} ms captured: {captured / eager:.2f}")
    assert captured < eager
