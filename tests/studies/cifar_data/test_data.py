"""Tests of reading CIFAR from the official binary files, complete and small data sets."""

import dataclasses
import hashlib
import os
from pathlib import Path

import pytest
import torch

from flexact import FlexActError
from flexact.cli.app import main
from flexact.studies.cifar_data import data as layouts
from flexact.studies.cifar_data.data import NAMES, load


@pytest.fixture
def small(monkeypatch):
    """Sets both data sets to 100 images per file, so that a small set is a complete one."""
    for name, layout in layouts.LAYOUTS.items():
        records = {"train": dict.fromkeys(layout.train, 100), "test": dict.fromkeys(layout.test, 100)}
        monkeypatch.setitem(layouts.LAYOUTS, name, dataclasses.replace(layout, **records))


def complete(write_cifar, folder: Path, name: str) -> Path:
    return write_cifar(folder, name, train=100 * len(layouts.LAYOUTS[name].train), test=100)


def run(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["data", *arguments])
    captured = capsys.readouterr()
    assert exit_.value.code == 0, captured.err
    return captured.out


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["data", *arguments])
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize("name", NAMES)
def test_records_become_planes_and_classes(tmp_path, write_cifar, name):
    place = write_cifar(tmp_path, name, train=43, test=7)
    images = load(name, tmp_path, partial=True)
    assert images.train_x.shape == (43, 3, 32, 32)
    assert images.test_x.shape == (7, 3, 32, 32)
    assert images.train_x.is_contiguous()
    assert (images.train_x.dtype, images.train_y.dtype) == (torch.uint8, torch.int64)
    assert images.classes == {"cifar10": 10, "cifar100": 100}[name]
    # The layout of the data sets: one label byte, or the coarse and the fine one, then red, green and blue, row by row.
    labels = {"cifar10": 1, "cifar100": 2}[name]
    record = labels + 3072
    raw = (place / {"cifar10": "test_batch.bin", "cifar100": "test.bin"}[name]).read_bytes()
    assert len(raw) == 7 * record
    assert images.test_y[5] == raw[5 * record + labels - 1]
    assert images.test_x[5, 2, 3, 4] == raw[5 * record + labels + 2 * 1024 + 3 * 32 + 4]


def test_batches_are_read_in_their_order(tmp_path, write_cifar):
    place = write_cifar(tmp_path, "cifar10", train=43)
    raw = b"".join((place / f"data_batch_{number}.bin").read_bytes() for number in range(1, 6))
    assert load("cifar10", place, partial=True).train_y.tolist() == list(raw[::3073])


def test_means_and_deviations_match_the_training_images(tmp_path, write_cifar):
    images = load("cifar100", write_cifar(tmp_path, "cifar100"), partial=True)
    scaled = images.train_x.double() / 255
    torch.testing.assert_close(images.mean, scaled.mean((0, 2, 3)).float())
    torch.testing.assert_close(images.std, scaled.std((0, 2, 3), correction=0).float())


def test_a_data_set_is_identified_by_the_bytes_of_its_files(tmp_path, write_cifar):
    place = write_cifar(tmp_path, "cifar10", train=43)
    files = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    whole = b"".join((place / file).read_bytes() for file in files)
    assert load("cifar10", place, partial=True).sha256 == hashlib.sha256(whole).hexdigest()


def test_moving_to_a_device_keeps_everything(tmp_path, write_cifar):
    images = load("cifar10", write_cifar(tmp_path, "cifar10"), partial=True)
    moved = images.to("meta")
    parts = (moved.train_x, moved.train_y, moved.test_x, moved.test_y, moved.mean, moved.std)
    assert {part.device.type for part in parts} == {"meta"}
    assert (moved.classes, moved.name, moved.sha256) == (10, "cifar10", images.sha256)


@pytest.mark.parametrize("name", NAMES)
def test_a_complete_set_is_read_from_its_folder_or_the_parent(small, tmp_path, write_cifar, name):
    place = complete(write_cifar, tmp_path, name)
    assert torch.equal(load(name, place).train_x, load(name, tmp_path).train_x)
    renamed = place.rename(tmp_path / "mine")
    assert layouts.LAYOUTS[name].missing(renamed) == []
    assert len(load(name, renamed).test_x) == 100


def test_a_part_of_a_set_is_read_only_when_asked_for(tmp_path, write_cifar):
    write_cifar(tmp_path, "cifar10")
    message = r"data_batch_1.bin has 307,300 bytes, not 30,730,000 \(10,000 records of 3,073 bytes\).*--partial"
    with pytest.raises(FlexActError, match=message):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("partial", [False, True])
def test_a_truncated_file_is_named(small, tmp_path, write_cifar, partial):
    place = complete(write_cifar, tmp_path, "cifar10")
    os.truncate(place / "data_batch_4.bin", 3073 * 50 + 1)
    with pytest.raises(FlexActError, match=r"data_batch_4.bin has 153,651 bytes.* Remove it, and download it"):
        load("cifar10", tmp_path, partial=partial)


