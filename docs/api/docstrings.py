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
    """Return a docstring as Markdown. The description of a parameter may span several lines."""
    lines: list[str] = []
    of = ""  # the part that the previous line belongs to: "parameter", "example" or ""
    for line in text.splitlines():
        named = _PARAMETERS.match(line)
        if of != "example" and line.startswith(">>> "):
            lines.append("```pycon")
            of = "example"
        elif not line.strip():
            if of == "example":
                lines.append("```")
            of = ""
        elif named and set(named[1].split(", ")) <= parameters:
            if of != "parameter":
                lines.append("")
            names = ", ".join(f"`{name}`" for name in named[1].split(", "))
            line, of = f"- {names}: {line[named.end() :]}", "parameter"
        elif of == "parameter":
            line = f"  {line}"
        lines.append(line if of == "example" else _literal(line))
    return "\n".join([*lines, "```"] if of == "example" else lines)


def _literal(line: str) -> str:
    """Escape the asterisks of a line ("layer4.*") so that they do not start emphasis."""
    parts = _CODE.split(line)
    return "".join(part if part.startswith("`") else part.replace("*", r"\*") for part in parts)


def _parameters(obj: griffe.Object) -> set[str]:
    found = obj.members.get("__init__") if obj.is_class else obj
    return {parameter.name for parameter in found.parameters} if isinstance(found, griffe.Function) else set()
