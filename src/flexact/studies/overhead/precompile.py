"""Compiling many networks at once.

Each is compiled in a process of its own, into torch's cache on disk; the study then compiles it again, which takes it
from there. One after another they would take longer than the whole study may.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess

from flexact.studies.overhead.deadline import Deadline
from flexact.studies.overhead.networks import BASELINE, build, extracted
from flexact.studies.overhead.options import CANDIDATES, NETWORKS, PAPERS_K, Options
from flexact.studies.overhead.rows import Cell
from flexact.studies.overhead.steps import Batch, Inference, Training, study_stream

_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def precompile(cells: Iterable[Cell], options: Options, deadline: Deadline) -> None:
    """Compile the networks of these cells, as far as the time goes; what fails here fails, and is told, later."""
    context = multiprocessing.get_context("spawn")
    networks = dict.fromkeys((cell.network, cell.placement, cell.way) for cell in cells if cell.compiled)
    with _environment(_THREADS, "2"):
        processes: list[BaseProcess] = [
            context.Process(target=_compile, args=(*network, options)) for network in networks
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, deadline.left()))
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
                    process.join()


def _compile(network: str, placement: str, way: str, options: Options) -> None:
    """In a process of its own: one network, as it is trained, and for ReLU as it is inferred with too."""
    with suppress(Exception, KeyboardInterrupt), study_stream(options.where):
        batch = Batch(options.batch, options.where, options.dtype)
        five = CANDIDATES[:PAPERS_K]
        built = build(NETWORKS[network], options.width, placement, way, five, options.where)
        Training(built, way, batch, compiled=True).warm_up()
        if placement == BASELINE:
            fresh = build(NETWORKS[network], options.width, placement, way, five, options.where)
            Inference(extracted(fresh), batch, compiled=True).warm_up()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
