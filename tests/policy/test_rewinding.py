"""Tests of rewinding: after the commitment, a run is that of the plain network with these picks, from the same
start.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flexact
from flexact import FlexActError, FlexConfig, Schedule, convert, param_groups, selection
from flexact.policy import rewinding as rewinding_file
from flexact.policy import step_hooks
from flexact.routing.sites import sites_of

STEPS = 20
CANDIDATES = ("relu", "gelu", "tanh")
CONFIG = FlexConfig(candidates=CANDIDATES, rewind=True, commit_at=0.5)
Params = list[dict[str, Any]]
Make = Callable[[Params], torch.optim.Optimizer]


class Network(nn.Module):
    """A small convolutional network with batch norm and a buffer that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.act = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.first, self.second, self.last = nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        h = self.act(self.norm(self.conv(x))).flatten(1)
        return self.last(self.second(self.first(h)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 1, 4, 4, generator=generator)
    return x, (x.sum((1, 2, 3)) > 0).long()


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return nn.functional.cross_entropy(model(x), y)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Makes one step of any optimizer, with a closure for the one that needs it."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        return float(optimizer.step(closure).detach())
    loss = closure()
    optimizer.step()
    return loss.item()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers, except those of the sites."""
    return {name: t.detach().clone() for name, t in rewinding_file._tensors(model).items()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def rewound(make: Make, config: FlexConfig = CONFIG) -> tuple[nn.Module, Schedule, list[float]]:
    """Trains a run with a rewind, whose batches restart after it. Returns the losses after the rewind."""
    model = convert(Network(), config=config).train()
    optimizer = make(param_groups(model))
    schedule = Schedule(model, STEPS, optimizer)
    losses = []
    for step in range(STEPS):
        losses.append(stepped(model, optimizer, step - (schedule.rewound_at or 0)))
        schedule.step()
    assert schedule.rewound_at == schedule.commit_step == 10
    return model, schedule, losses[10:]


def plain_with_picks(model: nn.Module) -> nn.Module:
    return flexact.load_picks(Network(), selection(model)).train()


def trained_plain(model: nn.Module, make: Make, steps: int = STEPS - 10) -> tuple[nn.Module, list[float]]:
    """Trains the plain network with a model's picks from the same start, on the same batches."""
    plain = plain_with_picks(model)
    optimizer = make([{"params": list(plain.parameters())}])
    return plain, [stepped(plain, optimizer, step) for step in range(steps)]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW with a tensor for its rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1, lr_decay=0.1),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
}


# After the rewind: the training of the plain network


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_after_the_rewind_the_run_is_bit_identical_to_that_of_the_plain_network(make: Make) -> None:
    model, _, losses = rewound(make)
    plain, expected = trained_plain(model, make)
    assert losses == expected
    assert_equal(weights(model), weights(plain))
    assert int(model.norm.num_batches_tracked) == 10
    assert float(model.calls) == 10
    extracted = flexact.extract(model).eval()
    assert torch.equal(extracted(batch(99)[0]), plain.eval()(batch(99)[0]))


def test_lbfgs_is_restarted_too() -> None:
    """Up to rounding: its one flat vector contains the logits' zeros."""

    def make(p: Params) -> torch.optim.Optimizer:
        every = [parameter for group in p for parameter in group["params"]]
        return torch.optim.LBFGS(every, lr=0.01, max_iter=2)

    model, _, losses = rewound(make)
    plain, expected = trained_plain(model, make)
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(model)[name], tensor, rtol=1e-3, atol=1e-4)


def test_without_rewind_the_weights_stay() -> None:
    model = convert(Network(), config=FlexConfig(candidates=CANDIDATES, rewind=False, commit_at=0.5))
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05, momentum=0.9)
    schedule = Schedule(model, STEPS, optimizer)
    assert schedule.state_dict()["start"] is None  # no copy of the weights
    for step in range(10):
        stepped(model, optimizer, step)
        before = weights(model)
        schedule.step()
        assert_equal(weights(model), before)
    assert schedule.committed
    assert schedule.rewound_at is None
    assert optimizer.state[model.conv.weight]["momentum_buffer"].any()
    assert model.conv.weight.grad is not None


