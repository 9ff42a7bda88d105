"""The small tensors of all sites of a model, as padded tables of (rows, K)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.routing.sharding import whole
from flexact.routing.site import Site


class SiteTables:
    """Joins the flat tensors of the sites into tables, and splits tables into flat tensors.

    A site has one row, or one per channel; sites with fewer candidates than others are padded.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = list(sites)
        self.rows = sum(site.rows for site in sites)
        self.k = max(site.k for site in sites)
        self._widths: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.sites[0]._parameters["logits"].device  # type: ignore[union-attr]  # see `parameters`

    def logits(self) -> Tensor:
        """Return the logits of all sites, (rows, K), padded; differentiable."""
        return self.table(self.flat_logits())

    def flat_logits(self) -> Sequence[Tensor]:
        """Return the full logits of each site."""
        every = self.parameters()
        if {(type(logits), logits.dtype) for logits in every} == {(nn.Parameter, torch.float32)}:
            return every  # the usual case, in one pass
        for site, logits in zip(self.sites, every, strict=True):
            if logits.dtype in (torch.float16, torch.bfloat16):
                raise FlexActError(
                    f"the logits of {site.label} are in {logits.dtype}, but must stay in float32. If fully_shard has a "
                    "mixed-precision policy, first shard each FlexAct site without one: fully_shard(site)."
                )
        return [whole(logits) for logits in every]

    def temperature(self) -> Tensor:
        """Return τ of each row, (rows, 1)."""
        by_site = torch.stack(self.temperatures())
        return (by_site if self.rows == len(self.sites) else by_site[self._site_of_row]).unsqueeze(1)

    def temperatures(self) -> list[Tensor]:
        """Return τ of each site, a scalar."""
        return [site._buffers["temperature"] for site in self.sites]  # type: ignore[misc]

    def width(self) -> Tensor:
        """Return the number of elements per sample of each row, (rows, 1)."""
        widths = tuple([site.width for site in self.sites])
        if self._widths != widths:
            self._widths = widths
            by_site = torch.tensor(widths, dtype=torch.float32, device=self.device)
            self._width = by_site[self._site_of_row].unsqueeze(1)
        return self._width

    def split(self, table: Tensor) -> list[Tensor]:
        """Split a (rows, K) table into one flat tensor per site, without padding."""
        flat = table.flatten() if self._own_numbers is None else table.flatten()[self._own_numbers]
        return self.split_flat(flat)

    def split_flat(self, flat: Tensor) -> list[Tensor]:
        """Split the concatenated flat tensors of the sites."""
        return list(flat.split_with_sizes(self._sizes))

    def parameters(self) -> list[nn.Parameter]:
        """Return the logits of each site. Reading `_parameters` is many times faster than an attribute of the module,
        and this runs twice in every step."""
        return [site._parameters["logits"] for site in self.sites]  # type: ignore[misc]

    def gradients(self) -> list[Tensor]:
        """Return the logit gradient of each site; a missing one is a shared tensor of zeros, not to be written to."""
        gradients = [logits.grad for logits in self.parameters()]
        return [
            self._zeros[:size] if gradient is None else whole(gradient)
            for size, gradient in zip(self._sizes, gradients, strict=True)
        ]

    def shared(self, table: Tensor) -> Tensor:
        """Return a (rows, ·) table in which every row is replaced by the mean over its group of sites."""
        if self.group_count == self.rows:
            return table
        sums = table.new_zeros(self.group_count, table.shape[1]).index_add_(0, self._group_of_row, table)
        means = sums / self._group_size
        return means.expand_as(table) if self.group_count == 1 else means[self._group_of_row]

    def table(self, flat: Sequence[Tensor]) -> Tensor:
        """Join one flat tensor per site into a (rows, K) table, padded with 0."""
        joined = torch.cat(list(flat))
        if self._index is None:
            return joined.view(self.rows, self.k)
        return torch.cat([joined, joined.new_zeros(1)])[self._index]

    def lay_out(self) -> None:
        """Create the index tensors on the device of the sites."""
        self._widths = ()
        self._sizes = [site.rows * site.k for site in self.sites]
        self.size = sum(self._sizes)
        self._zeros = torch.zeros(max(self._sizes), device=self.device)
        cpu = torch.device("cpu")  # explicit, since the user may have set another default device
        rows = torch.tensor([site.rows for site in self.sites], device=cpu)
        site_of_row = torch.arange(len(self.sites), device=cpu).repeat_interleave(rows, output_size=self.rows)
        own = torch.tensor([site.k for site in self.sites], device=cpu)[site_of_row]
        start, column = own.cumsum(0) - own, torch.arange(self.k, device=cpu)
        self._site_of_row = site_of_row.to(self.device)
        self._index_groups()
        self._index: Tensor | None = None
        self._own_numbers: Tensor | None = None
        if any(site.k != self.k for site in self.sites):
            inside = column < own.unsqueeze(1)
            self._index = torch.where(inside, start.unsqueeze(1) + column, self.size).to(self.device)
            self._own_numbers = inside.flatten().nonzero().flatten().to(self.device)
        # For the kernels: the offset of each row in the concatenated flat tensors, its number of candidates, and the
        # offset of its temperature, which follows them.
        self.layout = torch.stack([start, own, self.size + site_of_row], dim=1).to(self.device)

    def _index_groups(self) -> None:
        """Number the groups of sites that pick together. Each row of a site without a group is a group of its own."""
        of_row = [site.group for site in self.sites for _ in range(site.rows)]
        names = [("row", i) if group is None else ("group", group) for i, group in enumerate(of_row)]
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        numbers = torch.tensor([number[name] for name in names], device="cpu")
        sizes = numbers.bincount()
        self.group_count = len(number)
        self._group_of_row = numbers.to(self.device)
        self._group_size = sizes.float().unsqueeze(1).to(self.device)
        # For the kernels: the rows in the order of their groups, and the position of each group's first row in it.
        self.grouped_rows = numbers.argsort(stable=True).to(self.device)
        self.group_starts = nn.functional.pad(sizes.cumsum(0), (1, 0)).to(self.device)
