"""List the kernels that Triton builds for an H200 in the first run on a machine, and how long training waits for them.

    python benchmarks/builds.py resnet18 [--fuse] [--candidates 7] [--serial]
    python benchmarks/builds.py gpt

Needs no GPU. A small batch is trained on the CPU from the first step to the commitment, with an evaluation after every
drop. The closed form computes the results, and fused sites return zeros; every launch only builds its kernel, as on a
GPU: the kernels that follow are built in the background (`flexact.ops.triton.ahead`), or one after the other with
--serial. A line is a launch that had to wait: the phase of the training, the kernel, the seconds, and what the kernel
is specialised on. The summary has the seconds by phase, and the time of all builds of this process by stage: Triton's
front end (Python), its compiler, and ptxas. In a real run, hundreds of steps lie between two drops, so a drop happens
when the builds in the background are done. Other work on the machine lengthens all times.
"""

from __future__ import annotations

import argparse
import collections
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget

import flexact
from flexact.ops import dispatch, fallback
from flexact.ops.triton import ahead, autograd, basis, routed
from flexact.ops.triton.launch import Launch, Launches
from flexact.routing.layer import FlexAct
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import BLOCKS, ResNet
from flexact.studies.picks.tasks.gpt import GPT
from flexact.surgery import fused_site

CANDIDATES = ("relu", "leaky_relu", "gelu", "silu", "tanh", "identity", "sigmoid", "elu", "mish", "softplus", "relu6")
OUTPUTS = ("x_ptr", "found_ptr", "to_y_ptr", "to_r_ptr")
"""The arguments that the kernels of a fused site write."""


class CompileOnlyDriver:
    """A Triton driver for an H200 that compiles without a GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Builds:
    """The builds of a run, and how long its launches waited for them."""

    def __init__(self, serial: bool) -> None:
        self.phase, self._serial = "", serial
        self._waits: dict[str, list[float]] = {}
        self._stages: collections.Counter[str] = collections.Counter()
        self._known: set[str] = set()
        triton.knobs.compilation.listener = self._listen

    def _listen(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            lowering = {name: time / 1e6 for name, time in times.lowering_stages}
            self._stages["ptxas"] += lowering.pop("cubin", 0.0)
            self._stages["compiler"] += sum(lowering.values())
            self._stages["front end"] += times.ir_initialization / 1e6
            self._stages["builds"] += 1

    def launch(self, launches: Launches, *tensors: Tensor) -> None:
        """Replace the launches of a pass."""
        for launch, places in launches.steps:
            self._build(launch, [tensors[i] for i in places])

    def _build(self, launch: Launch, tensors: list[Tensor]) -> None:
        """Replace a launch: build its kernel if this specialisation is new, and write zeros."""
        kernel, dtypes = launch.kernel, tuple(tensor.dtype for tensor in tensors)
        for name, tensor in zip(kernel.arg_names[len(launch.missing) :], tensors, strict=False):
            if name in OUTPUTS:
                tensor.zero_()
        start = time.perf_counter()
        if not self._serial:
            launch._build_prepared_ahead(-1, dtypes)
            ahead.wait_for(launch._build_key(-1, dtypes))
        arguments = (*launch.missing, *tensors, *launch.numbers, *launch.constants)
        built = kernel.warmup(*arguments, grid=launch.grid, num_warps=launch.warps)
        if built.hash in self._known:
            return
        self._known.add(built.hash)
        waited = time.perf_counter() - start
        self._waits.setdefault(self.phase, []).append(waited)
        print(f"{self.phase:16} {kernel.__module__.rpartition('.')[2] + '.' + kernel.__name__:29} {waited:.2f} s")
        print("   ", *specialisation(launch, built.src))

    def summary(self) -> None:
        """Print the waiting times by phase, and the time of all builds by stage."""
        for phase, waits in self._waits.items():
            print(f"{phase}: {len(waits)} kernels, waited {sum(waits):.1f} s")
        stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self._stages.items() if stage != "builds")
        total = sum(sum(waits) for waits in self._waits.values())
        print(f"waited {total:.1f} s in total for {self._stages['builds']:.0f} builds ({stages})")


def specialisation(launch: Launch, source: Any) -> list[str]:
    """Return what a build is specialised on: constants, numbers that are 1, multiples of 16, and dtypes."""
    names = launch.kernel.arg_names
    constants = zip(names[-len(launch.constants) :], launch.constants, strict=True)
    ones = [f"{names[path[0]]}=1" for path in source.constants if not names[path[0]].isupper()]
    multiples = [f"{names[path[0]]}%16" for path, attributes in source.attrs.items() if attributes]
    dtypes = [kind for kind in source.signature.values() if kind != "constexpr"]
    return [*(f"{name}={value}" for name, value in constants if name != "FORMS"), *ones, *multiples, *dtypes]


def record_and_fall_back(kernel: Callable[..., Any], plain: Callable[..., Any], *arguments: Any) -> Any:
    """Replace `fallback.run`: launch for the record, and compute the result in plain torch."""
    kernel(*arguments)
    return plain(*arguments)


def run_fused(site: FlexAct, *parts: Any) -> Tensor:
    """Replace `fused_site.normalised_site`, which would run the parts as its fallback."""
    return fused_site._run_fused(site, fused_site.Deferred(*parts))


def pretend_to_have_a_gpu(builds: Builds) -> None:
    """Build the Triton kernels for CPU tensors, with the functions that a GPU would use."""
    triton.runtime.driver.set_active(CompileOnlyDriver())
    Launches.__call__ = lambda launches, *tensors: builds.launch(launches, *tensors)  # type: ignore[method-assign]
    dispatch._why_unsupported = lambda *_: ""  # type: ignore[assignment]
    dispatch.use("triton")
    for module in (basis, routed):
        module.is_fast = lambda h: h.element_size() == 2  # type: ignore[attr-defined]
    autograd.run = fallback.run = record_and_fall_back  # type: ignore[attr-defined]
    fused_site.normalised_site = run_fused  # type: ignore[assignment]


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
        wait(ahead._later.values())
        for site in sites_of(model):
            site.keep(len(site.alive) - 1, step=0)
        committed = all(site.committed for site in sites_of(model))
        phase = "commitment" if committed else "drop"
        step(phase)
        evaluate(phase + ", eval")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=("resnet18", "gpt"))
    parser.add_argument("--fuse", action="store_true", help="as convert(..., fuse=True)")
    parser.add_argument("--serial", action="store_true", help="build nothing ahead")
    parser.add_argument("--candidates", type=int, default=7, choices=range(2, len(CANDIDATES) + 1), metavar="K")
    arguments = parser.parse_args()
    config = flexact.FlexConfig(candidates=CANDIDATES[: arguments.candidates])
    if arguments.network == "gpt":
        network: nn.Module = GPT()
        x = torch.randint(256, (8, 64))
    else:
        network = ResNet(BLOCKS["resnet18"], 10).to(memory_format=torch.channels_last)
        x = torch.randn(16, 3, 16, 16).to(memory_format=torch.channels_last)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        builds = Builds(arguments.serial)
        pretend_to_have_a_gpu(builds)
        train(flexact.convert(network, config=config, fuse=arguments.fuse), x, arguments.network == "resnet18", builds)
        ahead._pool().shutdown()
        builds.summary()


if __name__ == "__main__":
    main()