def test_the_rewind_is_in_place_clears_gradients_and_does_not_change_the_sites() -> None:
    model = convert(Network(), config=CONFIG)
    start = weights(model)
    optimizer = torch.optim.Adam(param_groups(model), lr=0.01)
    schedule = Schedule(model, STEPS, optimizer)
    tensors = [(t, t.data_ptr()) for t in rewinding_file._tensors(model).values()]
    for step in range(10):
        stepped(model, optimizer, step)
        logits = [site.logits.detach().clone() for site in sites_of(model)]
        schedule.step()
    assert_equal(weights(model), start)
    assert all(tensor.data_ptr() == place for tensor, place in tensors)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    assert schedule.committed
    for site, before in zip(sites_of(model), logits, strict=True):
        assert torch.equal(site.logits, before)
        assert not site.at_start()
        assert sorted(site.dropped_at[0].tolist())[0] == -1
        assert max(site.dropped_at[0].tolist()) == 10


def test_gradients_accumulated_before_the_rewind_are_gone() -> None:
    """The loop clears gradients after schedule.step(), or not at all until the next micro-batch."""

    def run(model: nn.Module, schedule: Schedule | None, count: int) -> list[float]:
        groups = param_groups(model) if schedule else [{"params": list(model.parameters())}]
        optimizer, losses = torch.optim.SGD(groups, lr=0.05, momentum=0.9), []
        for step in range(count):
            begun = (schedule.rewound_at or 0) if schedule else 0
            for part in range(2):
                loss = loss_of(model, 2 * (step - begun) + part) / 2
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            if schedule is not None:
                schedule.step()
                if schedule.rewound_at == schedule.steps_done:
                    continue
            optimizer.zero_grad()
        return losses

    model = convert(Network(), config=CONFIG)
    losses = run(model, Schedule(model, STEPS), STEPS)[20:]
    plain = plain_with_picks(model)
    assert losses == run(plain, None, 10)
    assert_equal(weights(model), weights(plain))


def test_a_pretrained_network_rewinds_to_its_pretrained_weights() -> None:
    config = FlexConfig(candidates=CANDIDATES, init="original", warmup=0.2, rewind=True, commit_at=0.5)
    torch.manual_seed(3)
    pretrained = Network()
    with torch.no_grad():
        for parameter in pretrained.parameters():
            parameter.add_(torch.randn_like(parameter))
    start = weights(pretrained)
    model = convert(copy.deepcopy(pretrained), config=config)
    optimizer = torch.optim.AdamW(param_groups(model), lr=0.01)
    schedule = Schedule(model, STEPS, optimizer)
    for step in range(10):
        stepped(model, optimizer, step)
        schedule.step()
    assert_equal(weights(model), start)
    losses = [stepped(model, optimizer, step) for step in range(5)]
    plain = flexact.load_picks(pretrained, selection(model))
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    assert losses == [stepped(plain, other, step) for step in range(5)]
    assert_equal(weights(model), weights(plain))


def test_a_model_that_is_committed_already_has_nothing_to_rewind() -> None:
    model = flexact.commit(convert(Network(), config=CONFIG))
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05)
    schedule = Schedule(model, STEPS, optimizer)
    for step in range(STEPS):
        stepped(model, optimizer, step)
        schedule.step()
    assert schedule.rewound_at is None
    assert int(model.norm.num_batches_tracked) == STEPS


def test_after_a_commitment_by_hand_the_next_step_rewinds() -> None:
    model = convert(Network(), config=CONFIG)
    start = weights(model)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05)
    schedule = Schedule(model, STEPS, optimizer)
    for step in range(3):
        stepped(model, optimizer, step)
        schedule.step()
    flexact.commit(model)
    schedule.step()
    assert schedule.rewound_at == 4
    assert_equal(weights(model), start)
    for step in range(STEPS - 4):
        stepped(model, optimizer, step)
        schedule.step()
    assert schedule.rewound_at == 4
    assert int(model.norm.num_batches_tracked) == STEPS - 4


