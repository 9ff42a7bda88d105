"""The official archive of a data set: downloaded, checked, unpacked.

What has arrived stays in a file that ends in .part, and the next call goes on from there. Nothing is unpacked before
size and checksum are right, no file that is there already is touched, and a file appears under its name only whole.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import http.client
import os
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flexact.errors import FlexActError
from flexact.studies.cifar_data.layouts import Layout, layout_of, refuse_others
from flexact.writing import made_folder

SITE = "https://www.cs.toronto.edu/~kriz/"
"""The data sets' own page, at the University of Toronto."""

TRIES = 5
"""Attempts in a row that bring nothing before the download is given up; each that brings something starts anew."""
WAIT = 1.0
"""Seconds before the second attempt; twice as long before each further one."""
TIMEOUT = 30.0
CHUNK = 1 << 20
SPARE = 1 << 20
"""Bytes that an archive may hold beside the images: the names of the classes and a page that describes them."""

Told = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes of the archive: before the transfer, and as they arrive."""


def download(name: str, folder: Path, progress: Told | None = None) -> Path:
    """Bring the files of a set that are not in a folder yet, and return where they are.

    An archive that is in the folder already is taken instead of the network's, after the same checks.
    """
    layout, folder = layout_of(name), Path(folder)
    refuse_others(layout, folder)
    place, at_hand = layout.place(folder), folder / layout.archive
    try:
        with made_folder(folder):
            if at_hand.is_file():
                _check(layout, at_hand, "Remove it, and it is downloaded anew.")
                _unpack(layout, at_hand, folder, place)
                return place
            part = folder / (layout.archive + ".part")
            with _alone(part):
                _fetch(layout, part, progress or (lambda there, size: None))
                try:
                    _check(layout, part, "It was removed; run the same command again.")
                except FlexActError:
                    part.unlink()
                    raise
                _unpack(layout, part, folder, place)
                part.unlink()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        room = (layout.archive_bytes + sum(map(layout.bytes_of, layout.files))) // 1_000_000
        what = f"the disk is full; {room} MB are needed. What has arrived is kept" if full else str(error.strerror)
        raise FlexActError(f"cannot write to {folder}: {what}.") from None
    return place


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """Keep two downloads from writing one file; an empty one is not left behind."""
    with part.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FlexActError(f"another download is writing {part}; wait until it is done.") from None
        try:
            yield
        finally:
            if part.exists() and part.stat().st_size == 0:
                part.unlink()


def _fetch(layout: Layout, part: Path, progress: Told) -> None:
    """Bring what a file lacks of the archive, over as many connections as it takes."""
    address, size = SITE + layout.archive, layout.archive_bytes
    if part.stat().st_size > size:
        os.truncate(part, 0)
    best, failures = part.stat().st_size, 0
    progress(best, size)
    while (there := part.stat().st_size) < size:
        reason = "the connection was cut"
        try:
            _go_on(address, part, there, size, progress)
        except _Lasting as error:
            raise _unreachable(layout, part, address, str(error)) from None
        except http.client.HTTPException as error:
            reason = str(error) or type(error).__name__
        now = part.stat().st_size
        failures = 0 if now > best else failures + 1
        best = max(best, now)
        if failures == TRIES:
            raise _unreachable(layout, part, address, reason)
        if failures:
            time.sleep(WAIT * 2 ** (failures - 1))


class _Lasting(Exception):
    """No use to try again."""


def _answer(address: str, there: int) -> http.client.HTTPResponse:
    """What the server says to a request for the file from some byte on."""
    request = urllib.request.Request(address, headers={"User-Agent": "flexact", "Accept-Encoding": "identity"})
    if there:
        request.add_header("Range", f"bytes={there}-")
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        passing = error.code >= 500 or error.code in (408, 429)
        raise (http.client.HTTPException if passing else _Lasting)(f"HTTP {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        refused = isinstance(error.reason, ConnectionError | TimeoutError)
        raise (http.client.HTTPException if refused else _Lasting)(str(error.reason)) from None
    except OSError as error:
        raise http.client.HTTPException(str(error)) from None
    return answer


def _go_on(address: str, part: Path, there: int, size: int, progress: Told) -> None:
    """Append what one connection brings. One that ends early raises nothing: the file is too short then."""
    with _answer(address, there) as response, part.open("r+b") as file:
        if response.status != 206:
            there = 0  # the server sends all of it
        elif not str(response.headers.get("Content-Range", "")).startswith(f"bytes {there}-"):
            raise http.client.HTTPException("the server sent another part of the file than was asked for")
        length = response.headers.get("Content-Length", "")
        if length.isdigit() and there + int(length) != size:
            raise FlexActError(
                f"{address} has {there + int(length):,} bytes, not the {size:,} of the official archive; is a proxy "
                "or a login page in between?"
            )
        file.truncate(there)
        file.seek(there)
        while there < size and (chunk := _arriving(response, min(CHUNK, size - there))):
            file.write(chunk)
            there += len(chunk)
            progress(there, size)


def _arriving(response: http.client.HTTPResponse, most: int) -> bytes:
    """The next bytes; that the network fails is told apart from a disk that does."""
    try:
        return response.read(most)
    except http.client.IncompleteRead as error:
        return error.partial
    except OSError as error:
        raise http.client.HTTPException(str(error)) from None


def _unreachable(layout: Layout, part: Path, address: str, reason: str) -> FlexActError:
    there, kept = part.stat().st_size, ""
    if there:
        kept = f"{there:,} of {layout.archive_bytes:,} bytes are in {part}, and the same command goes on from there. "
    return FlexActError(
        f"cannot download {address}: {reason}. {kept}Without a network, get the file elsewhere, put it into "
        f"{part.parent}, and run the same command again."
    )


def _check(layout: Layout, path: Path, remedy: str) -> None:
    """Refuse an archive that is not the official one, by size and checksum."""
    size = path.stat().st_size
    if size != layout.archive_bytes:
        raise FlexActError(f"{path} has {size:,} bytes, not {layout.archive_bytes:,}. {remedy}")
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != layout.archive_md5:
        raise FlexActError(
            f"{path} has the MD5 checksum {digest.hexdigest()}, not {layout.archive_md5}: it is not the official "
            f"archive, or was damaged on the way. {remedy}"
        )


def _unpack(layout: Layout, path: Path, folder: Path, place: Path) -> None:
    """Unpack an archive beside the place of its files, and move there those that are missing."""
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as scratch:
        try:
            with tarfile.open(path, "r:gz") as archive:
                # Refuses what leads outside once more; a Python before 3.10.12 has only the check of the names.
                archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
                archive.extractall(scratch, members=_members(layout, path, archive))
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise FlexActError(f"{path} cannot be unpacked: {error}.") from None
        place.mkdir(exist_ok=True)
        for file in sorted((Path(scratch) / layout.folder).iterdir()):
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
