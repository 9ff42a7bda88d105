"""What mkdocs reads of the package: a docstring's parameters as a list, its examples as code, an option's choices.

The docstrings name a parameter as `name: what it is` on a line of its own and show examples as doctests. Markdown would
run the one together into a paragraph and take the other for a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_PARAMETERS = re.compile(r"(\w+(?:, \w+)*): (?=\S)")
_CODE = re.compile(r"(`[^`]*`)")


class Docstrings(griffe.Extension):
    """Changes what was read before it is shown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Any object: its docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, _parameters(obj))

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """A field whose type is a name for a few choices, as `Anneal` is: the choices."""
        alias = attr.module.members.get(str(attr.annotation))
        if isinstance(alias, griffe.Attribute) and str(alias.value).startswith("Literal["):
            attr.annotation = alias.value


def as_markdown(text: str, parameters: set[str]) -> str:
    """A docstring as Markdown; a parameter's text may go on over several lines."""
    lines: list[str] = []
    of = ""  # what the line before is part of: a parameter, an example, or nothing
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
    """A line whose stars are stars ("layer4.*"), and no emphasis."""
    parts = _CODE.split(line)
    return "".join(part if part.startswith("`") else part.replace("*", r"\*") for part in parts)


def _parameters(obj: griffe.Object) -> set[str]:
    found = obj.members.get("__init__") if obj.is_class else obj
    return {parameter.name for parameter in found.parameters} if isinstance(found, griffe.Function) else set()
