"""What identifies a comparison: its functions, its network and Flex-Act's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flexact.config import FlexConfig
from flexact.studies.grid.protocol import GridProtocol


@dataclass(frozen=True)
class Protocol(GridProtocol):
    """The settings that all runs of a comparison share."""

    build: str
    """The function that builds the network, as "module:name"."""
    train: str
    architecture: str
    """Digest of what `build` makes."""
    config: dict[str, Any] = field(hash=False)
    """Flex-Act's `FlexConfig` as a dictionary; each run has its own seed."""
    where: str | list[str] = field(hash=False)
    """The sites, as in `convert`; the name of a function if it is one."""
    sites: list[str] = field(hash=False)
    """The names of the sites."""
    source: dict[str, str] = field(default_factory=dict, hash=False)
    """Digests of the code and the constants that the runs depend on, by name."""

    def about(self) -> list[str]:
        return [f"build {self.build}", f"train {self.train}", f"candidates {', '.join(self.config['candidates'])}"]

    @property
    def flexact(self) -> FlexConfig:
        """Flex-Act's settings."""
        return FlexConfig.from_dict(self.config)
