"""The ten tasks, the longest ones first, in the order in which a grid runs them.

Tasks in other files of this folder are discovered and come after these ten.
"""

from __future__ import annotations

import importlib
import pkgutil

from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks import cifar, gpt, physics, regression

_OURS = (
    cifar.RESNET_RECTIFIERS,
    cifar.RESNET_SEVEN,
    cifar.VIT,
    gpt.TASK,
    physics.TASK,
    cifar.CONVNET,
    cifar.DEEP_MLP,
    cifar.AUTOENCODER,
    regression.COORDINATES,
    regression.TABULAR,
)


def _found() -> list[Task]:
    """Return the tasks of all files in this folder."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Task)]


TASKS: dict[str, Task] = {task.name: task for task in (*_OURS, *_found())}