def test_an_empty_file_is_refused_also_in_a_part(tmp_path, write_cifar):
    os.truncate(write_cifar(tmp_path, "cifar100") / "test.bin", 0)
    with pytest.raises(FlexActError, match=r"test\.bin .*0 bytes"):
        load("cifar100", tmp_path, partial=True)


def test_missing_files_are_named_with_the_command_that_downloads_them(tmp_path, write_cifar):
    place = write_cifar(tmp_path / "my data", "cifar10")
    (place / "data_batch_2.bin").unlink()
    (place / "test_batch.bin").unlink()
    message = r"lacks data_batch_2.bin, test_batch.bin of the binary version.*flexact data cifar10 --data '.*my data'"
    with pytest.raises(FlexActError, match=message):
        load("cifar10", tmp_path / "my data")


def test_a_folder_without_the_set_says_how_to_get_it(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FlexActError, match="flexact data cifar100 --data"):
            load("cifar100", folder)


def test_both_sets_may_share_a_parent(tmp_path, write_cifar):
    for name in NAMES:
        write_cifar(tmp_path, name)
    assert [load(name, tmp_path, partial=True).classes for name in NAMES] == [10, 100]


@pytest.mark.parametrize(
    ("files", "given"),
    [
        (["cifar-10-batches-py/data_batch_1"], "."),
        (["cifar-10-batches-py/data_batch_1"], "cifar-10-batches-py"),
        (["cifar-10-python.tar.gz"], "."),
        (["mine/batches.meta", "mine/data_batch_1"], "mine"),
        (["mine/meta", "mine/train", "mine/test"], "mine"),
    ],
)
def test_pickles_are_refused_and_never_opened(capsys, tmp_path, files, given):
    for file in files:
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
        path.chmod(0)
    with pytest.raises(FlexActError, match=r"binary version.* pickles, which can run code and are never read"):
        load("cifar10", tmp_path / given)
    assert "pickle" in refused(capsys, "cifar10", "--data", str(tmp_path / given), "--partial")


def test_pickles_next_to_the_binary_files_are_ignored(tmp_path, write_cifar):
    (tmp_path / "cifar-10-batches-py").mkdir()
    write_cifar(tmp_path, "cifar10")
    assert load("cifar10", tmp_path, partial=True).classes == 10


@pytest.mark.parametrize(("name", "byte", "value"), [("cifar10", 0, 10), ("cifar100", 0, 20), ("cifar100", 1, 100)])
def test_a_label_out_of_range_is_reported_with_its_record(tmp_path, write_cifar, name, byte, value):
    place = write_cifar(tmp_path, name)
    file = place / next(iter(layouts.LAYOUTS[name].test))
    raw = bytearray(file.read_bytes())
    raw[7 * layouts.LAYOUTS[name].record_bytes + byte] = value
    file.write_bytes(raw)
    with pytest.raises(FlexActError, match=rf"record 7: .*{value}"):
        load(name, tmp_path, partial=True)


def test_a_file_instead_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FlexActError, match="there is no CIFAR-10"):
        load("cifar10", tmp_path / "file")


def test_a_learnable_set_can_be_learned(tmp_path, write_cifar):
    images = load("cifar10", write_cifar(tmp_path, "cifar10"), partial=True)
    centres = torch.stack([images.train_x[images.train_y == one].float().mean(0) for one in range(10)])
    nearest = torch.cdist(images.test_x.float().flatten(1), centres.flatten(1)).argmin(1)
    assert (nearest == images.test_y).float().mean() > 0.95


def test_the_command_prints_what_the_folder_contains(small, capsys, tmp_path, write_cifar):
    folder = complete(write_cifar, tmp_path, "cifar10")
    out = run(capsys, "cifar10", "--data", str(tmp_path))
    assert out.startswith(f"CIFAR-10 in {folder}\ntrain    500 images\ntest     100 images\n")
    assert "classes  10\n" in out
    assert run(capsys, "cifar10", "--data", str(folder), "--quiet") == ""


def test_the_command_reads_a_part_of_a_data_set_if_asked_to(capsys, tmp_path, write_cifar):
    write_cifar(tmp_path, "cifar100", train=150)
    assert "bytes, not 153,700,000" in refused(capsys, "cifar100", "--data", str(tmp_path))
    assert "150 images" in run(capsys, "cifar100", "--data", str(tmp_path), "--partial")
    assert "there is no CIFAR-10 in" in refused(capsys, "cifar10", "--data", str(tmp_path), "--partial")


def test_an_unknown_set_is_one_clear_line(capsys, tmp_path):
    assert "unknown data set 'cifar1'; did you mean 'cifar10'?" in refused(capsys, "cifar1", "--data", str(tmp_path))
