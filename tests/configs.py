"""Builds configs from flat fields: fields of `Policy` go into the policy."""

from __future__ import annotations

import dataclasses
from typing import Any

from flexact import FlexConfig, Policy


def flat(**fields: Any) -> FlexConfig:
    """Returns `FlexConfig()` with these fields changed."""
    return _changed(FlexConfig(), fields)


def flat_paper(**fields: Any) -> FlexConfig:
    """Returns `FlexConfig.paper()` with these fields changed."""
    return _changed(FlexConfig.paper(), fields)


def _changed(config: FlexConfig, fields: dict[str, Any]) -> FlexConfig:
    if isinstance(fields.get("policy"), dict):  # as `to_dict` stores it
        fields = fields | fields.pop("policy")
    names = {field.name for field in dataclasses.fields(Policy)}
    policy = dataclasses.replace(config.policy, **{name: fields[name] for name in fields if name in names})
    own = {name: value for name, value in fields.items() if name not in names}
    return dataclasses.replace(config, policy=policy, **own)
