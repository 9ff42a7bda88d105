"""The process that compiles kernels, which needs no GPU."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget

from flexact.ops.triton.builder import Builder, Request

TARGET = GPUTarget("cuda", 90, 32)


def test_a_kernel_is_compiled_whatever_the_working_directory_contains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "queue.py").write_text("raise RuntimeError('a file of the user, not the module of Python')")
    monkeypatch.chdir(tmp_path)
    builder = Builder(TARGET)
    arguments = (*[torch.float32] * 5, 64, 64)
    assert builder.build(Request(TARGET, "flexact.ops.triton.restoring_kernels", "copy", arguments, (1,), 4))
    assert list((tmp_path / "cache").rglob("copy.cubin"))
    builder.close()


def test_the_process_ends_although_a_forked_one_keeps_the_pipe_of_its_requests() -> None:
    builder = Builder(TARGET)
    inherited = os.dup(builder._requests.fileno())
    closing = threading.Thread(target=builder.close, daemon=True)
    closing.start()
    closing.join(20)
    os.close(inherited)
    assert not closing.is_alive()


def test_an_interrupt_of_the_program_does_not_reach_the_process() -> None:
    builder = Builder(TARGET)
    assert os.getpgid(builder._process.pid) != os.getpgid(0)
    builder.close()
