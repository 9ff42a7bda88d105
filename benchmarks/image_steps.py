"""Time a training step of the image study with each method, interleaved, on an otherwise idle device.

    python benchmarks/image_steps.py [--out results/cifar/steps.csv] [--methods relu,flexact-all] [--model resnet18]

The whole step (augmentation, forward, loss, backward, policy, optimizer; on a GPU one CUDA graph) on random images of
CIFAR-100's shape is timed. All methods are in memory and run in turns, a burst each. Times are medians over rounds, and
ratios are computed within a round. A method that picks is timed twice: with all of its candidates, and committed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from flexact.io.atomic_files import write_rows
from flexact.studies.cifar.methods import BASELINE, METHODS, PLACEMENTS, build
from flexact.studies.cifar.protocol import Protocol
from flexact.studies.cifar.training import Training
from flexact.studies.cifar_data.data import Images, random_images
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.cuda_graph import EAGER_STEPS, study_stream
from flexact.studies.overhead.timing import interleaved, ratios, spread
from flexact.studies.provenance import provenance

LONG, SHORT = 10**6, 1
"""Steps per round: with LONG nothing is dropped while steps are timed; with SHORT sites commit before that."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/cifar/steps.csv"), help="the CSV file to write")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, separated by commas; relu is always added")
    parser.add_argument("--model", default="resnet18", choices=list(BLOCKS))
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20, help="rounds")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    methods = dict.fromkeys([BASELINE, *given.methods.split(",")])
    cases = [
        (method, stage) for method in methods for stage in (("picking", "committed") if method in PLACEMENTS else ("",))
    ]
    flags = torch.backends.cudnn.flags(enabled=True, deterministic=True)
    with study_stream(device), flags:
        images = random_images(8 * given.batch if device.type == "cpu" else 50_000).to(device)
        runs = {case: _training(*case, given, images, device).step for case in cases}
        times, failed = interleaved(runs, given.repeats, device, burst_ms=60.0)
    for case, error in failed.items():
        print(f"{' '.join(case)}: {error}")
    own, rows = provenance(), []
    for case, values in times.items():
        step, ratio = spread(values), ratios(values, times[BASELINE, ""])
        rows.append(
            {
                "model": given.model,
                "batch": given.batch,
                "method": case[0],
                "stage": case[1],
                "candidates": len(Protocol().candidates or ()) if case[0] in PLACEMENTS else "",
                "rounds": len(values),
                "step_ms": step.median,
                "step_ms_low": step.low,
                "step_ms_high": step.high,
                "ratio": ratio.median,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                **own,
            }
        )
        print(f"{' '.join(case):30} {step.median:7.3f} ms  {ratio.median:.3f} of {BASELINE}")
    write_rows(given.out, rows)


def _training(method: str, stage: str, given: argparse.Namespace, images: Images, device: torch.device) -> Training:
    """Return the training of a method after its warm-up: captured on a GPU, and committed if `stage` says so."""
    changes = {"round_steps": SHORT if stage == "committed" else LONG}
    protocol = Protocol(epochs=200, batch=given.batch, width=given.width, changes=changes)
    torch.manual_seed(0)
    network = build(given.model, method, images.classes, protocol.config(0), given.width)
    if device.type == "cuda":
        network = network.to(device, memory_format=torch.channels_last)
    training = Training(network, images, protocol, 0, device)
    for _ in range(len(protocol.candidates or ()) + 2 * EAGER_STEPS):
        training.step()
    return training


if __name__ == "__main__":
    main()
