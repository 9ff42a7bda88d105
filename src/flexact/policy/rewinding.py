"""StartingPoint: a model, its optimizers and what goes with them, as they were when the run began."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from flexact.errors import FlexActError
from flexact.policy.optimizer_states import OptimizerStates, groups_of, restore_groups
from flexact.policy.optimizers import unwrapped
from flexact.routing.layer import FlexAct
from flexact.routing.sharding import is_sharded, local, own_part


class StartingPoint:
    """What a run began with: kept in host memory by `keep`, put back in place by `restore`, once.

    model: its parameters and buffers are kept, but those of its sites are not: a pick stays picked.
    optimizer: the one that is known from the start; others are found by the steps they make.
    others: objects with `state_dict` and `load_state_dict` that begin again as well, such as a learning-rate scheduler.
    wanted: whether the policy rewinds at all; otherwise nothing is kept.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, others: Sequence[Any], wanted: bool) -> None:
        self.rewound_at: int | None = None
        self._wanted, self._model, self._given = wanted, model, optimizer
        checked = _checked(others)
        self._others = checked if wanted else []
        self._tensors: dict[str, Tensor] | None = None
        self._kept_others: list[dict[str, Any]] = []
        self._optimizers: OptimizerStates | None = None

    @property
    def kept(self) -> bool:
        """Whether there is something to go back to."""
        return self._tensors is not None

    def keep(self, steps_after: int) -> None:
        """Copy everything as it is now. steps_after: those between the commitment and the end of the run."""
        if not self._wanted:
            return
        if steps_after < 1:
            warnings.warn(
                "the sites commit at the last step of the run, so nothing is rewound: no step would be left to train "
                "the picks. Give the run more steps, or FlexConfig a smaller commit_at.",
                stacklevel=3,
            )
            return
        now = _tensors(self._model)
        absent = [name for name, tensor in now.items() if is_lazy(tensor) or tensor.is_meta]
        if absent:
            raise FlexActError(
                f"rewind=True needs the weights that the run begins with, but {absent[0]!r} has none yet. Run one "
                "batch through a lazy model, or load the weights of one on the meta device, before making the Schedule."
            )
        kept = self._copied(now, "rewind=True", "rewind=False")
        self._tensors, self._kept_others = kept["tensors"], kept["others"]
        self._watch()

    def save(self) -> dict[str, Any]:
        """Everything as it is now, in the form of the starting point, for `put`."""
        return self._copied(_tensors(self._model), "a trial", "pick_by='blend'")

    def _copied(self, tensors: Mapping[str, Tensor], purpose: str, instead: str) -> dict[str, Any]:
        """Copies in host memory of these tensors, and of the states of the optimizers and of the further objects."""
        try:
            return {
                "tensors": {name: _on_host(tensor) for name, tensor in tensors.items()},
                "optimizers": {} if self._optimizers is None else self._optimizers.now(_names(self._model)),
                "others": [_kept(other) for other in self._others],
            }
        except (MemoryError, RuntimeError) as error:
            size = sum(local(tensor).nbytes for tensor in tensors.values()) / 2**20
            raise FlexActError(
                f"{purpose} copies the weights ({size:,.0f} MiB) and the optimizer's state to host memory, and that "
                f"failed: {error!s:.200}. Free host memory, or use FlexConfig({instead})."
            ) from error

    def check_model(self) -> None:
        """Refuse a model with other parameters or buffers than when the run began."""
        if self._tensors is not None:
            _check_same(_tensors(self._model), self._tensors, _derived(self._model))

    def put(self, saved: Mapping[str, Any] | None, step: int) -> None:
        """Put back what `save` returned, or the starting point, in place, and clear the gradients. Refused before
        anything is written if the model has changed."""
        assert self._tensors is not None
        assert self._optimizers is not None
        if saved is None:
            saved = {"tensors": self._tensors, "optimizers": self._optimizers.first, "others": self._kept_others}
        tensors, others = saved["tensors"], saved["others"]
        _reshard(self._model)
        now, derived = _tensors(self._model), _derived(self._model)
        _check_same(now, tensors, derived)
        self._check_groups()
        if not self._optimizers.seen:
            warnings.warn(
                "no optimizer of torch.optim that holds weights of this model was seen, so none was cleared when the "
                "weights were rewound. Give an optimizer of another kind to Schedule(..., rewinds=[optimizer]).",
                stacklevel=4,
            )
        self._warn_of_rates(step)
        for other, kept in zip(self._others, others, strict=True):
            other.load_state_dict(kept["state"])
        self._optimizers.restore(_names(self._model), saved["optimizers"])
        for other, kept in zip(self._others, others, strict=True):
            if kept["groups"] is not None and (stepped := _stepped_by(other)) is not None:
                restore_groups(stepped, kept["groups"])
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name not in derived or _shape(now.get(name)) == _shape(tensor):
                    local(now[name]).copy_(local(tensor))
        for parameter in self._model.parameters():
            parameter.grad = None
        self.rewound_at = step

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to rewind to the same place. The tensors are those kept, not copies."""
        if not self._wanted:
            return {}
        start = None
        if self._tensors is not None and self._optimizers is not None:
            first = {kind: dict(states) for kind, states in self._optimizers.first.items() if states}
            start = {"tensors": self._tensors, "optimizers": first, "others": self._kept_others}
        return {"rewind": True, "rewound_at": self.rewound_at, "start": start}

    def load_state_dict(self, state: Mapping[str, Any], is_over: bool) -> None:
        """Take the starting point of the run that is resumed. is_over: whether that run had committed already."""
        rewound_at, start = state.get("rewound_at"), state.get("start")
        differs = not (state.get("rewind") or is_over) if self._wanted else start is not None
        if differs:
            raise FlexActError(
                f"the saved run {'does not rewind' if self._wanted else 'rewinds at its commitment'}, and this one has "
                f"FlexConfig(rewind={self._wanted}). Resume it with FlexConfig(rewind={not self._wanted}), or start "
                "a new run."
            )
        if not self._wanted:
            return
        if isinstance(rewound_at, bool) or not isinstance(rewound_at, int | None):
            raise FlexActError(f"not a Schedule's state: 'rewound_at' must be a step or None; got {rewound_at!r:.80}.")
        if start is not None:
            self._load(start)
        else:
            self.forget()
        self.rewound_at = rewound_at

    def _load(self, start: Any) -> None:
        parts = {"tensors": dict, "optimizers": dict, "others": list}
        whole = isinstance(start, dict) and start.keys() == parts.keys()
        if not whole or not all(isinstance(start[name], kind) for name, kind in parts.items()):
            raise FlexActError(
                "not a Schedule's state: 'start' must have the tensors, optimizers and others that the run began with. "
                "Load what Schedule.state_dict() returned."
            )
        others = start["others"]
        known = all(isinstance(one, dict) and {"state", "groups"} <= one.keys() for one in others)
        if not known or len(others) != len(self._others):
            raise FlexActError(
                f"the saved run rewinds {len(others)} further objects, and this one {len(self._others)}. Make the "
                "Schedule with the same rewinds=... as the run that is resumed."
            )
        now = _tensors(self._model)
        kept = {name: _like(tensor, now.get(name)) for name, tensor in start["tensors"].items()}
        _check_same(now, kept, _derived(self._model))
        self._tensors, self._kept_others = kept, others
        optimizers = self._watch()
        optimizers.first, optimizers.resumed = start["optimizers"], True

    def _watch(self) -> OptimizerStates:
        """Look for optimizers from now on; those that are known already are asked at once."""
        if self._optimizers is None:
            self._optimizers = OptimizerStates(_names(self._model))
            for optimizer in (self._given, *(_stepped_by(other) for other in self._others)):
                if optimizer is not None:
                    self._optimizers.note(optimizer)
        return self._optimizers

    def forget(self) -> None:
        """Keep nothing any more."""
        if self._optimizers is not None:
            self._optimizers.close()
        self._tensors, self._optimizers, self._kept_others = None, None, []

    def _warn_of_rates(self, step: int) -> None:
        """Warn where a learning rate has changed and nothing puts it back."""
        assert self._optimizers is not None
        rewound = [_stepped_by(other) for other in self._others] + self._others
        for optimizer, (first, now) in self._optimizers.changed_rates().items():
            if self.rewound_at is None and not any(one is optimizer for one in rewound):
                warnings.warn(
                    f"the weights were put back after step {step}, and the learning rate of {type(optimizer).__name__} "
                    f"stays at {now[0]:g} (it began at {first[0]:g}). Give its scheduler to Schedule(..., rewinds="
                    "[scheduler]), so that it begins again with the weights.",
                    stacklevel=5,
                )

    def _check_groups(self) -> None:
        for other, kept in zip(self._others, self._kept_others, strict=True):
            stepped, groups = _stepped_by(other), kept["groups"]
            if stepped is not None and groups is not None and len(groups) != len(stepped.param_groups):
                raise FlexActError(
                    f"the optimizer of {type(other).__name__} has {len(stepped.param_groups)} parameter groups, and "
                    f"had {len(groups)} when the Schedule was made, so their learning rates cannot be rewound. Add all "
                    "groups before you make the Schedule; nothing was restored."
                )


def _checked(others: Any) -> list[Any]:
    """The further objects to rewind; refused where one has no state that could be kept and loaded."""
    if not isinstance(others, list | tuple):
        raise FlexActError(
            f"rewinds must be a list of objects with state_dict() and load_state_dict(); got {type(others).__name__}. "
            "Write rewinds=[scheduler], also for a single one."
        )
    for other in others:
        if not all(callable(getattr(other, name, None)) for name in ("state_dict", "load_state_dict")):
            raise FlexActError(
                f"rewinds has {other!r:.80}, and needs objects with state_dict() and load_state_dict(). Give it "
                "learning-rate schedulers, averaged models, gradient scalers; restart anything else yourself where "
                "schedule.rewound_at == schedule.steps_done."
            )
    return list(others)


def _kept(other: Any) -> dict[str, Any]:
    """The state of a further object, and for a learning-rate scheduler the hyperparameters of its optimizer."""
    state = other.state_dict()
    if isinstance(other, nn.Module):
        state = {key: _on_host(one) if isinstance(one, Tensor) else copy.deepcopy(one) for key, one in state.items()}
    else:
        state = copy.deepcopy(state)
    stepped = _stepped_by(other)
    return {"state": state, "groups": None if stepped is None else groups_of(stepped)}


def _stepped_by(other: Any) -> Optimizer | None:
    """The optimizer whose learning rate an object sets; that of accelerate's wrapper is one further in."""
    found = getattr(getattr(other, "scheduler", other), "optimizer", None)
    return unwrapped(found) if isinstance(found, Optimizer) else None


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once; not those of the sites."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, FlexAct):
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), (f"{prefix}.{name}" if prefix else name, tensor))
    return dict(found.values())