def test_a_commitment_at_the_last_step_does_not_rewind_and_warns() -> None:
    model = convert(Network(), config=FlexConfig(candidates=CANDIDATES, rewind=True, commit_at=1.0))
    with pytest.warns(UserWarning, match="last step"):
        schedule = Schedule(model, STEPS)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05)
    for step in range(STEPS):
        stepped(model, optimizer, step)
        schedule.step()
    assert schedule.committed
    assert schedule.rewound_at is None
    assert int(model.norm.num_batches_tracked) == STEPS


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {"foreach": True}], ids=str)
def test_on_a_gpu_the_run_equals_that_of_the_plain_network(options: dict[str, bool]) -> None:
    def run(model: nn.Module, schedule: bool, count: int) -> list[float]:
        groups = param_groups(model) if schedule else [{"params": list(model.parameters())}]
        lr = 0.01 if "foreach" in options else torch.tensor(0.01, device="cuda")  # torch refuses a tensor with foreach
        optimizer = torch.optim.AdamW(groups, lr=lr, **options)
        scaler = torch.amp.GradScaler("cuda")
        runs = Schedule(model, STEPS, optimizer, rewinds=[scaler]) if schedule else None
        losses = []
        for step in range(count):
            x, y = (one.cuda() for one in batch(step - ((runs.rewound_at or 0) if runs else 0)))
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            if runs is not None:
                start = runs._start._start or {"tensors": {}}
                assert runs.rewound_at is not None or not any(one.is_cuda for one in start["tensors"].values())
                runs.step()
        return losses

    model = convert(Network(), config=CONFIG).cuda()
    losses = run(model, True, STEPS)[10:]
    plain = plain_with_picks(model).cuda()
    assert losses == pytest.approx(run(plain, False, 10), rel=1e-4)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(model)[name], tensor, rtol=1e-3, atol=1e-4)


# Several optimizers, and optimizers that the Schedule was not given


