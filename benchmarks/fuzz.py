"""Fuzz the public API with calls in random order, for longer than CI does.

    python benchmarks/fuzz.py [--examples 10000] [--steps 12] [--seed 0] [--out results/reliability/fuzz.csv]

Runs the state machine of tests/fuzz in batches of 500 examples, each with its own seed. Writes one line per batch: the
numbers of examples, of forwards and of calls that raised a FlexActError, and the failure if there was one. A failing
batch prints the calls that led to it. 10,000 examples take about fifteen minutes on one core.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test

from flexact.io.atomic_files import write_rows
from flexact.studies.provenance import processor, provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
from fuzz_machine import PublicApi  # noqa: E402  # from the tests of this checkout

BATCH = 500


class Counted(PublicApi):
    """Counts examples, forwards and refused calls over all examples."""

    examples = forwards = refusals = 0

    def teardown(self) -> None:
        Counted.examples += 1
        Counted.forwards += self.inputs
        Counted.refusals += self.refused
        super().teardown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=12, help="maximum number of calls per example")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first batch")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "reliability" / "fuzz.csv")
    parser.add_argument("--shrink", action="store_true", help="minimise a failing example (slow)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made = {**provenance(), "device": processor()}
    phases = [Phase.generate, *([Phase.shrink] if arguments.shrink else [])]
    rows: list[dict[str, object]] = []
    for number in range(-(-arguments.examples // BATCH)):
        examples = min(BATCH, arguments.examples - number * BATCH)
        Counted.examples = Counted.forwards = Counted.refusals = 0
        begun = time.monotonic()
        failure = _failure(examples, arguments.steps, arguments.seed + number, phases)
        rows.append(
            {
                "seed": arguments.seed + number,
                "examples": Counted.examples,
                "forwards": Counted.forwards,
                "refused": Counted.refusals,
                "failure": failure,
                "seconds": round(time.monotonic() - begun, 1),
                **made,
            }
        )
        print({key: value for key, value in rows[-1].items() if key not in made}, flush=True)
        write_rows(arguments.out, rows)
    sys.exit(any(row["failure"] for row in rows))


def _failure(examples: int, steps: int, seed: int, phases: list[Phase]) -> str:
    """Run a batch and return its failure in one line; empty if there was none."""
    random.seed(seed)
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seeded(seed)(Counted), settings=options)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return ""


if __name__ == "__main__":
    main()