def _derived(model: nn.Module) -> set[str]:
    """The names of the buffers that no checkpoint holds: caches, which may come and go."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _names(model: nn.Module) -> dict[int, str]:
    """The names of all parameters, logits as well, by their id."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; of a sharded tensor the part that this rank holds."""
    return tensor.detach().to("cpu", copy=True)


def _like(saved: Any, own: Tensor | None) -> Any:
    """A saved tensor in host memory, split as the model's own is where that is sharded and the saved one is not."""
    splits = own is not None and is_sharded(own) and isinstance(saved, Tensor) and not is_sharded(saved)
    if own is None or not splits or saved.shape != own.shape:
        return saved.to("cpu") if isinstance(saved, Tensor) else saved
    part = _on_host(own)
    local(part).copy_(own_part(saved.to(own.device), own))
    return part


def _check_same(now: Mapping[str, Tensor], kept: Mapping[str, Any], derived: set[str]) -> None:
    """Refuse a model with other parameters or buffers than those kept, by name or by shape."""
    for name in dict.fromkeys([*kept, *now]):
        if name in derived:
            continue
        ours, theirs = (_shape(one.get(name)) for one in (now, kept))
        if ours != theirs:
            raise FlexActError(
                f"the model is not the one that the Schedule was made for, so its weights cannot be rewound: {name!r} "
                f"had {theirs} and now has {ours}. Make the Schedule after the last change to the model's parameters "
                "(a new head, fully_shard, pruning); nothing was restored."
            )


def _shape(tensor: Any) -> str:
    return f"shape {tuple(local(tensor).shape)}" if isinstance(tensor, Tensor) else "no tensor"


def _reshard(model: nn.Module) -> None:
    """Let FSDP2 go of whole parameters that an evaluation has left behind; they would be used instead of the shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
