"""Tests that every number in docs/reproduction.md and docs/claims is the paper's, or that of the file it came from."""

from __future__ import annotations

import csv
import importlib
import re
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType

import pytest

from flexact.config import PAPER_CANDIDATES
from flexact.studies.cifar.table import CIFAR
from flexact.studies.glue.table import GLUE
from flexact.studies.grid.statistics import paired
from flexact.studies.synthetic.tables import SYNTHETIC, VARIANTS

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ("cifar", "glue", "alpha", "leaky-relu")
PAGES = ("reproduction", *(f"claims/{name}" for name in CLAIMS))
NUMBER = re.compile(r"(?<![\w.·])\d+\.\d+(?![\w.]*\w)")

# The paper's tab:performance_benchmarking: ReLU, penultimate, all layers, for ResNet-18 and for ResNet-34.
_TRAINING = ((22.599, 28.966, 40.688), (41.529, 44.691, 66.384))
_INFERENCE = ((5.61, 5.783, 5.788), (10.284, 10.438, 10.512))
_MEMORY = ((713, 713, 1057), (1195, 1196, 1839))


def papers_numbers() -> set[str]:
    """The paper's numbers and the gains that follow from them, as the pages print them."""
    found = {f"{value:.2f}" for mean, deviation, _ in CIFAR.values() for value in (mean, deviation)}
    for (dataset, model, _), (mean, _, _) in CIFAR.items():
        gain = abs(mean - CIFAR[dataset, model, "relu"][0])
        found |= {f"{gain:.1f}", f"{gain:.2f}"}
    for scores in GLUE.values():
        for column, score in scores.items():
            gain = abs(score - GLUE["fixed"][column])
            found |= {f"{score:.2f}", f"{gain:.1f}", f"{gain:.2f}"}
    cells = [cell for row in SYNTHETIC.values() for cell in row.values()] + [error for error, _ in VARIANTS.values()]
    for number in NUMBER.findall(" ".join(cells)):
        found |= {number, f"{float(number):.4f}", f"{float(number):.3f}"}
    for quantity in (_TRAINING, _INFERENCE, _MEMORY):
        found |= {f"{value / relu:.2f}" for relu, *others in quantity for value in others}
    return found


PAPERS = papers_numbers()
SETTINGS = {"0.05", "0.01", "0.1", "0.3", "0.2", "0.4", "0.5", "22.7"}
"""The significance level, learning rates, values of α and the size of the encoder: inputs rather than results."""


def page_of(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("reproduction_tables")


def test_the_tables_are_what_the_script_writes(tables: ModuleType) -> None:
    written = [name for name in tables.PAGES if "<!-- end -->" in (ROOT / name).read_text(encoding="utf-8")]
    assert set(tables.PAGES) == set(written)
    for name in written:
        page = (ROOT / name).read_text(encoding="utf-8")
        assert tables.updated(page) == page, "run python benchmarks/reproduction_tables.py"


@pytest.mark.parametrize("name", PAGES)
def test_every_number_is_the_papers_or_in_the_file_of_its_section(name: str) -> None:
    """Columns of the paper have its numbers, columns called ours those of the file named before the table, and the
    other text either. The tables that a script writes, code and the addresses of links are left out."""
    page = re.sub(r"<!-- (?:cifar|glue).*?<!-- end -->", "", page_of(name), flags=re.DOTALL)
    unknown = []
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE):
        files = {path: numbers_in(path) for path in re.findall(r"`(results/[\w/.-]+\.(?:md|csv))`", section)}
        ours: set[str] = set()
        header: list[str] = []
        for line in section.splitlines():
            for path in re.findall(r"`(results/[\w/.-]+\.(?:md|csv))`", line):
                ours = files[path]
            if not line.startswith("|"):
                header = []
                allowed = PAPERS.union(SETTINGS, *files.values())
                unknown += [f"{line}: {number}" for number in numbers(line) if number not in allowed]
                continue
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            header = header or cells
            for heading, cell in zip(header, cells, strict=True):
                allowed = PAPERS if "paper" in heading else ours if "ours" in heading else PAPERS | ours | SETTINGS
                unknown += [f"{line}: {heading}: {number}" for number in numbers(cell) if number not in allowed]
    assert unknown == []


