"""Fixtures that compile kernels for a GPU on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FAKE_GPU = """
import triton
from triton.backends.compiler import GPUTarget

class FakeGPU:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

triton.runtime.driver.set_active(FakeGPU())
"""


@pytest.fixture
def output_with_fake_gpu(tmp_path: Path) -> Callable[..., str]:
    """Runs a program whose kernels are compiled for an H100 in a separate process, and returns its output.

    The program can import the modules in `tmp_path`.
    """

    def printed(program: str, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
        command = [sys.executable, "-c", FAKE_GPU + program, *arguments]
        return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    return printed
