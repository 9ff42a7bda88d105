"""The public surface is the design's table, no more and no less, and each name shows how it is used.

That the examples run is checked where they stand: pytest collects the docstrings of `src`.
"""

from __future__ import annotations

import doctest

import pytest

import flexact

NAMES = {
    "FlexAct",
    "FlexActError",
    "FlexConfig",
    "Policy",
    "Recorder",
    "Schedule",
    "commit",
    "compare",
    "convert",
    "extract",
    "inspect",
    "load_picks",
    "param_groups",
    "penalty",
    "register_candidate",
    "selection",
}


def test_the_public_names_are_exactly_those_of_the_design() -> None:
    assert set(flexact.__all__) == NAMES
    assert list(flexact.__all__) == sorted(flexact.__all__)
    namespace: dict[str, object] = {}
    exec("from flexact import *", namespace)
    assert namespace.keys() - {"__builtins__"} == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_has_a_docstring_with_an_example(name: str) -> None:
    examples = doctest.DocTestFinder().find(getattr(flexact, name), name, globs={})
    assert examples[0].docstring
    assert any(line.startswith(">>> import") for line in map(str.strip, examples[0].docstring.splitlines()))
    assert len(examples[0].examples) >= 2


def test_every_error_a_user_can_cause_is_one_exception() -> None:
    assert issubclass(flexact.FlexActError, Exception)
    assert not issubclass(flexact.FlexActError, (ValueError, TypeError, RuntimeError))
