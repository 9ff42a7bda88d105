"""The names of fixed methods: networks with one candidate at every site."""

FIXED = "fixed"
"""Stands for the fixed methods of all candidates."""
PREFIX = "fixed-"


def fixed(candidate: str) -> str:
    """Return the method with a candidate at every site.

    >>> fixed("relu")
    'fixed-relu'
    """
    return PREFIX + candidate


def candidate_of(method: str) -> str | None:
    """Return the candidate of a fixed method; None for any other method.

    >>> candidate_of("fixed-relu"), candidate_of("race")
    ('relu', None)
    """
    return method.removeprefix(PREFIX) if method.startswith(PREFIX) else None
