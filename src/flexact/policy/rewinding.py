"""StartingPoint: the initial state of a model, its optimizers and its schedulers, to which a run rewinds."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from flexact.errors import FlexActError
from flexact.policy.optimizer_states import (
    groups_of,
    host_copies,
    learning_rates,
    named_parameters,
    restore_groups,
    restore_states,
    states_of,
)
from flexact.policy.optimizers import unwrapped
from flexact.routing.sharding import fsdp_modules, is_sharded, local, own_part
from flexact.routing.site import Site


class StartingPoint:
    """The initial state of a run. `keep` copies it to host memory, and `restore` restores it in place.

    model: its parameters and buffers are kept, except those of its sites, whose picks survive a rewind.
    others: further objects to rewind with `state_dict` and `load_state_dict`, such as a learning-rate scheduler.
    wanted: whether the policy rewinds at all; otherwise nothing is kept.

    The optimizers of the parameters are found at their first step.
    """

    def __init__(self, model: nn.Module, others: Sequence[Any], wanted: bool) -> None:
        self.rewound_at: int | None = None
        self._wanted, self._model = wanted, model
        _check_others(others, model)
        self._others = list(others) if wanted else []
        self._start: dict[str, Any] | None = None
        self._resumed = False
        """Whether the initial state is from a saved run. Optimizers that are found later have then stepped already."""
        self._names: dict[int, str] = {}
        """The names of all parameters, including the logits, by id."""
        self._rates: weakref.WeakKeyDictionary[Optimizer, list[float]] = weakref.WeakKeyDictionary()
        """The optimizers of these parameters found so far, with their initial learning rates."""

    @property
    def kept(self) -> bool:
        """Whether there is an initial state to restore."""
        return self._start is not None

    @property
    def others(self) -> list[str]:
        """The types of the further objects to rewind."""
        return [type(other).__name__ for other in self._others]

    @property
    def lacks_optimizer(self) -> bool:
        """Whether there is an initial state, but no optimizer was found so far."""
        return self.kept and not self._rates

    def keep(self, steps_after: int) -> None:
        """Copy the current state. steps_after: the number of steps between the commitment and the end of the run."""
        if not self._wanted:
            return
        if steps_after < 1:
            warnings.warn(
                "the sites commit at the last step, so nothing is rewound: no step would be left to train the picks. "
                "Give the run more steps, or FlexConfig a smaller commit_at.",
                stacklevel=3,
            )
            return
        self._begin(self.save())

    def save(self) -> dict[str, Any]:
        """Return a copy in host memory of the weights and the states of the optimizers and the other objects. The
        optimizers' states are keyed by class and by the name of the parameter."""
        optimizers: dict[str, dict[str, dict[str, Any]]] = {}
        try:
            for optimizer in self._rates:
                optimizers.setdefault(type(optimizer).__name__, {}).update(states_of(optimizer, self._names))
            others = [_saved(other) for other in self._others]
            return {"tensors": host_copies(_tensors(self._model)), "optimizers": optimizers, "others": others}
        except (MemoryError, RuntimeError, ValueError) as error:  # a lazy module raises the last
            raise FlexActError(
                "a run that rewinds copies the weights and the optimizer's state to host memory, and that failed: "
                f"{error!s:.300} Initialise all weights before creating the Schedule, free host memory, or use "
                "FlexConfig(rewind=False)."
            ) from error

    def restore(self, step: int, saved: Mapping[str, Any] | None = None, stacklevel: int = 4) -> None:
        """Restore the initial state, or a state that `save` returned, in place, and clear the gradients. If the model
        has changed, raise before anything is written.

        stacklevel: the level at which a warning made here points to the caller of `Schedule.step`.
        """
        saved = self._start if saved is None else saved
        assert saved is not None
        tensors, others = saved["tensors"], saved["others"]
        for module in fsdp_modules(self._model, "FSDPModule"):
            module.reshard()  # otherwise parameters that an evaluation left unsharded would be used instead
        now, derived = _tensors(self._model), _derived(self._model)
        _check_same(now, tensors, derived)
        self._warn_of_rates(step, stacklevel + 1)
        for other, kept in zip(self._others, others, strict=True):
            other.load_state_dict(kept["state"])
            if (stepped := _stepped_by(other)) is not None:
                restore_groups(stepped, kept["groups"])
        for optimizer in self._rates:
            restore_states(optimizer, self._names, saved["optimizers"].get(type(optimizer).__name__, {}))
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name not in derived or _shape(now.get(name)) == _shape(tensor):
                    local(now[name]).copy_(local(tensor))
        for parameter in self._model.parameters():
            parameter.grad = None
        self.rewound_at = step

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to rewind. The tensors are not copied."""
        start = None if self._start is None else self._start | {"optimizers": dict(self._start["optimizers"])}
        return {"rewound_at": self.rewound_at, "start": start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the initial state of the run to resume."""
        if (start := state.get("start")) is None:
            self.forget()
        else:
            now = _tensors(self._model)
            kept = {name: _sharded_like(tensor, now.get(name)) for name, tensor in start["tensors"].items()}
            _check_same(now, kept, _derived(self._model))
            self._resumed = True
            self._begin(start | {"tensors": kept})
        self.rewound_at = state.get("rewound_at")

    def _begin(self, start: dict[str, Any]) -> None:
        """Set the initial state, to which `note` adds the optimizers."""
        self._start = start
        self._names = {id(parameter): name for name, parameter in self._model.named_parameters()}

    def forget(self) -> None:
        """Discard the initial state."""
        self._start = None
        self._rates.clear()

    def note(self, optimizer: Optimizer) -> None:
        """Keep the state of an optimizer if it holds any of the parameters, was not seen before, and there is an
        initial state. Called before each step of any optimizer; before its first step, an optimizer has its initial
        state."""
        if self._start is None or optimizer in self._rates or not any(named_parameters(optimizer, self._names)):
            return
        self._rates[optimizer] = learning_rates(optimizer)
        states, kind, first = states_of(optimizer, self._names), type(optimizer).__name__, self._start["optimizers"]
        if states and not self._resumed:
            first[kind] = states | first.get(kind, {})

    def _warn_of_rates(self, step: int, stacklevel: int) -> None:
        """Warn if a learning rate has changed and nothing restores it."""
        rewound = [*self._others, *(_stepped_by(other) for other in self._others)]
        for optimizer, first in self._rates.items():
            changed = [rates for rates in zip(learning_rates(optimizer), first, strict=False) if rates[0] != rates[1]]
            if changed and self.rewound_at is None and not any(one is optimizer for one in rewound):
                now, before = changed[0]
                warnings.warn(
                    f"the weights were rewound after step {step}, but the learning rate of {type(optimizer).__name__} "
                    f"stays at {now:g} (was {before:g}). Pass its scheduler: Schedule(..., rewinds=[scheduler]).",
                    stacklevel=stacklevel,
                )


