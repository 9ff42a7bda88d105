"""Write the tables of CIFAR and GLUE in the docs from the result folders, next to the paper's numbers.

    python benchmarks/reproduction_tables.py

It replaces what is between `<!-- cifar FOLDER DATASET MODEL -->` or `<!-- glue FOLDER -->` and `<!-- end -->` on the
pages in `PAGES`. A table whose cells were not run says so. The verdicts follow from the numbers; see `verdict`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flexact.io.markdown_tables import counted, markdown
from flexact.io.result_folder import CONFIG
from flexact.studies.cifar.methods import BASELINE, USUAL
from flexact.studies.cifar.study import Store as ImageStore
from flexact.studies.cifar.table import CIFAR, CIFAR_EPOCHS, title
from flexact.studies.glue import table as text
from flexact.studies.glue.protocol import FROM_SCRATCH, METHODS, PLACEMENTS
from flexact.studies.glue.study import Store as TextStore
from flexact.studies.grid.statistics import LEVEL, Comparison, by_method, holm, p_value, paired, spread
from flexact.studies.grid.study import DONE

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/reproduction.md", "docs/claims/cifar.md", "docs/claims/glue.md")
NOT_RUN = "**Not run.**"
_BLOCK = re.compile(r"(<!-- (cifar|glue) ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_NONE = "no significant difference"


def updated(page: str, root: Path = ROOT) -> str:
    """Return a page with the tables of the result folders below `root`."""

    def block(found: re.Match[str]) -> str:
        begin, study, arguments, end = found.groups()
        folder, *which = arguments.split()
        table = {"cifar": _images, "glue": _texts}[study](root / folder, *which)
        return f"{begin}\n{table}\n\n{end}"

    return _BLOCK.sub(block, page)


def verdict(ours: Comparison | None, p: float | None, papers: tuple[float, str] | None) -> str:
    """Return what a comparison says about the paper's gain and its kind (a gain, a loss, no significant difference).

    p: that of the comparison, after Holm's correction.
    """
    if ours is None:
        return "no seed in common"
    if p is None:
        return f"no test ({ours.why})"
    kind = _kind(ours.gain, p < LEVEL)
    if papers is None:
        return kind
    low, high = ours.interval
    contained = low <= papers[0] <= high
    if kind == papers[1]:
        return "reproduces" if contained else f"{kind}, as in the paper, but of another size"
    return f"undecided: {kind}; the interval contains the paper's" if contained else f"**does not reproduce**: {kind}"


def _kind(gain: float, significant: bool) -> str:
    return (_NONE, "a loss", "a gain")[significant * (1 + (gain > 0))]


def _images(folder: Path, dataset: str, model: str) -> str:
    """Return the table of one network on one data set."""
    done = [row for row in _done(folder, ImageStore) if (row.dataset, row.model) == (dataset, model)]
    if not done:
        return NOT_RUN
    rows = by_method(done)
    found = {
        method: {seed: row.accuracy for seed, row in rows[method].items()}
        for method in sorted(rows, key=lambda one: (USUAL.index(one) if one in USUAL else len(USUAL), one))
    }
    gains = {one: paired(own, found.get(BASELINE, {})) for one, own in found.items() if one != BASELINE}
    corrected = _corrected(gains)
    lines = []
    for method, own in found.items():
        papers, relu = CIFAR.get((dataset, model, method)), CIFAR[dataset, model, BASELINE][0]
        line = [title(method), str(len(own)), f"{papers[0]:.2f} ± {papers[1]:.2f}" if papers else "–", spread(own)]
        if method == BASELINE:
            lines.append([*line, "", "", "", ""])
            continue
        gain = (papers[0] - relu, _kind(papers[0] - relu, _below(papers[2]))) if papers else None
        line += [f"{gain[0]:+.2f}" if gain else "–", _interval(gains[method]), p_value(corrected[method])]
        lines.append([*line, verdict(gains[method], corrected[method], gain)])
    epochs = " and ".join(map(str, sorted({row.epochs for row in done})))
    ours = _name_of_ours(folder)
    header = ("method", "seeds", f"paper, {CIFAR_EPOCHS} epochs", f"{ours}, {epochs} epochs", "gain, paper")
    header += (f"gain, {ours} (95 % interval)", "p (Holm)", "verdict")
    about = f"{title(model)} on {title(dataset)}"
    return f"{about} · `{_shown(folder)}/table.md`\n\n{markdown(header, lines, words=('verdict',))}\n\n{_made(done)}"


def _texts(folder: Path) -> str:
    """Return the table of gains by metric and method, and the verdict without the task that is an artefact."""
    done = _done(folder, TextStore)
    if not done:
        return NOT_RUN
    methods = [method for method in METHODS if method != text.BASELINE and any(row.method == method for row in done)]
    splits, columns = {row.task: row.split for row in done}, text.columns_of(done)
    ours, fine_tuned = _name_of_ours(folder), not TextStore(folder).protocol().from_scratch
    header = ["metric", "majority class", f"fixed, {ours}"]
    for method in methods:
        header += [f"{text.TITLES[method]}, paper"] if method in PLACEMENTS else []
        header += [f"{text.TITLES[method]}, {ours}"]
    lines = []
    for column in columns:
        baseline = text.scores(done, text.BASELINE, column)
        line = [text.heading(column), text.majority(*column, splits[column[0]]), spread(baseline)]
        for method in methods:
            line += [f"{_papers_gain(method, [column]):+.2f}"] if method in PLACEMENTS else []
            line += [_gain(paired(text.scores(done, method, column), baseline))]
        lines.append(line)
    parts = []
    for without in ("", text.ARTEFACT):
        over = [column for column in text.averaged(done) if column[0] != without]
        if not over or (without and without not in splits):
            continue
        baseline = text.averages(done, text.BASELINE, without)
        gains = {method: paired(text.averages(done, method, without), baseline) for method in methods}
        name = f"average without {text.TASKS[without].title}" if without else "average"
        line = [name, "", spread(baseline)]
        for method in methods:
            line += [f"{_papers_gain(method, over):+.2f}"] if method in PLACEMENTS else []
            line += [_gain(gains[method])]
        lines.append(line)
        corrected = _corrected(gains)
        parts = [
            f"- {text.TITLES[method]}, {name}: {_interval(one)}, p {p_value(corrected[method])} after Holm's "
            f"correction; {verdict(one, corrected[method], _papers_claim(method, over) if fine_tuned else None)}."
            for method, one in gains.items()
        ]
    about = f"`{_shown(folder)}/table.md` · gains over the fixed activation in points, on the same seeds"
    return f"{about}\n\n{markdown(header, lines)}\n\n" + "\n".join(parts) + f"\n\n{_made(done)}"


def _done(folder: Path, store: Any) -> list[Any]:
    if not (folder / CONFIG).is_file():
        return []
    return [row for row in store(folder).results().values() if row.state == DONE]


def _name_of_ours(folder: Path) -> str:
    """Return "ours" for the shipped policy, and the name of another one."""
    store = (TextStore if "glue" in folder.name else ImageStore)(folder)
    protocol = store.protocol()
    shipped = FROM_SCRATCH["changes"] if getattr(protocol, "from_scratch", False) else {}
    return "ours" if protocol.policy == "default" and protocol.changes == shipped else "an earlier policy"


def _papers_gain(method: str, over: Iterable[tuple[str, str]]) -> float:
    return fmean(text.GLUE[method][column] - text.GLUE[text.BASELINE][column] for column in over)


def _papers_claim(method: str, over: Sequence[tuple[str, str]]) -> tuple[float, str] | None:
    """Return the paper's average gain, which it calls an improvement without a test."""
    return (_papers_gain(method, over), "a gain") if method in PLACEMENTS else None