def numbers(text: str) -> list[str]:
    """The numbers with decimals outside of code and of the addresses of links."""
    return NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text))


def numbers_in(path: str) -> set[str]:
    return set(NUMBER.findall((ROOT / path).read_text(encoding="utf-8")))


def table_under(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its header."""
    section = page_of(page).partition(f"{heading}\n")[2]
    lines = section[section.index("\n|") :].strip().partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def rows_of(path: str) -> list[dict[str, str]]:
    with (ROOT / "results" / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def errors(study: str, model: str, truth: str = "sigmoid") -> list[float]:
    rows = rows_of(f"synthetic/study-{study}/results.csv")
    return [float(row["mse"]) for row in rows if (row["model"], row["truth"]) == (model, truth)]


def test_the_rows_of_synthetic_regression() -> None:
    names = {"ReLU": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "LeakyReLU": "leaky_relu", "Identity": "identity"}
    rows, alpha = table_under("reproduction", "## 1: synthetic regression"), ""
    for label, truths, paper, ours, _ in rows[:-2]:
        alpha = label.removeprefix("α = ") or alpha
        own = [names[truth] for truth in truths.split(", ")]
        assert paper == ", ".join(SYNTHETIC[f"flexact-a{alpha}"][truth].split()[0] for truth in own)
        assert ours == ", ".join(f"{fmean(errors('synthetic', f'flexact-a{alpha}', truth)):.4f}" for truth in own)
    assert [row[:1] for row in rows[-2:]] == [["five fixed activations"], ["`FlexConfig()`"]]
    worst = max(fmean(errors("synthetic", "flexact-default", truth)) for truth in PAPER_CANDIDATES)
    picks = [row for row in rows_of("synthetic/study-synthetic/results.csv") if row["model"] == "flexact-default"]
    right = sum(row["pick"] == row["truth"] for row in picks)
    assert rows[-1][1:4] == ["worst of five", "–", f"{worst:.4f}"]
    assert f"right picks {right} of {len(picks)}" in rows[-1][4]
    for name in names.values():
        for truth in names.values():
            paper = float(SYNTHETIC[name][truth].split()[0])
            assert fmean(errors("synthetic", name, truth)) == pytest.approx(paper, rel=0.01, abs=1e-4)


@pytest.mark.parametrize("page", ["reproduction", "claims/alpha"])
def test_the_rows_of_the_sweep_of_alpha(page: str) -> None:
    heading = "## 4: the alpha sweep" if page == "reproduction" else "does not.**"
    rows = table_under(page, heading)
    assert len(rows) >= 4
    for label, paper, ours, *_ in rows:
        first, _, last = label.partition(" to ")
        alphas = [f"{tenths / 10:g}" for tenths in range(11) if float(first) <= tenths / 10 <= float(last or first)]
        assert {VARIANTS[f"flexact-a{alpha}"][0] for alpha in alphas} == {paper.split(",")[0]}
        means = sorted(fmean(errors("alpha", f"flexact-a{alpha}")) for alpha in alphas)
        assert ours.split(",")[0] == " to ".join(dict.fromkeys(f"{mean:.5f}" for mean in (means[0], means[-1])))


def test_the_rows_of_the_corrections() -> None:
    models = ("none", "clip_logit_gradient", "clipped_norm_kl", "output_norm", "grad_norm_kl")
    rows = table_under("reproduction", "## 6: corrections")
    for (_, paper, ours, _), model in zip(rows, models, strict=True):
        found = errors("corrections", model)
        assert (paper, ours) == (VARIANTS[model][0], f"{fmean(found):.5f} ± {stdev(found):.5f}")


def test_the_row_of_leaky_relu() -> None:
    ((label, paper, ours),) = table_under("claims/leaky-relu", "four of five seeds.")
    assert label == "error at α = 0.3"
    assert paper == SYNTHETIC["flexact-a0.3"]["leaky_relu"].split()[0]
    assert ours == f"{fmean(errors('synthetic', 'flexact-a0.3', 'leaky_relu')):.4f}"
    rows = rows_of("synthetic/study-synthetic/results.csv")
    picks = [row["pick"] for row in rows if (row["model"], row["truth"]) == ("flexact-a0.3", "leaky_relu")]
    assert (picks.count("relu"), len(picks)) == (4, 5)


def test_the_rows_of_the_overhead() -> None:
    rows = rows_of("overhead/overhead.csv")

    def ours(placement: str, way: str, mode: str, quantity: str) -> str:
        key = (placement, "extracted" if quantity == "inference_ms" else way, mode, quantity)
        own = [row for row in rows if (row["placement"], row["way"], row["mode"], row["quantity"]) == key]
        column, form = ("value", "{:.0f}") if quantity == "extra_parameters" else ("ratio", "{:.3f}")
        return " / ".join(form.format(float(row[column])) for row in sorted(own, key=lambda row: row["network"]))

    def papers(placement: str, quantity: str) -> str:
        if quantity == "extra_parameters":
            return {"all": "40 / 80", "penultimate": "5 / 5"}[placement]
        values = {"train_ms": _TRAINING, "inference_ms": _INFERENCE, "peak_memory_mb": _MEMORY}[quantity]
        return " / ".join(f"{one[2 if placement == 'all' else 1] / one[0]:.2f}" for one in values)

    expected = [
        ("all", "eager", "train_ms"),
        ("all", "graph", "train_ms"),
        ("penultimate", "eager", "train_ms"),
        ("penultimate", "graph", "train_ms"),
        ("all", "eager", "peak_memory_mb"),
        ("all", "eager", "inference_ms"),
        ("all", "eager", "extra_parameters"),
        ("penultimate", "eager", "extra_parameters"),
    ]
    shown = table_under("reproduction", "## 5: overhead")
    for (_, paper, default, fused, _), (placement, mode, quantity) in zip(shown, expected, strict=True):
        assert paper == ("–" if mode == "graph" else papers(placement, quantity))
        assert default == ours(placement, "fused", mode, quantity)
        assert fused == ours(placement, "fused_bn", mode, quantity)


def test_every_method_that_the_paper_compares_or_discusses_has_a_row() -> None:
    section = page_of("reproduction").partition("## Methods of the paper")[2]
    named = {name for line in section.splitlines() if line.startswith("|") for name in re.findall(r"`(\w+)`", line)}
    rows = (ROOT / "results/synthetic/study-synthetic/table.md").read_text(encoding="utf-8").partition("## Picks")[0]
    assert named == {
        *("relu", "sigmoid", "tanh", "leaky_relu", "identity", "elu", "gelu", "silu", "mish"),
        *("prelu", "swish_beta", "parametric", "affine", "convex", "splash", "deu", "nmode", "spline", "kan"),
    }
    assert named <= {line.split("|")[1].strip() for line in rows.splitlines() if line.startswith("|")}


@pytest.mark.parametrize(
    ("gains", "papers", "expected"),
    [
        ((1.2, 1.5, 1.6, 1.4), (1.5, "a gain"), "reproduces"),
        ((0.5, 0.6, 0.55, 0.5), (1.5, "a gain"), "a gain, as in the paper, but of another size"),
        ((-0.5, -0.6, -0.55), (1.5, "a gain"), "**does not reproduce**: a loss"),
        ((0.1, -0.1, 0.2, -0.2), (1.5, "a gain"), "**does not reproduce**: no significant difference"),
        ((3.0, -1.0, 0.5), (1.5, "a gain"), "undecided: no significant difference; the interval contains the paper's"),
        ((0.1, -0.1, 0.2, -0.2), (0.05, "no significant difference"), "reproduces"),
        ((0.5, 0.6, 0.55, 0.5), None, "a gain"),
        ((0.5,), (1.5, "a gain"), "no test (one seed: a test needs two)"),
    ],
)
def test_a_verdict_follows_from_the_test_and_the_interval(
    gains: tuple[float, ...], papers: tuple[float, str] | None, expected: str, tables: ModuleType
) -> None:
    found = paired(dict(enumerate(gains)), dict.fromkeys(range(len(gains)), 0.0))
    assert found is not None
    assert tables.verdict(found, found.p, papers) == expected


def test_a_table_whose_cells_were_not_run_says_so(tables: ModuleType, tmp_path: Path) -> None:
    page = "<!-- cifar results/none cifar100 resnet18 -->\nold\n<!-- end -->\n<!-- glue results/none -->\n<!-- end -->"
    found = tables.updated(page, tmp_path)
    assert found.count("**Not run.**") == 2
    assert "old" not in found
    assert tables.updated(found, tmp_path) == found