def _check_others(others: Any, model: nn.Module) -> None:
    """Raise if a further object to rewind has no state to save and load, or would undo the picks."""
    if not isinstance(others, list | tuple):
        raise FlexActError(
            f"rewinds must be a list of objects with state_dict() and load_state_dict(); got {type(others).__name__}. "
            "Write rewinds=[scheduler], even for a single object."
        )
    sites = {id(module) for module in model.modules() if isinstance(module, Site)}
    for other in others:
        if not all(callable(getattr(other, name, None)) for name in ("state_dict", "load_state_dict")):
            raise FlexActError(
                f"rewinds has {other!r:.80}, but needs objects with state_dict() and load_state_dict(). Restart "
                "anything else yourself when schedule.rewound_at == schedule.steps_done."
            )
        if isinstance(other, nn.Module) and any(id(module) in sites for module in other.modules()):
            raise FlexActError(
                f"rewinds has a {type(other).__name__} with sites of this model, so a rewind would undo their picks. "
                "The model is always rewound: leave it out of rewinds. An averaged model must be a separate copy, such "
                "as AveragedModel(model)."
            )


def _saved(other: Any) -> dict[str, Any]:
    """Return the state of an object and, for a learning-rate scheduler, the hyperparameters of its optimizer."""
    state = other.state_dict()
    state = host_copies(state) if isinstance(other, nn.Module) else copy.deepcopy(state)
    stepped = _stepped_by(other)
    return {"state": state, "groups": None if stepped is None else groups_of(stepped)}


def _stepped_by(other: Any) -> Optimizer | None:
    """Return the optimizer whose learning rate an object sets; accelerate wraps the scheduler once more."""
    found = getattr(getattr(other, "scheduler", other), "optimizer", None)
    return unwrapped(found) if isinstance(found, Optimizer) else None


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers by name, each once, except those of the sites."""
    sites = [module for module in model.modules() if isinstance(module, Site)]
    routing = {id(tensor) for site in sites for tensor in (*site.parameters(False), *site.buffers(False))}
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if id(tensor) not in routing}


def _derived(model: nn.Module) -> set[str]:
    """Return the names of the non-persistent buffers. They are caches, and may appear or disappear during a run."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _sharded_like(saved: Tensor, own: Tensor | None) -> Tensor:
    """Return a saved tensor in host memory, sharded like the model's tensor if only that one is sharded."""
    if own is None or not is_sharded(own) or is_sharded(saved) or saved.shape != own.shape:
        return saved.to("cpu")
    part = own.detach().to("cpu", copy=True)
    local(part).copy_(own_part(saved.to(own.device), own))
    return part


def _check_same(now: Mapping[str, Tensor], kept: Mapping[str, Tensor], derived: set[str]) -> None:
    """Raise if the model's parameters or buffers differ from those kept in name or shape."""
    for name in sorted({*kept, *now} - derived):
        current, initial = _shape(now.get(name)), _shape(kept.get(name))
        if current != initial:
            raise FlexActError(
                f"the model has changed since the Schedule was created: {name!r} had {initial} and now has {current}. "
                "Create the Schedule after the last change to the parameters; nothing was restored."
            )


def _shape(tensor: Tensor | None) -> str:
    return "no tensor" if tensor is None else f"shape {tuple(local(tensor).shape)}"
