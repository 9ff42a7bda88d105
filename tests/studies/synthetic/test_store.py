import json

import pytest

from flexact import FlexActError
from flexact.io import csv_rows
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.store import Moment, Part, Point, Result, Store

MODELS = ("relu", "tanh")
OPTIONS = {"candidates": ("relu", "tanh"), "seeds": 2, "truths": ("relu",), "epochs": 3, "models": MODELS}


def config(study="synthetic", **changes):
    return {
        "flexact_study": 1,
        "study": study,
        "options": Options(**{**OPTIONS, **changes}).to_dict(),
        "policies": {"flexact-a0": {"alpha": 0.0}},
        "training": {"learning_rate": {"relu": "0.05, falling linearly to 0"}},
        "versions": {"torch": "2"},
    }


def part(model):
    results = [Result("synthetic", model, "relu", seed, model, 1.0, 0.25, 0.5, 3) for seed in (0, 1)]
    return Part(results, [Moment(model, "relu", 0, 1, "relu", 0.5)], [Point(model, "relu", -1.0, 0.0, 0.0)])


def store(folder, study="synthetic", **changes):
    return Store(folder, config(study, **changes), Options(**{**OPTIONS, **changes}))


@pytest.fixture
def half_done(tmp_path):
    first = store(tmp_path)
    first.open(resume=False, overwrite=False)
    first.add("tanh", part("tanh"))
    return tmp_path


def resumed(folder, **changes):
    again = store(folder, **changes)
    again.open(resume=True, overwrite=False)
    return again


def test_a_resumed_folder_ends_with_the_bytes_of_an_uninterrupted_one(half_done, tmp_path_factory):
    again = resumed(half_done)
    assert again.done == ["tanh"]
    again.add("relu", part("relu"))
    other = store(tmp_path_factory.mktemp("whole"))
    other.open(resume=False, overwrite=False)
    for model in MODELS:
        other.add(model, part(model))
    for name in ("results.csv", "history.csv", "curves.csv"):
        assert (again.folder / name).read_bytes() == (other.folder / name).read_bytes()
    rows = csv_rows.read(again.folder / "results.csv", Result)
    assert [row.model for row in rows] == ["relu", "relu", "tanh", "tanh"]


def test_rows_of_a_model_that_was_killed_before_its_results_are_dropped(half_done):
    """history.csv is written before results.csv, so a kill between the two leaves too many rows there."""
    with (half_done / "history.csv").open("a") as file:
        file.write("relu,relu,0,1,relu,0.5\n")
    again = resumed(half_done)
    assert again.done == ["tanh"]
    again.add("relu", part("relu"))
    assert (half_done / "history.csv").read_text().count("\nrelu,") == 1


def test_a_folder_of_this_study_needs_resume_or_overwrite(half_done):
    with pytest.raises(FlexActError, match=r"already holds a run of this study; .*--resume, .*--over"):
        store(half_done).open(resume=False, overwrite=False)
    fresh = store(half_done)
    fresh.open(resume=False, overwrite=True)
    assert fresh.done == []
    assert not (half_done / "results.csv").exists()


def test_a_folder_of_another_study_is_refused_even_with_resume(half_done):
    for resume in (False, True):
        with pytest.raises(FlexActError, match=r"holds a run of the study 'synthetic', not of 'alpha'; .*--out"):
            store(half_done, study="alpha").open(resume=resume, overwrite=False)


def test_resume_with_a_changed_configuration_shows_the_difference(half_done):
    with pytest.raises(FlexActError, match="epochs: 3 → 9; truths: relu → relu,tanh"):
        resumed(half_done, epochs=9, truths=("relu", "tanh"))


def test_resume_sees_a_changed_policy_and_a_changed_version(half_done):
    changed = config()
    changed["policies"]["flexact-a0"]["alpha"] = 0.7
    changed["versions"]["torch"] = "3"
    changed["training"]["learning_rate"]["relu"] = "0.01"
    told = r"flexact-a0.alpha: 0.0 → 0.7; learning_rate.relu: 0.05, falling linearly to 0 → 0.01; torch: 2 → 3"
    with pytest.raises(FlexActError, match=told):
        Store(half_done, changed, Options(**OPTIONS)).open(resume=True, overwrite=False)


def test_resume_of_nothing_starts(tmp_path):
    assert resumed(tmp_path / "new").done == []
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "config.json.new").write_text("{")  # killed while the first file was being written
    assert resumed(tmp_path / "killed").done == []
    assert json.loads((tmp_path / "killed" / "config.json").read_text())["study"] == "synthetic"


