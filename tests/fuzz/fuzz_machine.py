"""A state machine that calls the public API in any order, on tiny networks.

Invariants after every call: the only exception is `FlexActError`, and a refused call leaves the model, its schedule and
its recorder unchanged. There are two exceptions, both in `load_state_dict`. torch raises its own errors for missing
keys and wrong shapes. For sites that were placed by hand and not yet bound by a Schedule, torch may have loaded earlier
layers before the error.
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fuzz_networks import NETWORKS, state_of
from fuzz_odd_calls import CONFIGS, ODD_CALLS, PLACES, damaged
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import flexact
from flexact.routing.sites import sites_of
from flexact.surgery.picks_file import described

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "wild": lambda groups: torch.optim.SGD(groups, lr=1e6),  # a run that diverges
}


class PublicApi(RuleBasedStateMachine):
    """One user with one model, who calls the API in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.average: torch.optim.swa_utils.AveragedModel | None = None
        self.points: list[tuple[dict[str, Any], ...]] = []
        self.schedule: flexact.Schedule | None = None
        self.recorder: flexact.Recorder | None = None
        self.states: list[dict[str, Any]] = []
        self.schedule_states: list[dict[str, Any]] = []
        self.inputs = 0
        self.refused = 0

    @initialize(network=st.sampled_from(sorted(NETWORKS)))
    def build(self, network: str) -> None:
        torch.manual_seed(0)
        warnings.simplefilter("ignore")  # what convert leaves unchanged, and frozen logits
        self.network = network
        build, self.shape = NETWORKS[network]
        self.model = build()
        self.seen = f"{network}: "

    def teardown(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
        self.folder.cleanup()

    def attempt(self, call: Callable[[], Any], must_fail: bool = False) -> Any:
        """Returns the result of a call, or None if it was refused; a refused call must have changed nothing."""
        before = self._everything()
        refusal = ""
        try:
            result = call()
        except flexact.FlexActError as error:
            refusal = str(error) or "without a word"
        if refusal:
            assert refusal != "without a word"
            assert self._everything() == before, f"a refused call changed something: {refusal}"
            self.refused += 1
            return None
        assert not must_fail, f"a call that makes no sense was taken, with the result {result!r:.100}"
        return result

    def _everything(self) -> tuple[Any, ...]:
        schedule = None
        if self.schedule is not None:
            own = self.schedule.state_dict()
            schedule = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in own.items()}
        history = None if self.recorder is None else len(self.recorder.history)
        return state_of(self.model), repr(schedule), history

    def batch(self, scale: float = 1.0) -> torch.Tensor:
        self.inputs += 1
        generator = torch.Generator().manual_seed(self.inputs)
        first = next(iter(self.model.parameters()), torch.zeros(()))
        own = first.dtype if not isinstance(self.model, flexact.FlexAct) else torch.float32
        return (scale * torch.randn(self.shape, generator=generator)).to(own)

    @property
    def has_sites(self) -> bool:
        return bool(sites_of(self.model))

    @property
    def is_finite(self) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in self.model.state_dict().values())

    # Converting and its opposites

    @rule(
        where=st.sampled_from(sorted(PLACES)),
        config=st.sampled_from(sorted(CONFIGS)),
        shown=st.booleans(),
        per_call=st.booleans(),
        fuse=st.booleans(),
    )
    def convert(self, where: str, config: str, shown: bool, per_call: bool, fuse: bool) -> None:
        inputs = self.batch() if shown else None
        result = self.attempt(
            lambda: flexact.convert(
                self.model, PLACES[where], CONFIGS[config](), example_inputs=inputs, per_call=per_call, fuse=fuse
            )
        )
        if result is not None:
            self.model = result
            assert self.has_sites
            self.forget()

    @rule()
    def commit(self) -> None:
        if self.attempt(lambda: flexact.commit(self.model)) is not None:
            assert all(site.committed for site in sites_of(self.model))

    @precondition(lambda self: self.has_sites)
    @rule(number=st.integers(0, 9))
    def eliminate(self, number: int) -> None:
        sites = sites_of(self.model)
        site = sites[number % len(sites)]
        self.attempt(lambda: site.keep(len(site.alive) - 1, step=number))

    @rule(commit=st.booleans(), inplace=st.booleans(), keep=st.booleans())
    def extract(self, commit: bool, inplace: bool, keep: bool) -> None:
        training = self.model.training
        decided = self.has_sites and all(site.committed for site in sites_of(self.model))
        expected, x = None, self.batch()
        if decided and self.is_finite:
            expected = self.model.eval()(x)
            self.model.train(training)
        plain = self.attempt(lambda: flexact.extract(self.model, commit=commit, inplace=inplace))
        if plain is None:
            return
        assert not sites_of(plain)
        if expected is not None:
            assert torch.equal(copy.deepcopy(plain).eval()(x), expected), "extraction changed the outputs"
        if inplace or keep:
            self.model = plain
            self.forget()

    def forget(self) -> None:
        """A state or file of another model."""
        self.schedule = self.average = None
        self.optimizers, self.points = [], []
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    # Training

    @precondition(lambda self: any(True for _ in self.model.parameters()))
    @rule(kind=st.sampled_from(sorted(_OPTIMIZERS)), all_in_one=st.booleans(), maximize=st.booleans())
    def make_optimizer(self, kind: str, all_in_one: bool, maximize: bool) -> None:
        groups = list(self.model.parameters()) if all_in_one else flexact.param_groups(self.model, weight_decay=1e-3)
        self.optimizers = [_OPTIMIZERS[kind](groups)]
        for group in self.optimizers[0].param_groups:
            group["maximize"] = maximize

    @precondition(lambda self: len(list(self.model.parameters())) > 1)
    @rule(kind=st.sampled_from(sorted(_OPTIMIZERS)), share=st.sampled_from([1, 2, 3]), left_out=st.booleans())
    def make_two_optimizers(self, kind: str, share: int, left_out: bool) -> None:
        every = list(self.model.parameters())
        cut = max(1, len(every) * share // 4)
        parts = [every[int(left_out) : cut], every[cut:]]
        self.optimizers = [_OPTIMIZERS[kind](part) for part in parts if part]

    @rule(steps=st.sampled_from([1, 2, 3, 7, 20, 10**6]), given=st.booleans())
    def make_schedule(self, steps: int, given: bool) -> None:
        optimizer = self.optimizers[0] if given and self.optimizers else None
        made = self.attempt(lambda: flexact.Schedule(self.model, steps, optimizer))
        if made is not None:
            self.schedule, self.points = made, []

    @precondition(lambda self: any(p.requires_grad for p in self.model.parameters()))
    @rule(
        batches=st.integers(1, 2),
        scale=st.sampled_from([1.0, 1.0, 1.0, 1e30, math.inf]),
        zeroes=st.booleans(),
        otherwise=st.booleans(),
    )
    def train_a_step(self, batches: int, scale: float, zeroes: bool, otherwise: bool) -> None:
        if not self.optimizers:
            self.make_optimizer("sgd", False, False)
        self.model.train()
        run = getattr(self.model, "sample", self.model) if otherwise else self.model
        for _ in range(batches):
            loss = run(self.batch(scale)).float().square().mean() + flexact.penalty(self.model)
            if loss.requires_grad:
                loss.backward()
        for optimizer in self.optimizers:
            self.step(optimizer)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=zeroes)
        if self.schedule is not None:
            self.attempt(self.schedule.step)
        if self.average is not None:
            self.average.update_parameters(self.model)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes a step of one optimizer. If the policy moves the logits, it moves those that this optimizer holds."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        before = {site: (site.logits.detach().clone(), site.logits.grad) for site in sites_of(self.model)}
        acts = self.schedule is not None and not self.schedule.committed
        optimizer.step()
        if not acts or self.schedule.config.policy.logit_step != "schedule":
            return
        groups = {site.group for site in before if id(site.logits) in held} - {None}
        for site, (logits, gradient) in before.items():
            if id(site.logits) in held:
                assert site.logits.grad is None or gradient is None, "the policy left a gradient to the optimizer"
            elif site.group not in groups:
                same = torch.allclose(site.logits, logits, rtol=0, atol=0, equal_nan=True)
                assert same, "an optimizer moved logits that it does not hold"
                assert site.logits.grad is gradient

    @precondition(lambda self: any(True for _ in self.model.parameters()))
    @rule()
    def make_average(self) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7)
        )

    @precondition(lambda self: self.schedule is not None)
    @rule()
    def save_everything(self) -> None:
        owners = (self.model, self.schedule, *self.optimizers)
        self.points.append(copy.deepcopy(tuple(owner.state_dict() for owner in owners)))

    @precondition(lambda self: self.schedule is not None and self.points)
    @rule(which=st.integers(0, 5), model_first=st.booleans())
    def roll_back(self, which: int, model_first: bool) -> None:
        model, schedule, *optimizers = copy.deepcopy(self.points[which % len(self.points)])
        states = [(self.model, model), (self.schedule, schedule)]
        for owner, state in states if model_first else reversed(states):
            if self.attempt(lambda owner=owner, state=state: owner.load_state_dict(state) or True) is None:
                return
        for optimizer, state in zip(self.optimizers, optimizers, strict=False):
            with suppress(ValueError):  # the state of another optimizer
                optimizer.load_state_dict(state)
        assert self.schedule.steps_done == schedule["step"]
        assert (self.schedule._trial is None) == (schedule["trial"] is None)

    @precondition(lambda self: self.schedule is not None)
    @rule(times=st.integers(1, 8))
    def step_the_schedule(self, times: int) -> None:
        for _ in range(times):
            self.attempt(self.schedule.step)
        assert 0 <= self.schedule.steps_done <= self.schedule.total_steps

    @rule(training=st.booleans())
    def set_mode(self, training: bool) -> None:
        self.model.train(training)

    @rule(dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    def set_dtype(self, dtype: torch.dtype) -> None:
        self.model = self.model.to(dtype)
        self.optimizers, self.average = [], None  # torch's own optimizers do not follow a network to another precision
        self.points = []
        for site in sites_of(self.model):
            assert site.logits.dtype == torch.float32

    @precondition(lambda self: self.has_sites)
    @rule(frozen=st.booleans())
    def freeze_logits(self, frozen: bool) -> None:
        for site in sites_of(self.model):
            site.logits.requires_grad_(not frozen)

    # Saving and loading

    @rule()
    def save(self) -> None:
        file = io.BytesIO()
        torch.save(self.model.state_dict(), file)
        file.seek(0)
        self.states.append(torch.load(file, weights_only=True))

    @precondition(lambda self: self.states)
    @rule(which=st.integers(0, 5), strict=st.booleans(), damage=st.sampled_from([None, None, *damaged]))
    def load(self, which: int, strict: bool, damage: str | None) -> None:
        state = copy.deepcopy(self.states[which % len(self.states)])
        if damage is not None:
            damaged[damage](state)
        message = "in loading state_dict"
        # Nothing checks all of the sites that were placed by hand before torch loads the first layer.
        checked = not any(site.router.standalone for site in sites_of(self.model)) or len(self.model._modules) == 0
        try:
            if checked:
                self.attempt(lambda: self.model.load_state_dict(state, strict=strict))
            else:
                with suppress(flexact.FlexActError):
                    self.model.load_state_dict(state, strict=strict)
        except RuntimeError as error:  # torch's own error
            message = str(error)
        assert "in loading state_dict" in message
        for site in sites_of(self.model):
            alive = (site.dropped_at < 0).any(0)
            assert site.alive == tuple(alive.nonzero().flatten().tolist()), "what is alive is not what was loaded"

    @precondition(lambda self: self.schedule is not None)
    @rule()
    def save_schedule(self) -> None:
        self.schedule_states.append(self.schedule.state_dict())

    @precondition(lambda self: self.schedule is not None and self.schedule_states)
    @rule(which=st.integers(0, 5), change=st.sampled_from([{}, {}, {"step": 10**9}, {"step": "1"}, {"mean": None}]))
    def load_schedule(self, which: int, change: dict[str, Any]) -> None:
        state = self.schedule_states[which % len(self.schedule_states)] | change
        self.attempt(lambda: self.schedule.load_state_dict(state), must_fail=bool(change))

    @rule(way=st.sampled_from(["deepcopy", "pickle", "torch.save"]), keep=st.booleans())
    def copy(self, way: str, keep: bool) -> None:
        before = state_of(self.model)
        duplicate = _COPIES[way](self.model)
        assert state_of(self.model) == before
        assert state_of(duplicate)["tensors"] == before["tensors"]
        assert [site.alive for site in sites_of(duplicate)] == [site.alive for site in sites_of(self.model)]
        shared = {id(site) for site in sites_of(self.model)} & {id(site) for site in sites_of(duplicate)}
        routers = {id(site.router) for site in sites_of(self.model)} & {id(site.router) for site in sites_of(duplicate)}
        assert not shared
        assert not routers
        if keep:
            self.model = duplicate
            self.forget()

    # Inspection

    @rule()
    def select(self) -> None:
        now = self.attempt(lambda: flexact.selection(self.model))
        assert (now is not None) == self.has_sites
        if now is None:
            return
        json.dumps(now.to_dict(), allow_nan=False)
        if self.is_finite:
            for row in now:
                assert row.pick not in row.dropped
                assert math.isclose(sum(row.probabilities.values()), 1.0, abs_tol=1e-5)
        str(now)

    @rule(on_disk=st.booleans())
    def make_recorder(self, on_disk: bool) -> None:
        path = Path(self.folder.name) / "history.jsonl" if on_disk else None
        if self.recorder is not None:
            self.recorder.close()
        self.recorder = self.attempt(lambda: flexact.Recorder(self.model, path, resume=True))
        assert (self.recorder is not None) == self.has_sites

    @precondition(lambda self: self.recorder is not None)
    @rule(
        step=st.sampled_from([0, 1, 2, 5, -1, 1.5, "1", None, torch.tensor(7), 10**400]),
        value=st.sampled_from([1.0, math.nan, math.inf, 10**400, "x", None, torch.ones(2), torch.tensor(2.0)]),
    )
    def record(self, step: Any, value: Any) -> None:
        self.attempt(lambda: self.recorder.record(step, loss=value))

    @precondition(lambda self: self.recorder is not None)
    @rule(step=st.sampled_from([-1, 0, 1, 10**400, "1", None]))
    def rewind(self, step: Any) -> None:
        self.attempt(lambda: self.recorder.rewind(step))

    @precondition(lambda self: self.recorder is not None)
    @rule()
    def read_the_history(self) -> None:
        path = Path(self.folder.name) / "history.jsonl"
        records = self.attempt(lambda: flexact.Recorder.load(path))
        assert records is not None or not path.exists()

    @precondition(lambda self: self.has_sites)
    @rule()
    def put_picks_into_a_fresh_network(self) -> None:
        path = Path(self.folder.name) / "picks.json"
        path.write_text(json.dumps(described(flexact.selection(self.model).picks, {})))
        fresh = NETWORKS[self.network][0]()
        before = state_of(fresh)
        result = self.attempt(lambda: flexact.load_picks(fresh, path))
        if result is None:
            assert state_of(fresh) == before
        else:
            assert not sites_of(result)

    @rule(name=st.sampled_from(sorted(ODD_CALLS)))
    def call_oddly(self, name: str) -> None:
        self.attempt(lambda: ODD_CALLS[name](self.model), must_fail=True)

    # Invariants

    @invariant()
    def the_model_runs(self) -> None:
        training = {module: module.training for module in self.model.modules()}
        before = state_of(self.model.eval())
        with torch.no_grad():
            y = self.model(self.batch())
        assert state_of(self.model) == before, "an eval forward changed the model"
        for module, mode in training.items():
            module.training = mode
        if self.is_finite and all(float(p.detach().abs().max()) < 1e3 for p in self.model.parameters()):
            assert bool(y.isfinite().all())

    @invariant()
    def every_way_in_computes_the_same(self) -> None:
        for model in (self.model, None if self.average is None else self.average.module):
            if hasattr(model, "sample"):
                modes = {module: module.training for module in model.modules()}
                x = self.batch()
                with torch.no_grad():
                    ours, theirs = model.eval().sample(x), model(x)
                for module, mode in modes.items():
                    module.training = mode
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)

    @invariant()
    def every_site_is_whole(self) -> None:
        for site in sites_of(self.model):
            left = (site.dropped_at < 0).sum(-1)
            assert int(left.min()) >= 1
            assert site.committed == bool((left == 1).all())
            assert float(site.temperature) > 0


def _pickled(model: nn.Module) -> nn.Module:
    duplicate: nn.Module = pickle.loads(pickle.dumps(model))
    return duplicate


def _saved_whole(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    duplicate: nn.Module = torch.load(file, weights_only=False)
    return duplicate


_COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": _pickled,
    "torch.save": _saved_whole,
}
