"""Tests of downloads from a local server: complete, truncated, wrong and hostile archives."""

import dataclasses
import errno
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from flexact import FlexActError
from flexact.cli.app import main
from flexact.studies.cifar_data import data as cifar
from flexact.studies.cifar_data.data import download, load

NAME = "cifar-10-binary.tar.gz"


class Server(ThreadingHTTPServer):
    """Serves one archive, with the failure that a test asks for."""

    content = b""
    cut_after: int | None = None
    """Bytes after which every connection is cut."""
    status = 200
    asked: list[str]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.status != 200 or self.path != "/" + NAME:
            self.send_error(404 if self.server.status == 200 else self.server.status)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content[: self.server.cut_after])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(("127.0.0.1", 0), Handler) as running:
        running.asked = []
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(cifar, "SITE", running.address)
        yield running
        running.shutdown()
        thread.join()


def packed(place: Path) -> bytes:
    """Returns the archive of a folder."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        tar.add(place, place.name)
    return content.getvalue()


def publish(server: Server, monkeypatch, content: bytes) -> bytes:
    """Serves an archive as the official one."""
    layout = cifar.LAYOUTS["cifar10"]
    official = dataclasses.replace(
        layout,
        train=dict.fromkeys(layout.train, 10),
        test=dict.fromkeys(layout.test, 10),
        archive_md5=hashlib.md5(content).hexdigest(),
    )
    monkeypatch.setitem(cifar.LAYOUTS, "cifar10", official)
    server.content = content
    return content


@pytest.fixture
def original(tmp_path, write_cifar) -> Path:
    """Ten images per file."""
    place = write_cifar(tmp_path / "original", "cifar10", train=50, test=10)
    return place


@pytest.fixture
def official(server, monkeypatch, original) -> bytes:
    return publish(server, monkeypatch, packed(original))


def files(folder: Path) -> dict[str, bytes]:
    """Returns everything below a folder, including hidden files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_download_leaves_the_expected_files_and_nothing_else(server, official, original, tmp_path):
    place = download("cifar10", tmp_path / "new" / "data")
    assert place == tmp_path / "new" / "data" / "cifar-10-batches-bin"
    assert files(place) == files(original)
    assert set(files(tmp_path / "new")) == {f"data/cifar-10-batches-bin/{name}" for name in files(original)}
    assert torch.equal(load("cifar10", place).train_x, load("cifar10", original).train_x)


