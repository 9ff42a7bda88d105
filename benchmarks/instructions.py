"""Count the machine instructions per element of each kernel, in the code that Triton compiles for an H200.

    python benchmarks/instructions.py [--candidates K]

Needs no GPU: Triton's package contains the compiler and the disassembler. Per cycle, a multiprocessor of an H200 moves
about 4.5 bfloat16 elements and issues 128 instructions, so a kernel with fewer than about 28 instructions per element
can be memory-bound.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from flexact.ops.blending import Blending
from flexact.ops.triton import routed
from flexact.ops.triton.launch import Launch, Launches
from flexact.ops.triton.moments import moments

CANDIDATES = (
    *("relu", "sigmoid", "tanh", "leaky_relu", "identity", "gelu", "silu", "elu", "softplus", "mish", "selu"),
    *("hardswish", "relu6", "softsign", "relu_squared", "sine"),
)
"""The maximum number of candidates that the kernels support, the paper's five first."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class CompileOnlyDriver:
    """A Triton driver for an H200 that compiles without a GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def count_all(launches: Launches, *tensors: Tensor) -> None:
    """Replace the launches of a pass."""
    for launch, places in launches.steps:
        count(launch, [tensors[i] for i in places])


def count(launch: Launch, tensors: list[Tensor]) -> None:
    """Replace a launch: compile its kernel, and print the number of instructions in its longest loop."""
    kernel, arguments = launch.kernel, (*launch.missing, *tensors, *launch.numbers)
    if "finish" in kernel.__name__:
        return
    names = kernel.arg_names[len(arguments) :]
    constants = [name == "FAST" or value for name, value in zip(names, launch.constants, strict=True)]  # as on a GPU
    built = kernel.warmup(*arguments, *constants, grid=launch.grid, num_warps=launch.warps)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        listing = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True)
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
    body = longest_loop(listing.stdout)
    sizes = dict(zip(names, constants, strict=True))
    elements = sizes["BLOCK_A"] * sizes["BLOCK_J"] / (32 * launch.warps)
    registers = re.search(r"REG:(\d+)", usage.stdout)
    special = sum("MUFU" in line for line in body) / elements
    print(
        f"{kernel.__module__.rpartition('.')[2] + '.' + kernel.__name__:28} {len(body) / elements:6.1f} per element, "
        f"{special:.1f} of them special functions; {registers.group(1) if registers else '?'} registers"
    )


def longest_loop(listing: str) -> list[str]:
    """Return the instructions of the longest loop: from a label to the last jump back to it."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops = [(0, 0)]
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction.group(1))
            jump = re.search(r"BRA.*?`\((\.L_x_\d+)\)", line)
            if jump and jump.group(1) in labels:
                loops.append((labels[jump.group(1)], len(lines)))
    first, last = max(loops, key=lambda loop: loop[1] - loop[0])
    return lines[first:last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=5, choices=range(2, len(CANDIDATES) + 1), metavar="K")
    keys = CANDIDATES[: parser.parse_args().candidates]
    triton.runtime.driver.set_active(CompileOnlyDriver())
    Launches.__call__ = count_all  # type: ignore[method-assign]
    p = torch.rand(1, len(keys))
    blending = Blending(p, p, torch.tensor(0.5), keys, tuple(range(len(keys))), 1, True)
    h = torch.empty(2**20, dtype=torch.bfloat16)
    routed.forward(h, blending)
    routed.backward(h, h, blending, True)
    y = torch.empty(128, 64, 8, 8, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    norm = routed.Norm(torch.rand(2, 64), torch.rand(64), torch.rand(64))
    moments(y, None, 0.1, 1e-5)
    preactivation = routed.Preactivation(norm, None, None, True)
    routed.forward(y, blending, preactivation)
    routed.backward(y, y, blending, True, preactivation)


if __name__ == "__main__":
    main()
