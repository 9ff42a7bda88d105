"""The ten tasks, one file each: the longest first, which is the order in which a grid runs them."""

from __future__ import annotations

from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks import autoencoder, convnet, coordinates, deep_mlp, gpt, physics, resnet, tabular, vit

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        resnet.RECTIFIERS,
        resnet.SEVEN,
        vit.TASK,
        gpt.TASK,
        physics.TASK,
        convnet.TASK,
        deep_mlp.TASK,
        autoencoder.TASK,
        coordinates.TASK,
        tabular.TASK,
    )
}
