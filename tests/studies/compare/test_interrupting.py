"""Tests of stopping code that does not check whether it should stop."""

from __future__ import annotations

import threading
import time

import pytest

from flexact import FlexActError
from flexact.studies.compare.training import interruptible


def test_a_loop_that_handles_its_errors_is_stopped_soon() -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    start = time.monotonic()

    def training() -> None:
        while time.monotonic() - start < 30:
            try:
                time.sleep(0.01)
            except Exception:
                continue

    with pytest.raises(FlexActError, match="the training was stopped"), interruptible(stop.is_set):
        training()
    assert time.monotonic() - start < 5


def test_code_that_ends_by_itself_is_not_interrupted() -> None:
    with interruptible(lambda: False):
        time.sleep(0.01)
    with pytest.raises(ValueError, match="its own"), interruptible(lambda: False):
        raise ValueError("its own")
    assert not any(thread.name == "flexact-stop" for thread in threading.enumerate())


def test_a_stop_at_the_very_end_does_not_affect_later_code() -> None:
    for _ in range(4):
        try:
            with interruptible(lambda: True):
                time.sleep(0.499)
        except FlexActError:
            pass
        for _ in range(1000):
            time.sleep(0)
