"""Tests of a study's folder: what a run refuses, resumes and overwrites, and damaged files."""

import json
from dataclasses import replace

import pytest

from flexact import FlexActError
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.runner import run
from flexact.studies.synthetic.store import Part, Point, Result, read_parts, write_parts
from flexact.studies.synthetic.studies import ALPHA, SYNTHETIC

MODELS = ("relu", "tanh")
OPTIONS = Options(candidates=("relu", "tanh"), seeds=2, truths=("relu",), epochs=1, models=MODELS)


@pytest.fixture
def half_done(tmp_path):
    """The folder of a run that was interrupted before its first model was done."""
    run(SYNTHETIC, OPTIONS, tmp_path, jobs=1)
    part = read_parts(tmp_path, OPTIONS)["tanh"]
    write_parts(tmp_path, {"tanh": part}, MODELS)
    return tmp_path


def resumed(folder, study=SYNTHETIC, **changes):
    run(study, replace(OPTIONS, **changes), folder, resume=True, jobs=1)


def test_a_model_killed_before_its_results_is_trained_again(half_done):
    """lines.csv is written before results.csv, so a kill between the two leaves too many rows there."""
    whole = {path.name: path.read_bytes() for path in half_done.iterdir()}
    with (half_done / "lines.csv").open("a") as file:
        file.write("relu,relu,target,0,1,0\n")
    with (half_done / "results.csv").open("a") as file:
        file.write("synthetic,relu,relu,0,relu,1,1,1,1\n")
    resumed(half_done)
    assert [row[0] for row in read_parts(half_done, OPTIONS).items()] == list(MODELS)
    run(SYNTHETIC, OPTIONS, half_done / "again", jobs=1)
    for name in ("results.csv", "lines.csv", "table.md"):
        assert (half_done / name).read_bytes() == (half_done / "again" / name).read_bytes()
    assert (half_done / "table.md").read_bytes() == whole["table.md"]


def test_a_folder_of_this_study_needs_resume_or_overwrite(half_done):
    with pytest.raises(FlexActError, match=r"already holds a run of this study; .*--resume, .*--over"):
        run(SYNTHETIC, OPTIONS, half_done, jobs=1)
    (half_done / "notes.txt").write_text("mine")
    run(SYNTHETIC, replace(OPTIONS, seeds=1), half_done, overwrite=True, jobs=1)
    assert len((half_done / "results.csv").read_text().splitlines()) == 1 + 2
    assert (half_done / "notes.txt").read_text() == "mine"


def test_a_folder_of_another_study_is_refused_even_with_resume(half_done):
    for resume in (False, True):
        with pytest.raises(FlexActError, match=r"holds a run of the study 'synthetic', not of 'alpha'; .*--out"):
            run(ALPHA, OPTIONS, half_done, resume=resume)


def test_resume_with_a_changed_configuration_shows_the_difference(half_done):
    with pytest.raises(FlexActError, match="epochs: 1 → 9; truths: relu → relu,tanh"):
        resumed(half_done, epochs=9, truths=("relu", "tanh"))


def test_resume_sees_a_changed_policy_and_a_changed_version(tmp_path):
    run(SYNTHETIC, replace(OPTIONS, models=("flexact-a0",)), tmp_path, jobs=1)
    config = json.loads((tmp_path / "config.json").read_text())
    config["policies"]["flexact-a0"]["policy"]["alpha"] = 0.7
    config["versions"]["torch"] = "3"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlexActError, match=r"alpha': 0.7.*torch: 3 → "):
        resumed(tmp_path, models=("flexact-a0",))


def test_resume_of_an_empty_folder_starts(tmp_path):
    (tmp_path / "config.json.new").write_text("{")  # killed while the first file was being written
    resumed(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["study"] == "synthetic"


def test_a_folder_that_is_no_study_is_unchanged(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(FlexActError, match=r"thesis\.tex"):
            run(SYNTHETIC, OPTIONS, tmp_path, overwrite=overwrite)
    with pytest.raises(FlexActError, match="is a file"):
        run(SYNTHETIC, OPTIONS, tmp_path / "thesis.tex")
    with pytest.raises(FlexActError, match="one of the two"):
        run(SYNTHETIC, OPTIONS, tmp_path, resume=True, overwrite=True)


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("results.csv", "synthetic,tanh,relu,0,tanh,1,abc,1,1", "mse is 'abc', not a number"),
        ("results.csv", "synthetic,tanh,relu,zero,tanh,1,1,1,1", "seed is 'zero'"),
        ("results.csv", "synthetic,tanh,relu,0,tanh,1,1,1", "expected 9 columns, found 8"),
        ("lines.csv", "tanh,relu,target,left,0,0", "x is 'left', not a number"),
        ("lines.csv", "tanh,relu,target,0,0", "expected 6 columns, found 5"),
    ],
)
def test_a_corrupt_file_is_reported_with_its_line(half_done, name, line, says):
    with (half_done / name).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(FlexActError, match=rf"{name}, line \d+: {says}.*run the study again with --overwrite"):
        resumed(half_done)


def test_a_run_that_diverged_is_not_damaged(tmp_path):
    options = replace(OPTIONS, models=("tanh",))
    results = [Result("synthetic", "tanh", "relu", seed, "tanh", 1.0, float("nan"), float("nan"), 1) for seed in (0, 1)]
    write_parts(tmp_path, {"tanh": Part(results, [Point("tanh", "relu", "target", 0.0, 0.0)])}, ("tanh",))
    assert list(read_parts(tmp_path, options)) == ["tanh"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"flexact_study": 2, "study": "synthetic"}', "has version 2"),
        ('{"flexact_study": 1,\n "study', "config.json, line 2: not valid JSON"),
        ('{"flexact_study": 1}', "does not name its study"),
    ],
)
def test_a_damaged_or_newer_config_is_reported_and_can_be_overwritten(half_done, content, says):
    path = half_done / "config.json"
    path.write_text(content)
    with pytest.raises(FlexActError, match=says):
        resumed(half_done)
    run(SYNTHETIC, OPTIONS, half_done, overwrite=True, jobs=1)
    assert json.loads(path.read_text())["flexact_study"] == 1


def test_a_damaged_config_of_somebody_else_is_unchanged(tmp_path):
    (tmp_path / "config.json").write_text('{"mine')
    with pytest.raises(FlexActError, match=r"config\.json"):
        run(SYNTHETIC, OPTIONS, tmp_path, overwrite=True)
    assert (tmp_path / "config.json").read_text() == '{"mine'
