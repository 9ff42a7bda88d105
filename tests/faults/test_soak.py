"""A short soak test: the memory measurements of benchmarks/soak.py over a few hundred steps instead of 20,000."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"

PROGRAM = """
import importlib.util, json, sys, tracemalloc
import torch, flexact
spec = importlib.util.spec_from_file_location("soak", sys.argv[1])
soak = importlib.util.module_from_spec(spec)
sys.modules["soak"] = soak
spec.loader.exec_module(soak)
tracemalloc.start()
print(json.dumps([vars(sample) for sample in soak.samples("memory", steps=300, every=50)]))
"""


def test_memory_stays_flat_through_elimination_and_commitment() -> None:
    """A leak of one kilobyte per step would be 20 MB over the long run. A Recorder's history takes a tenth of that
    here.
    """
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(SOAK)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    samples = json.loads(done.stdout.splitlines()[-1])
    assert [sample["step"] for sample in samples] == [50, 100, 150, 200, 250, 300]
    assert samples[0]["candidates"] > samples[2]["candidates"] > samples[-1]["candidates"] == 3
    first, last = samples[1], samples[-1]
    assert last["traced_kb"] - first["traced_kb"] < 200 * 0.5
    assert last["rss_kb"] < 1.01 * first["rss_kb"]
