"""Downloading the official archive of a data set.

The checksum is verified before anything is read from the archive. Only the expected files are written, each atomically,
and existing files are kept.
"""

from __future__ import annotations

import hashlib
import http.client
import tarfile
import tempfile
import urllib.error
from pathlib import Path

import torch

from flexact.errors import FlexActError
from flexact.io.atomic_files import made_folder, write_whole
from flexact.studies.cifar_data.layouts import Layout, layout_of

SITE = "https://www.cs.toronto.edu/~kriz/"
"""The data sets' own page, at the University of Toronto."""


def download(name: str, folder: Path, progress: bool = False) -> Path:
    """Download the files of a set that are missing in a folder, and return the folder with the files.

    If the archive is in the folder already, it is used after the same check. progress: whether to show a bar.
    """
    layout, folder = layout_of(name), Path(folder)
    place, archive = layout.place(folder), folder / layout.archive
    try:
        with made_folder(folder), tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            if not archive.is_file():
                archive = Path(scratch, layout.archive)
                torch.hub.download_url_to_file(SITE + layout.archive, str(archive), progress=progress)
            _unpack(layout, archive, place)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise FlexActError(
            f"cannot download {SITE + layout.archive}: {error}. Run the same command again; or, without a network, "
            f"copy the file into {folder} first."
        ) from None
    except OSError as error:
        raise FlexActError(f"cannot write to {folder}: {error.strerror}.") from None
    return place


def _unpack(layout: Layout, path: Path, place: Path) -> None:
    """Write the missing files of a set from its archive."""
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    if digest != layout.archive_md5:
        raise FlexActError(
            f"{path} has the MD5 checksum {digest}, not {layout.archive_md5}: it is incomplete, damaged, or not the "
            "official archive. Remove it if it is still there, and run the same command again."
        )
    with tarfile.open(path, "r:gz") as archive:
        members = {member.name.removeprefix("./"): member for member in archive.getmembers() if member.isreg()}
        for file in layout.files:
            member = members.get(f"{layout.folder}/{file}")
            content = None if member is None else archive.extractfile(member)
            if content is None:
                raise FlexActError(f"{path} lacks {file}; it is not the archive of {layout.title}.")
            if not (place / file).exists():
                place.mkdir(exist_ok=True)
                write_whole(place / file, content.read(layout.bytes_of(file)))