def _corrected(gains: Mapping[str, Comparison | None]) -> dict[str, float | None]:
    """Return the p-values after Holm's correction."""
    return dict(zip(gains, holm([None if one is None else one.p for one in gains.values()]), strict=True))


def _interval(one: Comparison | None) -> str:
    if one is None:
        return "–"
    return f"{one.gain:+.2f}" + ("" if one.p is None else " ({:+.2f} to {:+.2f})".format(*one.interval))


def _gain(one: Comparison | None) -> str:
    if one is None:
        return "–"
    return f"{one.gain:+.2f}" + ("" if one.p is None else f" (p {p_value(one.p)})")


def _below(p: str) -> bool:
    """Return whether a p-value as the paper prints it is below the level."""
    return p.startswith("<") or float(p) < LEVEL


def _made(done: Sequence[Any]) -> str:
    """Return the seeds, devices, commits and dates of the rows."""

    def each(name: str) -> str:
        return ", ".join(sorted({str(getattr(row, name)) for row in done}))

    seeds = sorted({row.seed for row in done})
    runs = f"{counted(len(done), 'run')}, seeds {seeds[0]} to {seeds[-1]}"
    return f"{runs}; {each('device')}; commits {each('commit')}; {each('date')}."


def _shown(folder: Path) -> str:
    return folder.as_posix()[folder.as_posix().index("results/") :]


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