class Words(nn.Module):
    """An embedding with sparse gradients, under a small head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 6, sparse=True)
        self.first, self.act, self.last = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.act(self.first(self.table(ids).mean(1))))


def _sparse(model: nn.Module) -> list[torch.optim.Optimizer]:
    dense = [p for name, p in model.named_parameters() if name != "table.weight"]
    return [torch.optim.SparseAdam([model.table.weight], lr=0.05), torch.optim.SGD(dense, lr=0.05, momentum=0.9)]


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    model.table.sparse = False
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2]
    rest = [p for name, p in model.named_parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.Adam(rest, lr=0.01)]


def _adagrads(model: nn.Module) -> list[torch.optim.Optimizer]:
    model.table.sparse = False
    first = [model.table.weight, *model.first.parameters()]
    known = {id(p) for p in first}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Adagrad(first, lr=0.05, initial_accumulator_value=0.2),
        torch.optim.Adagrad(rest, lr=0.05, initial_accumulator_value=0.7),
    ]


@pytest.mark.parametrize("given", [True, False], ids=["one of them given", "none given"])
@pytest.mark.parametrize(
    "make",
    [
        _sparse,
        pytest.param(_muon, marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has none")),
        _adagrads,
    ],
)
def test_two_optimizers_over_different_parts_are_both_reset(make: Callable[..., Any], given: bool) -> None:
    def run(model: nn.Module, schedule: Schedule | None, optimizers: list[Any], count: int) -> list[float]:
        losses = []
        for step in range(count):
            begun = (schedule.rewound_at or 0) if schedule else 0
            ids = torch.randint(20, (8, 3), generator=torch.Generator().manual_seed(step - begun))
            loss = nn.functional.cross_entropy(model(ids), ids[:, 0] % 2)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
            losses.append(loss.item())
        return losses

    model = convert(Words(), config=replace(CONFIG, pick_by="blend"))
    optimizers = make(model)
    schedule = Schedule(model, STEPS, optimizers[1] if given else None)
    losses = run(model, schedule, optimizers, STEPS)[10:]
    plain = flexact.load_picks(Words(), selection(model))
    assert losses == run(plain, None, make(plain), 10)
    assert_equal(weights(model), weights(plain))


def test_the_optimizer_state_of_parameters_outside_of_the_model_stays() -> None:
    model, outside = convert(Network(), config=CONFIG), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([*param_groups(model), {"params": [outside]}], lr=0.01)
    schedule = Schedule(model, STEPS, optimizer)
    for step in range(10):
        optimizer.zero_grad()
        (loss_of(model, step) + outside.square().sum()).backward()
        optimizer.step()
        schedule.step()
    assert list(optimizer.state) == [outside]
    assert int(optimizer.state[outside]["step"]) == 10
    assert outside.grad is not None


def test_a_model_without_a_torch_optimizer_is_rewound_with_a_warning() -> None:
    model = convert(Network(), config=CONFIG)
    schedule = Schedule(model, STEPS)
    for _ in range(9):
        schedule.step()
    with pytest.warns(UserWarning, match=r"rewinds=\[optimizer\]"):
        schedule.step()


def test_the_hook_that_finds_optimizers_is_removed_with_the_schedule() -> None:
    hooks = step_hooks._listening
    gc.collect()  # schedules of earlier tests
    before = len(hooks)
    model = convert(Network(), config=CONFIG)
    schedule = Schedule(model, STEPS)
    assert len(hooks) == before + 1
    del schedule
    gc.collect()
    assert len(hooks) == before


# Objects that are reset with the weights


def _warmed_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min((step + 1) / 4, 1.0) * 0.9**step)


@pytest.mark.parametrize(
    "make_rate",
    [
        _warmed_up,
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=10),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 7)],
            milestones=[3],
        ),
    ],
    ids=["lambda", "cosine", "one cycle", "sequence"],
)
@pytest.mark.parametrize("rate", [0.05, "tensor"])
def test_a_learning_rate_schedule_is_reset(make_rate: Callable[..., LRScheduler], rate: Any) -> None:
    """The reset includes the warm-up, and the momentum that a cyclic schedule changes."""

    def run(model: nn.Module, groups: Params, config: FlexConfig | None, count: int) -> tuple[list[float], list[float]]:
        lr = torch.tensor(0.05) if rate == "tensor" else rate
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
        scheduler = make_rate(optimizer)
        schedule = None if config is None else Schedule(model, STEPS, optimizer, rewinds=[scheduler])
        losses, rates = [], []
        for step in range(count):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            losses.append(stepped(model, optimizer, step - ((schedule.rewound_at or 0) if schedule else 0)))
            scheduler.step()
            if schedule is not None:
                schedule.step()
        return losses, rates

    model = convert(Network(), config=CONFIG)
    losses, rates = run(model, param_groups(model), CONFIG, STEPS)
    plain = plain_with_picks(model)
    assert (losses[10:], rates[10:]) == run(plain, [{"params": list(plain.parameters())}], None, 10)
    assert rates[10:] == rates[:10]
    assert len(set(rates[:10])) > 3
    assert_equal(weights(model), weights(plain))


@pytest.mark.parametrize("length", [6, 10])
def test_a_one_cycle_schedule_that_ends_before_the_rewind_is_warned_about(length: int) -> None:
    def run(model: nn.Module, groups: Params, picks: bool) -> tuple[list[float], list[float]]:
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=length)
        schedule = Schedule(model, STEPS, optimizer, rewinds=[scheduler]) if picks else None
        losses, rates = [], []
        for step in range(STEPS if schedule else 10):
            place = schedule.trained_steps if schedule else step
            rates.append(optimizer.param_groups[0]["lr"])
            losses.append(stepped(model, optimizer, place))
            if place < length:
                scheduler.step()
            if schedule is not None:
                schedule.step()
        return losses, rates

    model = convert(Network(), config=CONFIG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, rates = run(model, param_groups(model), picks=True)
    told = [one.filename for one in caught if "OneCycleLR ends after 6 steps" in str(one.message)]
    assert told == ([__file__] if length < 10 else [])
    plain = plain_with_picks(model)
    assert (losses[10:], rates[10:]) == run(plain, [{"params": list(plain.parameters())}], picks=False)


def test_a_plateau_schedule_is_reset() -> None:
    model = convert(Network(), config=CONFIG)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05)
    scheduler = ReduceLROnPlateau(optimizer, patience=1)
    schedule = Schedule(model, STEPS, optimizer, rewinds=[scheduler])
    for step in range(10):
        stepped(model, optimizer, step)
        scheduler.step(1.0)
        assert optimizer.param_groups[0]["lr"] < 0.05 or step < 3
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[1]["lr"] == 0.05
    assert scheduler.num_bad_epochs == 0
    assert scheduler.best == float("inf")


def test_without_a_scheduler_among_the_rewinds_learning_rates_stay() -> None:
    model = convert(Network(), config=CONFIG)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05)
    scheduler, schedule = CosineAnnealingLR(optimizer, STEPS), Schedule(model, STEPS, optimizer)
    for step in range(STEPS):
        stepped(model, optimizer, step)
        scheduler.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_an_average_of_the_weights_is_reset() -> None:
    """Updated between the optimizer's step and the schedule's."""

    def run(model: nn.Module, groups: Params, schedules: bool, count: int) -> nn.Module:
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        schedule = Schedule(model, STEPS, optimizer, rewinds=(average,)) if schedules else None
        for step in range(count):
            stepped(model, optimizer, step - ((schedule.rewound_at or 0) if schedule else 0))
            average.update_parameters(model)
            if schedule is not None:
                schedule.step()
        return average

    model = convert(Network(), config=CONFIG)
    average = run(model, param_groups(model), True, STEPS)
    plain = plain_with_picks(model)
    expected = run(plain, [{"params": list(plain.parameters())}], False, 10)
    assert int(average.n_averaged) == int(expected.n_averaged) == 10
    assert_equal(weights(average.module), weights(expected.module))
    extracted = flexact.extract(average.module).eval()
    assert torch.equal(extracted(batch(99)[0]), expected.module.eval()(batch(99)[0]))


def test_a_gradient_scaler_is_reset() -> None:
    def run(model: nn.Module, groups: Params, schedules: bool, count: int) -> tuple[list[float], list[float]]:
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        schedule = Schedule(model, STEPS, optimizer, rewinds=[scaler]) if schedules else None
        losses, scales = [], []
        for step in range(count):
            optimizer.zero_grad()
            loss = loss_of(model, step - ((schedule.rewound_at or 0) if schedule else 0))
            scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            if schedule is not None:
                schedule.step()
        return losses, scales

    model = convert(Network(), config=CONFIG)
    losses, scales = run(model, param_groups(model), True, STEPS)
    plain = plain_with_picks(model)
    assert (losses[10:], scales[10:]) == run(plain, [{"params": list(plain.parameters())}], False, 10)
    assert scales[10] == 64.0 < scales[9]


def test_all_state_of_an_optimizer_among_the_rewinds_is_restored() -> None:
    """Schedule-free optimizers, for example, count steps in their parameter groups."""
    model = convert(Network(), config=CONFIG)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05, momentum=0.9)
    optimizer.param_groups[0]["k"] = 0
    schedule = Schedule(model, STEPS, optimizer, rewinds=[optimizer])
    for step in range(10):
        stepped(model, optimizer, step)
        optimizer.param_groups[0]["k"] += 1
        schedule.step()
    assert optimizer.param_groups[0]["k"] == 0
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"][0] is model.conv.weight


# Checkpoints


def _saved(schedule: Schedule, model: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    parts = {"model": model, "optimizer": optimizer, "rate": scheduler, "schedule": schedule}
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


@pytest.mark.parametrize(
    ("name", "cut", "given", "loads_first"),
    [
        ("AdamW", 0, True, True),
        ("AdamW", 4, False, True),
        ("AdamW", 10, True, False),
        ("AdamW", 14, False, False),
        ("Adagrad", 4, True, False),
        ("Adagrad", 4, False, True),
        ("Adagrad", 14, True, True),
    ],
)
def test_a_resumed_run_rewinds_to_the_same_weights(name: str, cut: int, given: bool, loads_first: bool) -> None:
    """loads_first: whether the states are loaded before the Schedule is created, as Lightning does, or after."""
    make = OPTIMIZERS[name]

    def begin(seed: int, state: dict[str, Any] | None = None) -> tuple[Any, ...]:
        model = Network()
        torch.manual_seed(seed)
        if seed:
            for parameter in model.parameters():
                nn.init.normal_(parameter)
        model = convert(model, config=CONFIG).train()
        optimizer = make(param_groups(model))
        scheduler = _warmed_up(optimizer)
        parts = {"model": model, "optimizer": optimizer, "rate": scheduler}

        def load() -> None:
            for name, part in parts.items():
                if state is not None:
                    part.load_state_dict(state[name])

        if loads_first:
            load()
        schedule = Schedule(model, STEPS, optimizer if given else None, rewinds=[scheduler])
        if state is not None:
            schedule.load_state_dict(state["schedule"])
        if not loads_first:
            load()
        return schedule, model, optimizer, scheduler

    def go_on(schedule: Schedule, model: nn.Module, optimizer: Any, scheduler: Any) -> tuple[list[float], Any]:
        losses, saved = [], None
        for step in range(schedule.steps_done, STEPS):
            if step == cut and saved is None:
                saved = _saved(schedule, model, optimizer, scheduler)
            losses.append(stepped(model, optimizer, step - (schedule.rewound_at or 0)))
            scheduler.step()
            schedule.step()
        return losses, saved

    whole = begin(0)
    losses, state = go_on(*whole)
    assert (state["schedule"]["start"] is None) == (cut >= 10), "the start is carried until the rewind, and not after"
    again = begin(5, state)
    rest, _ = go_on(*again)
    assert rest == losses[cut:]
    assert again[0].rewound_at == whole[0].rewound_at == 10
    ours, theirs = weights(again[1]), weights(whole[1])
    del ours["calls"], theirs["calls"]  # it is in no checkpoint
    assert_equal(ours, theirs)


def test_a_state_with_a_starting_point_can_be_saved_without_code_in_the_file(tmp_path: Any) -> None:
    model = convert(Network(), config=CONFIG)
    optimizer = torch.optim.Adagrad(param_groups(model), lr=0.05)
    average = AveragedModel(model)
    schedule = Schedule(model, STEPS, optimizer, rewinds=[_warmed_up(optimizer), average])
    stepped(model, optimizer, 0)
    schedule.step()
    torch.save(schedule.state_dict(), tmp_path / "schedule.pt")
    state = torch.load(tmp_path / "schedule.pt", weights_only=True)
    fresh = convert(Network(), config=CONFIG)
    optimizer = torch.optim.Adagrad(param_groups(fresh), lr=0.05)
    again = Schedule(fresh, STEPS, optimizer, rewinds=[_warmed_up(optimizer), AveragedModel(fresh)])
    again.load_state_dict(state)
    assert again._start._start is not None
    assert schedule._start._start is not None
    assert_equal(again._start._start["tensors"], schedule._start._start["tensors"])


def test_an_earlier_state_can_be_loaded_after_the_rewind() -> None:
    model = convert(Network(), config=CONFIG)
    start = weights(model)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05, momentum=0.9)
    schedule = Schedule(model, STEPS, optimizer)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    kept: dict[str, Any] = {}
    for _ in range(2):
        for step in range(schedule.steps_done, 10):
            if step == 5 and not kept:
                kept = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
            stepped(model, optimizer, step)
            schedule.step()
        assert schedule.rewound_at == 10
        assert_equal(weights(model), start)
        assert not optimizer.state
        for name, part in parts.items():
            part.load_state_dict(kept[name])
        assert schedule.rewound_at is None


def test_a_state_of_an_unsuitable_run_is_refused() -> None:
    def schedule(rewind: bool, **more: Any) -> Schedule:
        model = convert(Network(), config=FlexConfig(candidates=CANDIDATES, commit_at=0.5, rewind=rewind))
        return Schedule(model, STEPS, **more)

    state, one = schedule(True).state_dict(), nn.Linear(1, 1)
    for other, saved in (
        (schedule(True), schedule(False).state_dict()),
        (schedule(False), state),
        (schedule(True, rewinds=[one]), state),
        (schedule(True), schedule(True, rewinds=[one]).state_dict()),
    ):
        with pytest.raises(FlexActError, match=r"the saved run has (network_steps|rewinds)="):
            other.load_state_dict(saved)
    with pytest.raises(FlexActError, match="has changed since the Schedule was created"):
        schedule(True).load_state_dict({**state, "start": {**state["start"], "tensors": {}}})


# Bad input


def test_a_policy_without_commitment_cannot_rewind() -> None:
    with pytest.raises(FlexActError, match=r"commit_at=None.*rewind=False"):
        FlexConfig(rewind=True, commit_at=None)
    with pytest.raises(FlexActError, match=r"rewind .*'yes'"):
        FlexConfig(rewind="yes")  # type: ignore[arg-type]
    assert FlexConfig.paper().rewind is False
    assert FlexConfig.paper(rewind=True).rewind is True


@pytest.mark.parametrize("change", ["shape", "more", "fewer"])
def test_a_model_that_changed_is_refused_before_anything_is_written(change: str) -> None:
    model = convert(Network(), config=CONFIG)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05, momentum=0.9)
    schedule = Schedule(model, STEPS, optimizer, rewinds=[_warmed_up(optimizer)])
    for step in range(9):
        stepped(model, optimizer, step)
        schedule.step()
    if change == "shape":
        model.last = nn.Linear(8, 3)
    elif change == "more":
        model.extra = nn.Linear(2, 2)
    else:
        model.norm = nn.BatchNorm2d(4, affine=False)
    stepped(model, optimizer, 9)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(FlexActError, match="nothing was restored"):
        schedule.step()
    assert_equal(weights(model), before)
    assert model.conv.weight.grad is not None
    assert str(optimizer.state_dict()) == str(state)
    assert schedule.rewound_at is None


def test_an_object_without_state_cannot_be_rewound() -> None:
    model = convert(Network(), config=CONFIG)
    with pytest.raises(FlexActError, match=r"rewinds .*state_dict\(\)"):
        Schedule(model, STEPS, rewinds=[lambda step: 0.1])
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05)
    with pytest.raises(FlexActError, match=r"LambdaLR.*rewinds=\[scheduler\]"):
        Schedule(model, STEPS, rewinds=_warmed_up(optimizer))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel, lambda model: model[:2]])
def test_the_model_itself_cannot_be_among_the_rewinds(wrap: Callable[[Any], nn.Module]) -> None:
    model = convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
    with pytest.raises(FlexActError, match=r"sites of this model.*leave it out.*separate copy"):
        Schedule(model, STEPS, rewinds=[wrap(model)])
    Schedule(model, STEPS, rewinds=[AveragedModel(model)])


def test_uninitialised_weights_cannot_be_kept() -> None:
    model = convert(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2)), config=CONFIG)
    with pytest.raises(FlexActError, match=r"uninitialized parameter.*Initialise all weights"):
        Schedule(model, STEPS)


def test_a_buffer_that_is_in_no_checkpoint_may_be_added_and_removed() -> None:
    model = convert(Network(), config=CONFIG)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05)
    schedule = Schedule(model, STEPS, optimizer)
    for step in range(10):
        stepped(model, optimizer, step)
        model.register_buffer("cache", torch.zeros(step + 1), persistent=False)
        schedule.step()
    assert schedule.rewound_at == 10
    assert len(model.cache) == 10


def test_tied_weights_are_kept_once_and_models_may_move_to_another_device() -> None:
    model = Network()
    model.again = model.last
    model = convert(model, config=CONFIG)
    schedule = Schedule(model, STEPS, torch.optim.SGD(param_groups(model), lr=0.05))
    assert "again.weight" not in schedule.state_dict()["start"]["tensors"]
    start = weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(10):
            schedule.step()
    assert model.last.weight.dtype == torch.float64
    assert torch.equal(model.last.weight.float(), start["last.weight"])


@pytest.mark.parametrize("named", [True, False])
def test_a_learning_rate_that_is_not_rewound_is_warned_about(named: bool) -> None:
    model = convert(Network(), config=CONFIG)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.1)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    schedule = Schedule(model, STEPS, optimizer, rewinds=[rate] if named else [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            stepped(model, optimizer, step)
            rate.step()
            schedule.step()
    assert schedule.rewound_at is not None
    assert sum("the learning rate of SGD stays at" in str(one.message) for one in caught) == (0 if named else 1)


def test_a_blend_longer_than_its_network_is_rewound_after_resume_too() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Schedule]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        model = convert(layers, config=FlexConfig(round_steps=20))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return model, optimizer, Schedule(model, network_steps=50, optimizer=optimizer)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule, until: int) -> None:
        while schedule.steps_done < until:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(schedule.trained_steps))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    whole, resumed = made(), made()
    assert whole[2].commit_step == 60
    train(*whole, until=30)
    for new, old in zip(resumed, whole, strict=True):
        new.load_state_dict(old.state_dict())
    for run in (whole, resumed):
        train(*run, until=61)
        assert (run[2].rewound_at, run[2].trained_steps) == (60, 1)
    ours, theirs = (dict(run[0].named_parameters()) for run in (whole, resumed))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("can't allocate memory: no room")])
def test_out_of_memory_for_the_second_copy_is_reported(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        raise error

    monkeypatch.setattr(rewinding_file, "host_copies", fails)
    model = convert(Network(), config=CONFIG)
    with pytest.raises(FlexActError, match=r"copies the weights .*no room.*rewind=False"):
        Schedule(model, STEPS)