def test_what_is_no_study_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(FlexActError, match=r"thesis\.tex"):
            store(tmp_path).open(resume=False, overwrite=overwrite)
    with pytest.raises(FlexActError, match="is a file"):
        store(tmp_path / "thesis.tex").open(resume=False, overwrite=False)
    with pytest.raises(FlexActError, match="one of the two"):
        store(tmp_path).open(resume=True, overwrite=True)


def test_overwrite_removes_only_what_a_study_writes(half_done):
    (half_done / "notes.txt").write_text("mine")
    store(half_done).open(resume=False, overwrite=True)
    assert (half_done / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("damage", "line", "what"),
    [
        (lambda rows: [rows[0].replace("mse", "MSE"), *rows[1:]], 1, "expected the columns study,model"),
        (lambda rows: [*rows[:2], rows[2].replace(",0.25,", ",0.25"), *rows[3:]], 3, "expected 9 columns, found 8"),
        (lambda rows: [rows[0], rows[1].replace(",0.25,", ",abc,"), *rows[2:]], 2, "mse is 'abc', not a number"),
        (lambda rows: [rows[0], rows[1].replace("relu,0", "relu,zero"), *rows[2:]], 2, "seed is 'zero'"),
        (lambda rows: [*rows, rows[1].replace("tanh", "gelu")], 4, "is not part of this run"),
        (lambda rows: [*rows[:2], rows[2].replace(",relu,", ",rleu,")], 3, "is not part of this run"),
        (lambda rows: [*rows[:2], rows[2][:10]], 3, "the line is cut off"),
    ],
)
def test_a_corrupt_results_file_is_told_by_its_line(half_done, damage, line, what):
    path = half_done / "results.csv"
    path.write_text("\n".join(damage(path.read_text().splitlines())) + ("" if "cut" in what else "\n"))
    with pytest.raises(FlexActError, match=rf"results.csv, line {line}: .*{what}"):
        resumed(half_done)


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("history.csv", "tanh,relu,0,1,gelu,0.5", "the candidate gelu is not part of this run"),
        ("history.csv", "tanh,relu,0,one,relu,0.5", "epoch is 'one', not a whole number"),
        ("curves.csv", "tanh,gelu,0,0,0", "tanh, gelu is not part of this run"),
        ("curves.csv", "tanh,relu,left,0,0", "x1 is 'left', not a number"),
        ("curves.csv", "tanh,relu,0,0", "expected 5 columns, found 4"),
    ],
)
def test_a_corrupt_history_or_curve_is_told_by_its_line(half_done, name, line, says):
    with (half_done / name).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(FlexActError, match=rf"{name}, line 3: {says}.*run the study again with --overwrite"):
        resumed(half_done)


def test_a_run_that_diverged_is_no_damage(half_done):
    path = half_done / "results.csv"
    path.write_text(path.read_text().replace(",1,0.25,", ",nan,nan,"))
    assert resumed(half_done).done == ["tanh"]


def test_a_missing_file_of_a_run_is_told(half_done):
    (half_done / "history.csv").unlink()
    with pytest.raises(FlexActError, match=r"history\.csv.*--overwrite"):
        resumed(half_done)


def test_bytes_that_are_not_text_are_told_by_their_line(half_done):
    with (half_done / "results.csv").open("ab") as file:
        file.write(b"\xff\xfe\n")
    with pytest.raises(FlexActError, match=r"results\.csv, line 4"):
        resumed(half_done)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"flexact_study": 2, "study": "synthetic"}', "has version 2"),
        ('{"flexact_study": 1,\n "study', "config.json, line 2: not valid JSON"),
        ('{"flexact', "config.json, line 1: not valid JSON"),
        ('{"flexact_study": 1}', "does not name its study"),
        (None, "without its config.json"),
    ],
)
def test_a_config_that_is_damaged_newer_or_lost_is_told_and_can_be_overwritten(half_done, content, says):
    path = half_done / "config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(FlexActError, match=says):
        resumed(half_done)
    fresh = store(half_done)
    fresh.open(resume=False, overwrite=True)
    assert fresh.done == []
    assert json.loads(path.read_text())["flexact_study"] == 1


def test_a_damaged_config_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"mine')
    with pytest.raises(FlexActError, match=r"config\.json"):
        store(tmp_path).open(resume=False, overwrite=True)
    assert (tmp_path / "config.json").read_text() == '{"mine'
