"""End-to-end tests of the command line."""

import os
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import pytest
import torch

import flexact
from flexact.cli.app import main

TINY = ["--seeds", "1", "--epochs", "1", "--truths", "relu", "--models", "relu,flexact-default"]


def error_of(capsys, *arguments: str) -> str:
    """Returns the error that the command prints for bad input: one line, exit code 2, nothing on stdout."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("flexact: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds must be a whole number from 1"),
        (["--truths", "relu,tahn"], "unknown truth 'tahn'; did you mean 'tanh'?"),
        (["--candidates", "relu,sigmod"], "unknown candidate 'sigmod'; did you mean 'sigmoid'?"),
        (["--models", "flexact-defualt"], "unknown model 'flexact-defualt'; did you mean 'flexact-default'?"),
        (["--models", "splsh"], "unknown model 'splsh'; did you mean 'splash'?"),
        (["--models", ","], "--models names nothing"),
        (["--candidates", "relu"], "at least two candidates"),
        (["--candidates", ","], "--candidates names nothing"),
        (["--truths", ","], "--truths names nothing"),
        (["--candidates", "relu,original"], "unknown candidate 'original'"),
        (["--truths", "original"], "unknown truth 'original'"),
        (["--truths", "gelu"], "can never find the truth gelu. Add it to --candidates"),
        (["--models", "flexact-a0,flexact-a0"], "--models names flexact-a0 more than once"),
        (["--policy", "papr"], "unknown policy 'papr'; did you mean 'paper'?"),
        (["--epochs", "0"], "--epochs must be"),
        (["--resume", "--overwrite"], "give only one of the two"),
    ],
)
@pytest.mark.parametrize("study", ["synthetic", "alpha", "corrections"])
def test_bad_input_is_one_clear_line(capsys, tmp_path, study, arguments, message):
    assert message in error_of(capsys, "reproduce", study, "--out", str(tmp_path), *arguments)


def test_a_study_writes_its_folder_and_prints_table_and_page(capsys, tmp_path):
    out = str(tmp_path / "run")
    with pytest.raises(SystemExit) as exit_:
        main(["reproduce", "synthetic", *TINY, "--out", out])
    assert exit_.value.code == 0
    captured = capsys.readouterr()
    assert "| flexact-default |" in captured.out
    assert "report.html" in captured.out
    assert "2/2" in captured.err
    for name in ("config.json", "results.csv", "lines.csv", "table.md", "report.html"):
        assert (tmp_path / "run" / name).stat().st_size > 0

    assert "resume it with --resume" in error_of(capsys, "reproduce", "synthetic", *TINY, "--out", out)
    assert "study 'synthetic', not of 'alpha'" in error_of(capsys, "reproduce", "alpha", "--out", out)
    assert "epochs: 1 → 2" in error_of(
        capsys, "reproduce", "synthetic", *TINY, "--epochs", "2", "--out", out, "--resume"
    )
    results = tmp_path / "run" / "results.csv"
    before = results.read_bytes()
    with pytest.raises(SystemExit) as exit_:
        main(["reproduce", "synthetic", *TINY, "--out", out, "--resume", "--quiet"])
    assert exit_.value.code == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    assert results.read_bytes() == before

    results.write_text(before.decode().replace(",relu,0,", ",relu,x0,", 1))
    assert "results.csv, line 2:" in error_of(capsys, "reproduce", "synthetic", *TINY, "--out", out, "--resume")


def test_nothing_is_trained_if_a_package_for_the_report_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    message = error_of(capsys, "reproduce", "synthetic", *TINY, "--out", str(tmp_path / "run"))
    assert "pip install 'flexact[report]'" in message
    assert not (tmp_path / "run").exists()


def test_an_unknown_folder_has_no_report(capsys, tmp_path):
    error_of(capsys, "report", str(tmp_path / "nowhere"))


def test_ctrl_c_keeps_finished_work_and_says_how_to_resume(tmp_path):
    arguments = ["reproduce", "synthetic", "--seeds", "1", "--epochs", "40", "--truths", "relu", "--jobs", "2"]
    command = [sys.executable, "-m", "flexact", *arguments, "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore SIGINT
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "results.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # to the whole process group, as a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert f"flexact {' '.join(arguments)} --out {tmp_path / 'run'} --resume" in err
    program = shlex.split(err.partition("resume with: ")[2])[:3]
    assert subprocess.run([*program, "--help"], capture_output=True).returncode == 0
    assert (tmp_path / "run" / "results.csv").read_text().count("\n") > 1
    assert out == ""


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_extra_is_named(package):
    script = f"import sys; sys.modules[{package!r}] = None; from flexact.cli.app import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert "flexact[cli]" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_the_studies():
    done = subprocess.run([sys.executable, "-m", "flexact", "reproduce", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for study in ("synthetic", "alpha", "corrections"):
        assert study in done.stdout


def test_the_version_matches_the_package(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"flexact {version('flexact')}\n"


NETS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Sigmoid())

def with_inputs():
    return build(), torch.randn(5, 3)

ready = build()
number = 3
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A folder with a Python file of models. The command runs in it."""
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.mark.parametrize("build", ["build", "with_inputs", "ready"])
def test_inspect_prints_the_table_of_a_model(capsys, nets, build):
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", f"{nets}:{build}"])
    assert exit_.value.code == 0
    module = sys.modules[nets]
    inputs = torch.randn(5, 3) if build == "with_inputs" else None
    assert capsys.readouterr().out == f"{flexact.inspect(module.build(), example_inputs=inputs)}\n"
    assert not any(isinstance(one, flexact.FlexAct) for one in module.ready.modules())


def test_inspect_takes_where(capsys, nets):
    with pytest.raises(SystemExit):
        main(["inspect", f"{nets}:build", "--where", "1", "--where", "3"])
    assert "where does not select it" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["inspect", f"{nets}:build", "--where", "3"])
    assert "where does not select it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nets", "Give module:name, such as my_training:train"),
        ("NETS", "(it is a module). Give module:name, such as my_training:train"),
        ("no_such_module:build", "cannot load 'no_such_module:build' (No module named"),
        ("NETS:biuld", "has no attribute 'biuld')"),
        ("NETS:number", "needs a torch.nn.Module"),
    ],
)
def test_inspect_reports_what_is_wrong_with_a_name(capsys, nets, given, message):
    assert message in error_of(capsys, "inspect", given.replace("NETS", nets))
