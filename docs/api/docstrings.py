"""A griffe extension that converts the package's docstrings to Markdown for mkdocs.

The docstrings describe a parameter as `name: description` on its own line, and show examples as doctests. Unconverted,
Markdown would join the parameters into one paragraph and render the examples as quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_PARAMETERS = re.compile(r"(\w+(?:, \w+)*): (?=\S)")
_CODE = re.compile(r"(`[^`]*`)")


class Docstrings(griffe.Extension):
    """Converts docstrings and annotations before they are rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of any object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, _parameters(obj))

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Replace the alias of a Literal type, such as `Correction`, by its choices."""
        alias = attr.module.members.get(str(attr.annotation))
        if isinstance(alias, griffe.Attribute) and str(alias.value).startswith("Literal["):
            attr.annotation = alias.value


def as_markdown(text: str, parameters: set[str]) -> str:
    """Return a docstring as Markdown. A blank line ends an example, and the description of a parameter."""
    return "\n\n".join(_paragraph(lines.splitlines(), parameters) for lines in re.split(r"\n\s*\n", text))


def _paragraph(lines: list[str], parameters: set[str]) -> str:
    """Return a paragraph, in which everything from the first prompt on is an example."""
    start = next((number for number, line in enumerate(lines) if line.startswith(">>> ")), len(lines))
    example = ["```pycon", *lines[start:], "```"] if start < len(lines) else []
    return "\n".join([*map(_literal, _listed(lines[:start], parameters)), *example])


def _listed(lines: list[str], parameters: set[str]) -> list[str]:
    """Turn the lines that describe parameters into the items of a Markdown list. Other lines stay as they are."""
    listed: list[str] = []
    in_list = False
    for line in lines:
        named = _PARAMETERS.match(line)
        if named and set(named[1].split(", ")) <= parameters:
            names = ", ".join(f"`{name}`" for name in named[1].split(", "))
            if not in_list:
                listed.append("")
            listed.append(f"- {names}: {line[named.end() :]}")
            in_list = True
        else:
            listed.append(f"  {line}" if in_list else line)
    return listed


def _literal(line: str) -> str:
    """Escape the asterisks of a line ("layer4.*") so that they do not start emphasis."""
    parts = _CODE.split(line)
    return "".join(part if part.startswith("`") else part.replace("*", r"\*") for part in parts)


def _parameters(obj: griffe.Object) -> set[str]:
    found = obj.members.get("__init__") if obj.is_class else obj
    return {parameter.name for parameter in found.parameters} if isinstance(found, griffe.Function) else set()
