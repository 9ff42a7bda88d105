"""The command `flexact data`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flexact.io.markdown_tables import counted
from flexact.io.value_checks import check_known


def data(
    name: Annotated[str, typer.Argument(help="cifar10 or cifar100.", show_default=False)],
    folder: Annotated[
        Path,
        typer.Option("--data", help="The folder of the official binary files. Missing files are downloaded to it."),
    ] = Path("data"),
    partial: Annotated[
        bool, typer.Option("--partial", help="Accept fewer images than the official ones; download nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
) -> None:
    """Download the missing files of a data set, check it, and print its contents."""
    from flexact.studies.cifar_data.data import LAYOUTS, SITE, download, load

    check_known("data set", name, LAYOUTS)
    layout = LAYOUTS[name]
    if not partial and layout.missing(folder):
        if not quiet and not (folder / layout.archive).is_file():
            print(f"downloading {layout.archive} from {SITE} to {folder}", file=sys.stderr)
        download(name, folder, progress=not quiet and sys.stderr.isatty())
    images = load(name, folder, partial)
    if quiet:
        return
    print(f"{layout.title} in {layout.place(folder)}")
    print(f"train    {counted(len(images.train_y), 'image')}")
    print(f"test     {counted(len(images.test_y), 'image')}")
    print(f"classes  {images.classes}")
