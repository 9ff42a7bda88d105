"""Tests that the public names are the documented ones, and that each has an example.

pytest collects the docstrings of `src`, which runs the examples.
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


def test_the_public_names_are_exactly_the_documented_ones() -> None:
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


def test_every_error_of_a_user_is_a_flexact_error() -> None:
    assert issubclass(flexact.FlexActError, Exception)
    assert not issubclass(flexact.FlexActError, (ValueError, TypeError, RuntimeError))
