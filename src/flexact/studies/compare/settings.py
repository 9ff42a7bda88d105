"""Flex-Act's settings from the options of the command, or from the comparison that is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.surgery.choosing import Where


def config_of(file: Path | None, candidates: tuple[str, ...] | None, before: Mapping[str, Any] | None) -> FlexConfig:
    """The settings in a file, those of the comparison to resume, or the defaults; with these candidates if given."""
    if file is not None:
        try:
            config = FlexConfig.from_json(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise FlexActError(f"cannot read {file} ({error}). Give --config a file of FlexConfig.to_json().") from None
    elif before is not None:
        config = FlexConfig.from_dict(before["protocol"].get("config", {}))
    else:
        config = FlexConfig()
    return config if candidates is None else replace(config, candidates=candidates)


def where_of(names: Sequence[str] | None, before: Mapping[str, Any] | None) -> Where:
    """The named sites, those of the comparison to resume, or all."""
    found = (before or {"protocol": {}})["protocol"].get("where", "all") if names is None else list(names)
    if isinstance(found, str) and ":" in found:
        raise FlexActError(
            f"this comparison chose its sites with the function {found}, which the command cannot call. Resume it with "
            "flexact.compare(..., where=...)."
        )
    return found[0] if isinstance(found, list) and len(found) == 1 else found
