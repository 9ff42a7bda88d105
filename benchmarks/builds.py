"""List the kernels that Triton builds in the first run on a machine, for an H200, and how long each takes to build here.

    python benchmarks/builds.py resnet18 [--fuse] [--candidates 7]
    python benchmarks/builds.py gpt

Needs no GPU. A small batch is trained on the CPU from the first step to the commitment, with an evaluation after every
drop. The closed form computes the results; each kernel launch is recorded, and built once per specialisation. Columns:
the phase that needs the build first, the time of Triton's front end (Python), of its compiler, of ptxas, and of the C
compiler that builds the launcher. A GPU that no build delays would need only the loading of the binaries.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher

import flexact
from flexact.ops import dispatch
from flexact.ops.triton import autograd, basis, batch_norm, fallback, routed
from flexact.ops.triton.launch import Launch
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import BLOCKS, ResNet
from flexact.studies.picks.tasks.gpt import GPT

CANDIDATES = ("relu", "leaky_relu", "gelu", "silu", "tanh", "identity", "sigmoid", "elu", "mish", "softplus", "relu6")


class CompileOnlyDriver:
    """A Triton driver for an H200 that compiles without a GPU."""

    launcher_cls = CudaLauncher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Builds:
    """The builds so far, in seconds by stage."""

    def __init__(self) -> None:
        self.phase = ""
        self.rows: list[tuple[str, str, dict[str, float]]] = []
        self._stages: dict[str, float] | None = None
        self._known: set[str] = set()
        triton.knobs.compilation.listener = self._listen

    def _listen(self, *, times: Any, **_: Any) -> None:
        lowering = {name: time / 1e6 for name, time in times.lowering_stages}
        ptxas = lowering.pop("cubin", 0.0)
        self._stages = {"front end": times.ir_initialization / 1e6, "compiler": sum(lowering.values()), "ptxas": ptxas}

    def launch(self, launch: Launch, *tensors: Tensor) -> None:
        """Replace a launch: build its kernel if this specialisation is new."""
        kernel = launch.kernel
        built = kernel.warmup(*tensors, *launch.numbers, *launch.constants, grid=launch.grid, num_warps=launch.warps)
        if built.hash in self._known:
            return
        self._known.add(built.hash)
        start = time.perf_counter()
        CudaLauncher(built.src, built.metadata)
        stages = {**(self._stages or {}), "launcher": time.perf_counter() - start}
        names = kernel.arg_names
        own = [f"{name}={value}" for name, value in zip(names[-len(launch.constants) :], launch.constants, strict=True)]
        kinds = [f"{names[path[0]]}%16" for path, attributes in built.src.attrs.items() if attributes]
        ones = [f"{names[path[0]]}=1" for path, value in built.src.constants.items() if not names[path[0]].isupper()]
        types = [kind for kind in built.src.signature.values() if kind != "constexpr"]
        name = kernel.__module__.rpartition(".")[2] + kernel.__name__
        self.rows.append((self.phase, name, stages))
        print(f"{self.phase:14} {name:26}", " ".join(f"{stage} {value:.2f}" for stage, value in stages.items()))
        print("   ", *own, *ones, *kinds, *types, sep=" ")

    def summary(self) -> None:
        """Print the number and the time of the builds by phase."""
        for phase in dict.fromkeys(phase for phase, *_ in self.rows):
            own = [stages for one, _, stages in self.rows if one == phase]
            total = {stage: sum(stages.get(stage, 0.0) for stages in own) for stage in own[0]}
            stages = ", ".join(f"{stage} {value:.1f}" for stage, value in total.items())
            print(f"{phase}: {len(own)} builds, {sum(total.values()):.1f} s ({stages})")


def stub_of_cuda() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with a libcuda that does nothing, against which the launchers can be linked and loaded."""
    folder = tempfile.TemporaryDirectory()
    library, source = (Path(folder.name) / name for name in ("libcuda.so.1", "stub.c"))
    launcher = Path(triton.backends.nvidia.driver.__file__).read_text()
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\(", launcher)))
    source.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in names))
    subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", source, "-o", library], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = folder.name
    return folder


def record_and_fall_back(kernel: Callable[..., Any], plain: Callable[..., Any], *arguments: Any) -> Any:
    """Replace `fallback.run`: launch for the record, and compute the result in plain torch."""
    kernel(*arguments)
    return plain(*arguments)


def pretend_to_have_a_gpu() -> None:
    """Run the Triton kernels on CPU tensors, with the functions that a GPU would use."""
    triton.runtime.driver.set_active(CompileOnlyDriver())
    dispatch._why_unsupported = lambda *_: ""  # type: ignore[assignment]
    dispatch.use("triton")
    for module in (basis, batch_norm, routed):
        module.is_fast = lambda h: h.element_size() == 2  # type: ignore[attr-defined]
    autograd.run = fallback.run = record_and_fall_back  # type: ignore[attr-defined]


def train(model: nn.Module, x: Tensor, half: bool, builds: Builds) -> None:
    """Train from the first step to the commitment, with drops at once instead of after hundreds of steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = flexact.Schedule(model, network_steps=10**6, optimizer=optimizer)

    def step(phase: str) -> None:
        builds.phase = phase
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(loss.detach())

    def evaluate(phase: str) -> None:
        builds.phase = phase
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            model(x)
        model.train()

    step("first step")
    step("second step")
    evaluate("evaluation")
    while not all(site.committed for site in sites_of(model)):
        for site in sites_of(model):
            site.drop_weakest(step=0)
        committed = all(site.committed for site in sites_of(model))
        phase = "commitment" if committed else "drop"
        step(phase)
        evaluate(phase + ", eval")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=("resnet18", "gpt"))
    parser.add_argument("--fuse", action="store_true", help="as convert(..., fuse=True)")
    parser.add_argument("--candidates", type=int, default=7, choices=range(2, len(CANDIDATES) + 1), metavar="K")
    arguments = parser.parse_args()
    config = flexact.FlexConfig(candidates=CANDIDATES[: arguments.candidates])
    if arguments.network == "gpt":
        network: nn.Module = GPT()
        x = torch.randint(256, (8, 64))
    else:
        network = ResNet(BLOCKS["resnet18"], 10).to(memory_format=torch.channels_last)
        x = torch.randn(16, 3, 32, 32).to(memory_format=torch.channels_last)
    with tempfile.TemporaryDirectory() as cache, stub_of_cuda():
        os.environ["TRITON_CACHE_DIR"] = cache
        pretend_to_have_a_gpu()
        builds = Builds()
        Launch.__call__ = lambda launch, *tensors: builds.launch(launch, *tensors)  # type: ignore[method-assign]
        train(flexact.convert(network, config=config, fuse=arguments.fuse), x, arguments.network == "resnet18", builds)
        builds.summary()


if __name__ == "__main__":
    main()
