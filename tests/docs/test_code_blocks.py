"""Tests that the code in the documentation works: Python blocks run, and shell commands parse.

The ```python blocks of a page run in order, in one namespace, in an empty folder. A block that must not run is marked
```python {.no-run} and gives the reason in a comment. Names that a page assumes ("your model") are defined by its entry
in `GIVEN`.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flexact.cli.commands import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

GIVEN = {
    "docs/text.md": """
        import torch
        from transformers import AutoModelForSequenceClassification, BertConfig, Trainer, TrainingArguments

        sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
        tiny = AutoModelForSequenceClassification.from_config(BertConfig(**sizes))
        tiny.save_pretrained("bert-base-uncased")  # found in this folder before it is looked for elsewhere
        train = dev = [dict(input_ids=torch.randint(0, 50, (6,)), labels=i % 2) for i in range(32)]
        args = TrainingArguments("trainer", max_steps=8, per_device_train_batch_size=4, report_to=[], use_cpu=True)
        """,
}
"""Code that defines what the reader of a page has already."""

BETWEEN = {
    # The second fragment shows another way to call convert, so its model is a plain one again.
    # The fragment needs a checkpoint whose layers differ. So few steps would leave all of them at the original.
    ("docs/text.md", 2): """
        model = flexact.convert(AutoModelForSequenceClassification.from_pretrained("bert-base-uncased"))
        with torch.no_grad():
            model.bert.encoder.layer[0].intermediate.intermediate_act_fn.logits[0] += 100
        trainer = FlexActCallback().wrap(Trainer(model=model, args=args, train_dataset=train))
        trainer.train()
        trainer.save_model("out")
        """,
}
"""What happens before a page's block of this number."""


SHORTER = {
    "docs/start.md": ("epochs = 80", "epochs = 4"),
    "docs/comparing.md": (
        'if __name__ == "__main__":\n    print(flexact.compare(build, train,',
        'EPOCHS = 1\nif True:\n    print(flexact.compare(build, train, engine="inline",',
    ),
}
"""Replacements that shorten the run of a page."""


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page."""

    page: str
    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]

    @property
    def runs(self) -> bool:
        return ".no-run" not in self.info


def blocks_of(page: Path) -> Iterator[Block]:
    """Returns the fenced code blocks of a page, including those in lists."""
    text = page.read_text(encoding="utf-8")
    fence = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]+)\n(?P<body>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE)
    for found in fence.finditer(text):
        body = re.sub(f"^{found['indent']}", "", found["body"], flags=re.MULTILINE)
        line = text.count("\n", 0, found.start()) + 2
        yield Block(page.relative_to(ROOT).as_posix(), line, found["info"].strip(), body)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language in ("python", "py", "python3")]
SHELL = [block for block in BLOCKS if block.language in ("sh", "bash", "shell", "console")]


@pytest.fixture
def fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to an empty working folder without a display."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
@pytest.mark.usefixtures("fresh_folder")
def test_the_python_blocks_of_a_page_run(page: str) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "page"}
    exec(_unindented(GIVEN.get(page, "")), names)
    for number, block in enumerate((block for block in PYTHON if block.page == page), start=1):
        exec(_unindented(BETWEEN.get((page, number), "")), names)
        if block.runs:
            # Compiled with the page's file name and lines, so that a traceback points into the page.
            text = block.text.replace(*SHORTER[page]) if page in SHORTER else block.text
            exec(compile("\n" * (block.line - 1) + text, str(ROOT / page), "exec"), names)


def _without_optimizer(text: str) -> list[str]:
    """Returns the calls of Schedule in a program that pass no optimizer."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    schedules = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "Schedule"]
    passed = [len(call.args) > 2 or "optimizer" in {one.arg for one in call.keywords} for call in schedules]
    return [ast.unparse(call) for call, passes in zip(schedules, passed, strict=True) if not passes]


def test_every_schedule_in_docs_and_examples_gets_its_optimizer() -> None:
    programs = {f"{block.page}:{block.line}": block.text for block in PYTHON}
    programs |= {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    assert sum("Schedule(" in text for text in programs.values()) >= 12
    assert {name: calls for name, text in programs.items() if (calls := _without_optimizer(text))} == {}


def test_no_run_blocks_are_rare_and_give_a_reason() -> None:
    left_out = [block for block in PYTHON if not block.runs]
    assert len(left_out) <= len(PYTHON) // 10
    assert all("#" in block.text for block in left_out)


def test_the_blocks_are_found() -> None:
    assert {"README.md", "docs/start.md", "docs/choosing.md", "docs/index.md"} <= {block.page for block in PYTHON}
    assert sum(block.page == "README.md" for block in PYTHON) == (ROOT / "README.md").read_text().count("```python")


def _commands(program: str) -> list[tuple[str, list[str]]]:
    """Returns each call of a program in a shell block with its arguments."""
    found = []
    for block in SHELL:
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # environment variables before the command
                words = words[1:]
            if words and words[0] == program:
                found.append(
                    (f"{block.page}: {line.strip()}", [word for word in words[1:] if word not in ("…", "...")])
                )
    return found


@pytest.mark.parametrize(("line", "arguments"), _commands("flexact"))
def test_flexact_commands_and_their_options_exist(line: str, arguments: list[str]) -> None:
    import typer

    command = typer.main.get_command(app)
    context = command.make_context("flexact", list(arguments), resilient_parsing=False)
    while hasattr(command, "resolve_command"):  # a group: its arguments are its name and its subcommand's
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        assert command is not None, line
        context = command.make_context(name, rest, parent=context)
    assert not context.args, line


@pytest.mark.parametrize(("line", "targets"), _commands("make"))
def test_make_targets_exist(line: str, targets: list[str]) -> None:
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert targets, line
    assert set(targets) <= known, line


def test_python_programs_in_shell_blocks_exist() -> None:
    for line, arguments in _commands("python"):
        if arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]) is not None, line
        elif not arguments[0].startswith("-"):
            assert (ROOT / arguments[0]).is_file(), line


def _unindented(code: str) -> str:
    return re.sub(r"^ {8}", "", code, flags=re.MULTILINE)
