"""Tests of GLUE's files: what is read, and what is refused with its line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexact import FlexActError
from flexact.studies.glue.data import OF_DEV, OFFICIAL, TASKS, check_rows, load

REAL = Path(__file__).parents[4] / "shared" / "data" / "glue"


def test_every_task_is_read(glue_folder: Path) -> None:
    for name, task in TASKS.items():
        found = load(name, glue_folder)
        assert found.split == (OF_DEV if name == "qnli" else OFFICIAL)
        assert {len(texts) for texts, _ in found.train} == {len(task.texts)}
        assert all(0 <= label <= 5 if task.is_regression else label in (0.0, 1.0) for _, label in found.dev)
    cola = load("cola", glue_folder)
    assert (len(cola.train), len(cola.dev)) == (24, 20)
    assert [label for _, label in cola.train[:3]] == [0.0, 1.0, 0.0]
    assert [label for _, label in load("stsb", glue_folder).train[:3]] == [0.5, 1.5, 2.5]
    assert load("rte", glue_folder).train[0][1] == 1.0  # not_entailment


def test_a_split_dev_file_has_all_rows_once_and_no_sentence_in_both_parts(glue_folder: Path) -> None:
    found = load("qnli", glue_folder)
    assert len(found.train) + len(found.dev) == 20
    sides = [{texts[1] for texts, _ in rows} for rows in (found.train, found.dev)]
    assert not sides[0] & sides[1]
    assert load("qnli", glue_folder) == found


def test_a_task_is_identified_by_its_rows(glue_folder: Path) -> None:
    before = load("rte", glue_folder).sha256
    assert load("rte", glue_folder).sha256 == before
    for file in ("train.tsv", "dev.tsv"):
        path = glue_folder / "RTE" / file
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([lines[0], lines[2], lines[1], *lines[3:]]))  # another order is another run
        assert load("rte", glue_folder).sha256 != before
        path.write_text("".join(lines))


def test_only_the_first_rows_are_read(glue_folder: Path) -> None:
    assert [len(rows) for rows in (load("rte", glue_folder).first(5).train, load("rte", glue_folder).dev)] == [5, 20]


@pytest.mark.skipif(not REAL.is_dir(), reason="GLUE's own files are not part of the repository")
@pytest.mark.parametrize(
    ("name", "train", "dev"),
    [("cola", 8551, 1043), ("mrpc", 3668, 408), ("stsb", 5749, 1500), ("rte", 2490, 277), ("wnli", 635, 71)],
)
def test_the_official_files_have_their_published_counts(name: str, train: int, dev: int) -> None:
    found = load(name, REAL)
    assert (len(found.train), len(found.dev)) == (train, dev)


def change(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("task", "old", "new", "message"),
    [
        ("RTE", "sentence2", "hypothesis", r"train.tsv does not begin with the columns of RTE: index, sentence1"),
        ("RTE", "index\tsentence1", "sentence1\tindex", r"does not begin with the columns of RTE"),
        ("RTE", "\tentailment\n", "\n", r"train.tsv, line 3: 3 fields, expected 4 separated by tabs"),
        ("CoLA", "gj04\t1", "gj04\t\t1", r"train.tsv, line 2: 5 fields, expected 4"),
        ("RTE", "\tentailment\n", "\tperhaps\n", r"line 3: the label is 'perhaps'; expected entailment or"),
        ("CoLA", "gj04\t1", "gj04\t2", r"train.tsv, line 2: the label is '2'; expected 0 or 1"),
        ("STS-B", "\t1.500\n", "\t7.000\n", r"line 3: the label is '7.000'; expected a number from 0 to 5"),
        ("STS-B", "\t1.500\n", "\tnan\n", r"line 3: the label is 'nan'"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(
    task: str, old: str, new: str, message: str, glue_folder: Path
) -> None:
    change(glue_folder / task / "train.tsv", old, new)
    with pytest.raises(FlexActError, match=message):
        load(task.lower().replace("-", ""), glue_folder)


def test_empty_files_are_reported(glue_folder: Path) -> None:
    path = glue_folder / "WNLI" / "dev.tsv"
    path.write_text("index\tsentence1\tsentence2\tlabel\n")
    with pytest.raises(FlexActError, match=r"24 training and 0 dev rows"):
        check_rows(load("wnli", glue_folder))
    path.write_text("")
    with pytest.raises(FlexActError, match=r"dev\.tsv does not begin with the columns"):
        load("wnli", glue_folder)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FlexActError, match=r"dev\.tsv .*UTF-8"):
        load("wnli", glue_folder)


def test_missing_files_are_reported(glue_folder: Path) -> None:
    (glue_folder / "RTE" / "dev.tsv").unlink()
    with pytest.raises(FlexActError, match=r"cannot read .*dev\.tsv"):
        load("rte", glue_folder)
    (glue_folder / "RTE" / "train.tsv").unlink()
    with pytest.raises(FlexActError, match=r"train\.tsv does not exist; give --data"):
        load("rte", glue_folder)


def test_without_a_folder_the_package_datasets_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FlexActError, match=r"no folder .*nowhere, and the package 'datasets'.*give --data.*pip"):
        load("rte", tmp_path / "nowhere")

    class Table(list[dict[str, Any]]):
        column_names = ("sentence1", "sentence2", "label", "idx")

    rows = Table([{"sentence1": "a", "sentence2": "b", "label": 1, "idx": 0}])
    asked: list[tuple[str, ...]] = []

    def load_dataset(*names: str) -> Any:
        asked.append(names)
        return {"train": rows, "validation": rows}

    fake = SimpleNamespace(load_dataset=load_dataset, __spec__=SimpleNamespace(name="datasets"))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    found = load("rte", tmp_path / "nowhere")
    assert asked == [("nyu-mll/glue", "rte")]
    assert (found.train, found.split) == (((("a", "b"), 1.0),), OFFICIAL)

    def unreachable(*names: str) -> Any:
        raise ConnectionError("no route")

    fake.load_dataset = unreachable
    with pytest.raises(FlexActError, match=r"RTE .*ConnectionError: no route.*--data"):
        load("rte", tmp_path / "nowhere")
