"""The official archive of a data set: downloaded, checked, unpacked.

Nothing is unpacked before size and checksum are right, no file that is there already is touched, and a file appears
under its name only when it is complete.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.error
import zlib
from pathlib import Path

import torch

from flexact.errors import FlexActError
from flexact.io.atomic_files import made_folder
from flexact.studies.cifar_data.layouts import Layout, layout_of, refuse_others

SITE = "https://www.cs.toronto.edu/~kriz/"
"""The data sets' own page, at the University of Toronto."""
SPARE = 1 << 20
"""Bytes that an archive may hold beside the images: the names of the classes and a page that describes them."""


def download(name: str, folder: Path, progress: bool = False) -> Path:
    """Download the files of a set that are not in a folder yet, and return where they are.

    An archive that is in the folder already is used instead, after the same checks.
    progress: whether to show a bar.
    """
    layout, folder = layout_of(name), Path(folder)
    refuse_others(layout, folder)
    place, at_hand = layout.place(folder), folder / layout.archive
    try:
        with made_folder(folder), tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as scratch:
            archive, remedy = at_hand, "Remove it, and it is downloaded again."
            if not at_hand.is_file():
                archive, remedy = Path(scratch, layout.archive), "Run the same command again."
                _fetch(SITE + layout.archive, archive, folder, progress)
            _check(layout, archive, remedy)
            _unpack(layout, archive, Path(scratch, "unpacked"), place)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        room = (layout.archive_bytes + sum(map(layout.bytes_of, layout.files))) // 1_000_000
        what = f"the disk is full; {room} MB are needed" if full else str(error.strerror)
        raise FlexActError(f"cannot write to {folder}: {what}.") from None
    return place


def _fetch(address: str, path: Path, folder: Path, progress: bool) -> None:
    try:
        torch.hub.download_url_to_file(address, str(path), progress=progress)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise FlexActError(
            f"cannot download {address}: {error}. Run the same command again; or, without a network, get the file "
            f"elsewhere and put it into {folder} first."
        ) from None


def _check(layout: Layout, path: Path, remedy: str) -> None:
    """Refuse an archive that is not the official one, by size and checksum."""
    size = path.stat().st_size
    if size != layout.archive_bytes:
        raise FlexActError(f"{path} has {size:,} bytes, not {layout.archive_bytes:,}. {remedy}")
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != layout.archive_md5:
        raise FlexActError(
            f"{path} has the MD5 checksum {digest.hexdigest()}, not {layout.archive_md5}: it is not the official "
            f"archive, or was damaged on the way. {remedy}"
        )


def _unpack(layout: Layout, path: Path, scratch: Path, place: Path) -> None:
    """Unpack an archive into a scratch folder, and move the files that are missing to their place."""
    try:
        with tarfile.open(path, "r:gz") as archive:
            # Refuses what leads outside once more; a Python before 3.10.12 has only the check of the names.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            archive.extractall(scratch, members=_members(layout, path, archive))
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise FlexActError(f"{path} cannot be unpacked: {error}.") from None
    place.mkdir(exist_ok=True)
    for file in sorted((scratch / layout.folder).iterdir()):
        if not (place / file.name).exists():
            os.replace(file, place / file.name)


def _members(layout: Layout, path: Path, archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """What an archive holds: files of one folder and no more, or else nothing of it is unpacked."""
    members = archive.getmembers()
    for member in members:
        parts = member.name.removeprefix("./").rstrip("/").split("/")
        folder = member.isdir() and parts == [layout.folder]
        file = member.isreg() and len(parts) == 2 and parts[0] == layout.folder and parts[1] not in ("", ".", "..")
        if not folder and not file:
            kind = "a link" if member.issym() or member.islnk() else "not a file of that folder"
            raise FlexActError(
                f"{path} holds {member.name!r}, which is {kind}: only files of {layout.folder} are expected. Nothing "
                "was unpacked."
            )
    if sum(member.size for member in members) > sum(map(layout.bytes_of, layout.files)) + SPARE:
        raise FlexActError(f"{path} would unpack to far more than {layout.title}. Nothing was unpacked.")
    names = {Path(member.name).name for member in members}
    missing = [file for file in layout.files if file not in names]
    if missing:
        raise FlexActError(f"{path} lacks {', '.join(missing)}. Nothing was unpacked.")
    return members
