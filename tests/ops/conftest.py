"""The fixture with which one test runs on the kernels in C and on those in Triton."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from flexact.ops import dispatch
from kernels import using


@pytest.fixture(scope="module", params=["native", "triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of the kernels in C, of those in Triton under its interpreter, and of those in Triton on a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if request.param == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is off where there is a CUDA device")
    kernels: dispatch.Kernels = "native" if request.param == "native" else "triton"
    found = torch.device("cuda" if request.param == "cuda" else "cpu")
    with using(kernels):
        if dispatch.active(found).name != kernels:
            pytest.skip(dispatch.active(found).reason)
        yield found
        assert not dispatch._broken
