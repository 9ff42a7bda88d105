"""Whole steps of the small networks: unconverted, while they pick, and committed to their original activation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from functools import partial

import torch

import flexact
from cost_rows.networks import Case, second_derivative
from cost_rows.row import Row
from flexact.routing.sites import sites_of
from flexact.studies.overhead.timing import interleaved, ratios, spread

PICKING, COMMITTED = "step while picking, ratio", "step once committed, ratio"
NETWORK_STEPS = 8_000
RUN = f"whole run of {NETWORK_STEPS:,} steps, ratio"
ENDLESS = 10**6
"""Steps of a round or a rung: no candidate is dropped while a network is measured."""


class Form:
    """A network in one form ("plain", "picking" or "committed"), with its optimizer and its batch."""

    def __init__(self, case: Case, form: str, device: torch.device) -> None:
        torch.manual_seed(0)
        network = case.build()
        if form != "plain":
            config = dataclasses.replace(case.config, round_steps=ENDLESS, trial_steps=ENDLESS)
            network = flexact.convert(network, config=config)
        self.network, self.loss = network.to(device), case.loss
        self.x = torch.randn(case.shape, device=device).requires_grad_(case.loss is second_derivative)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4)
        self.schedule: flexact.Schedule | None = None
        self.tried: list[int] = []
        """The candidates of a trial, which the steps of a run take in turns."""
        if form == "committed":
            for site in sites_of(self.network):
                site.commit(candidate=site.original_index)
        if form != "plain":
            self.schedule = flexact.Schedule(self.network, total_steps=10**8, optimizer=self.optimizer)
            if self.schedule.router.trying is not None:
                self.tried = list(range(self.schedule.router.k))

    def run(self, steps: int) -> None:
        """Train for some steps."""
        for step in range(steps):
            if self.schedule is not None and self.tried:
                self.schedule.router.trying = self.tried[step % len(self.tried)]
            self._step()

    def _step(self) -> None:
        loss = self.loss(self.network(self.x), self.x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step(loss)


def rows(name: str, case: Case, repeats: int, device: torch.device) -> Iterator[Row]:
    """Time one network in its three forms, which take turns within a round."""
    forms = {form: Form(case, form, device) for form in ("plain", "picking", "committed")}
    steps = max(1, len(forms["picking"].tried))
    runs = {form: partial(own.run, steps) for form, own in forms.items()}
    times, errors = interleaved(runs, repeats, device, clock=time.process_time)
    for error in errors.values():
        raise error
    plain = spread(times["plain"]).median / steps
    picking, committed = (ratios(times[form], times["plain"]) for form in ("picking", "committed"))
    whole = committed.median + picking.median * picking_steps(case) / NETWORK_STEPS
    yield Row(name, PICKING, *picking, plain)
    yield Row(name, COMMITTED, *committed, plain)
    yield Row(name, RUN, whole, plain_ms=plain)


def picking_steps(case: Case) -> int:
    """Return the steps of picking in a run that trains the picks for NETWORK_STEPS."""
    network = flexact.convert(case.build(), config=case.config)
    return flexact.Schedule(network, network_steps=NETWORK_STEPS).total_steps - NETWORK_STEPS