def test_a_file_of_another_size_is_not_downloaded(server, official, tmp_path):
    server.content = b"<html>log in first</html>"
    with pytest.raises(FlexActError, match=r"MD5 checksum .* and run the same command again"):
        download("cifar10", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_truncated_download_and_a_wrong_checksum_are_reported_and_nothing_is_unpacked(
    server, official, original, tmp_path
):
    server.cut_after = len(official) // 3
    with pytest.raises(FlexActError, match=r"MD5 checksum|cannot download"):
        download("cifar10", tmp_path / "data")
    server.cut_after, server.content = None, official[:-1] + b"\xff"
    with pytest.raises(FlexActError, match=f"MD5 checksum [0-9a-f]{{32}}, not {hashlib.md5(official).hexdigest()}"):
        download("cifar10", tmp_path / "data")
    assert not (tmp_path / "data").exists()
    server.content = official
    assert files(download("cifar10", tmp_path / "data")) == files(original)


@pytest.mark.parametrize("status", [404, 503])
def test_an_error_of_the_server_is_reported(server, official, tmp_path, status):
    server.status = status
    with pytest.raises(FlexActError, match=f"HTTP Error {status}: .* without a network, copy the file into"):
        download("cifar10", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_missing_server_is_reported(official, monkeypatch, tmp_path):
    monkeypatch.setattr(cifar, "SITE", "http://nowhere.invalid/")
    with pytest.raises(FlexActError, match=r"cannot download http://nowhere.invalid/cifar-10-binary.tar.gz: "):
        download("cifar10", tmp_path / "data")


def test_a_local_archive_is_unpacked_and_kept(server, official, original, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / NAME).write_bytes(official)
    assert files(download("cifar10", tmp_path / "data")) == files(original)
    assert (tmp_path / "data" / NAME).read_bytes() == official
    assert server.asked == []


def test_a_wrong_local_archive_is_reported_and_kept(official, tmp_path):
    wrong = official[:-1] + b"\xff"
    (tmp_path / NAME).write_bytes(wrong)
    with pytest.raises(FlexActError, match=r"MD5 checksum.*Remove it"):
        download("cifar10", tmp_path)
    assert (tmp_path / NAME).read_bytes() == wrong


def test_existing_files_are_not_touched(server, official, original, tmp_path):
    place = tmp_path / "data" / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    (place / "data_batch_1.bin").write_bytes(b"mine")
    download("cifar10", tmp_path / "data")
    assert files(place) == {**files(original), "data_batch_1.bin": b"mine"}


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def named(name: str, size: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


HOSTILE = {
    "above": named("../escaped"),
    "above, from inside": named("cifar-10-batches-bin/../../escaped"),
    "absolute": named("/tmp/escaped"),
    "another folder": named("other/escaped"),
    "no folder": named("escaped"),
    "deeper": named("cifar-10-batches-bin/a/escaped"),
    "symbolic link": link("cifar-10-batches-bin/link", "/etc/passwd", tarfile.SYMTYPE),
    "the folder as a link": link("cifar-10-batches-bin", "/tmp", tarfile.SYMTYPE),
    "hard link": link("cifar-10-batches-bin/link", "../../escaped", tarfile.LNKTYPE),
    "pipe": link("cifar-10-batches-bin/pipe", "", tarfile.FIFOTYPE),
    "huge": named("cifar-10-batches-bin/huge", 50_000_000),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_only_the_expected_files_of_a_hostile_archive_are_written(server, monkeypatch, original, tmp_path, kind):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        tar.add(original, original.name)
        tar.addfile(HOSTILE[kind], io.BytesIO(bytes(HOSTILE[kind].size)))
    publish(server, monkeypatch, content.getvalue())
    before = set(tmp_path.rglob("*"))
    place = download("cifar10", tmp_path / "data")
    assert files(place) == files(original)
    assert set(tmp_path.rglob("*")) - before == {place.parent, place, *place.iterdir()}
    assert not any(path.is_symlink() for path in place.iterdir())
    assert not Path("/tmp/escaped").exists()


def test_an_archive_without_a_file_is_refused(server, monkeypatch, original, tmp_path):
    (original / "data_batch_5.bin").unlink()
    publish(server, monkeypatch, packed(original))
    with pytest.raises(FlexActError, match=r"data_batch_5\.bin"):
        download("cifar10", tmp_path / "data")


def test_a_folder_that_cannot_be_made_is_reported(official, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FlexActError, match="file/data: Not a directory"):
        download("cifar10", tmp_path / "file" / "data")


def test_a_full_disk_is_reported(official, monkeypatch, tmp_path):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch.hub, "download_url_to_file", full)
    with pytest.raises(FlexActError, match=r"cannot write to .*: No space left"):
        download("cifar10", tmp_path)


def test_the_command_downloads_and_prints_the_files(server, official, capsys, tmp_path):
    for number in range(2):
        with pytest.raises(SystemExit) as exit_:
            main(["data", "cifar10", "--data", str(tmp_path / "data")])
        assert exit_.value.code == 0
        captured = capsys.readouterr()
        assert "train    50 images" in captured.out
        assert ("downloading cifar-10-binary.tar.gz from http://127.0.0.1" in captured.err) == (number == 0)
    assert len(server.asked) == 1


def test_a_refused_local_archive_is_not_called_a_download(server, official, capsys, tmp_path):
    (tmp_path / NAME).write_bytes(b"short")
    with pytest.raises(SystemExit) as exit_:
        main(["data", "cifar10", "--data", str(tmp_path)])
    assert exit_.value.code == 2
    output = capsys.readouterr().err
    assert "MD5 checksum" in output
    assert "downloading" not in output


def test_a_failed_download_leaves_no_folder(server, official, tmp_path):
    server.status = 404
    with pytest.raises(FlexActError, match="HTTP Error 404"):
        download("cifar10", tmp_path / "new" / "data")
    assert not (tmp_path / "new").exists()


def test_the_command_restores_removed_files(server, official, original, capsys, tmp_path):
    place = download("cifar10", tmp_path)
    (place / "data_batch_3.bin").unlink()
    with pytest.raises(SystemExit) as exit_:
        main(["data", "cifar10", "--data", str(place), "--quiet"])
    assert exit_.value.code == 0
    assert files(place) == files(original)
    assert capsys.readouterr() == ("", "")


def test_published_sizes_and_checksums_of_the_archives():
    ten, hundred = (cifar.LAYOUTS[name] for name in ("cifar10", "cifar100"))
    assert cifar.SITE == "https://www.cs.toronto.edu/~kriz/"
    assert (ten.archive, ten.archive_md5) == ("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")
    assert (hundred.archive, hundred.archive_md5) == ("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8")
