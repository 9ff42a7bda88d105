"""The small tensors of all sites of a model, as padded tables of (rows, K)."""

from __future__ import annotations

from collections import Counter
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.routing.sharding import whole


class Site(Protocol):
    """The attributes of a site that a router needs."""

    group: Any
    """Sites with the same group pick together; None for a site that picks alone."""
    rows: int
    k: int
    width: int
    """Elements per sample and row in the last training forward."""
    logits: nn.Parameter
    dropped_at: Tensor
    temperature: Tensor
    view: Any
    """The site's `flexact.routing.router.View`, which its router sets."""
    _parameters: dict[str, nn.Parameter | None]

    @property
    def label(self) -> str: ...

    @property
    def committed(self) -> bool: ...

    @property
    def only_candidate(self) -> int | None: ...

    def notice_copied_buffers(self) -> None: ...


AnySite = TypeVar("AnySite", bound=Site)


class SiteTables(Generic[AnySite]):
    """Joins the flat tensors of the sites into tables, and splits tables into flat tensors.

    A site has one row, or one per channel; sites with fewer candidates than others are padded.
    """

    def __init__(self, sites: list[AnySite]) -> None:
        self.sites = sites
        self.rows = sum(site.rows for site in sites)
        self.k = max(site.k for site in sites)
        self._widths: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.sites[0].logits.device

    def logits(self) -> Tensor:
        """Return the logits of all sites, (rows, K), padded; differentiable."""
        return self.table(self.flat_logits())

    def flat_logits(self) -> list[Tensor]:
        """Return the full logits of each site."""
        every = [site.logits for site in self.sites]
        for site, logits in zip(self.sites, every, strict=True):
            if logits.dtype in (torch.float16, torch.bfloat16):
                raise FlexActError(
                    f"the logits of {site.label} are in {logits.dtype}, but must stay in float32. If fully_shard has a "
                    "mixed-precision policy, first shard each FlexAct site without one: fully_shard(site)."
                )
        return [whole(logits) for logits in every]

    def temperature(self) -> Tensor:
        """Return τ of each row, (rows, 1)."""
        by_site = torch.stack([site.temperature for site in self.sites])
        return (by_site if self.rows == len(self.sites) else by_site[self._site_of_row]).unsqueeze(1)

    def temperatures(self) -> list[Tensor]:
        """Return τ of each site as a tensor of shape (1,)."""
        return [site.temperature.view(1) for site in self.sites]

    def width(self) -> Tensor:
        """Return the number of elements per sample of each row, (rows, 1)."""
        widths = tuple(site.width for site in self.sites)
        if self._widths != widths:
            self._widths = widths
            self._width = torch.tensor(widths, device=self.device)[self._site_of_row].unsqueeze(1)
        return self._width

    def split(self, table: Tensor) -> list[Tensor]:
        """Split a (rows, K) table into one flat tensor per site, without padding."""
        parts = torch.split(table, [site.rows for site in self.sites])
        return [part[:, : site.k].flatten() for site, part in zip(self.sites, parts, strict=True)]

    def gradients(self) -> list[Tensor]:
        """Return the logit gradient of each site; a missing one is a shared tensor of zeros, not to be written to."""
        gradients = [site.logits.grad for site in self.sites]
        return [
            self._zeros[: site.rows * site.k] if gradient is None else whole(gradient)
            for site, gradient in zip(self.sites, gradients, strict=True)
        ]

    @property
    def shares(self) -> bool:
        """Whether several sites pick together."""
        groups = [site.group for site in self.sites if site.group is not None]
        return len(set(groups)) < len(groups)

    @property
    def shares_all(self) -> bool:
        """Whether all sites pick together."""
        return len({site.group for site in self.sites}) == 1 and self.sites[0].group is not None

    def shared(self, table: Tensor) -> Tensor:
        """Return a (rows, K) table in which every row is replaced by the mean over its group of sites."""
        if not self.shares:
            return table
        sums = torch.zeros_like(table).index_add_(0, self._group_of_row, table)
        return (sums / self._group_size)[self._group_of_row]

    def table(self, flat: list[Tensor]) -> Tensor:
        """Join one flat tensor per site into a (rows, K) table, padded with 0."""
        joined = torch.cat(flat)
        if self._index is None:
            return joined.view(self.rows, self.k)
        return torch.cat([joined, joined.new_zeros(1)])[self._index]

    def lay_out(self) -> None:
        """Create the index tensors on the device of the sites."""
        self._widths = ()
        sizes = [site.rows * site.k for site in self.sites]
        self.size = sum(sizes)
        self._zeros = torch.zeros(max(sizes), device=self.device)
        cpu = torch.device("cpu")  # explicit, since the user may have set another default device
        rows = torch.tensor([site.rows for site in self.sites], device=cpu)
        site_of_row = torch.arange(len(self.sites), device=cpu).repeat_interleave(rows, output_size=self.rows)
        own = torch.tensor([site.k for site in self.sites], device=cpu)[site_of_row]
        start, column = own.cumsum(0) - own, torch.arange(self.k, device=cpu)
        self._site_of_row = site_of_row.to(self.device)
        self._index_groups()
        self._index: Tensor | None = None
        if any(site.k != self.k for site in self.sites):
            index = torch.where(column < own.unsqueeze(1), start.unsqueeze(1) + column, self.size)
            self._index = index.to(self.device)
        # For the kernels: the offset of each row in the concatenated flat tensors, its number of candidates, and the
        # offset of its temperature, which follows them.
        self.layout = torch.stack([start, own, self.size + site_of_row], dim=1).to(self.device)

    def _index_groups(self) -> None:
        """Number the groups of sites that pick together. A site without a group gets its own number."""
        names = [("site", i) if site.group is None else ("group", site.group) for i, site in enumerate(self.sites)]
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        of_row = [number[name] for name, site in zip(names, self.sites, strict=True) for _ in range(site.rows)]
        sizes = Counter(of_row)
        self._group_of_row = torch.tensor(of_row, device=self.device)
        # Padded to the length of the sums in `shared`.
        self._group_size = torch.tensor([[sizes.get(i, 1)] for i in range(self.rows)], device=self.device)
