"""The identifiers that an issue mentions."""

from __future__ import annotations

import re
from dataclasses import dataclass

_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class Names:
    """Identifiers of an issue: those written as code, and plain words that may be names."""

    code: tuple[str, ...]
    plain: tuple[str, ...]


def names_in(issue: str) -> Names:
    """Split an issue's identifiers by how they are written.

    Code is what is dotted, called, quoted by backticks, has an underscore or capitals inside.
    """
    code: dict[str, None] = {}
    plain: dict[str, None] = {}
    for match in _DOTTED.finditer(issue):
        name = match.group()
        after = issue[match.end() : match.end() + 1]
        quoted = issue[match.start() - 1 : match.start()] == "`" or after == "`"
        inner = name[1:]
        looks = "." in name or "_" in name or after == "(" or quoted or inner != inner.lower()
        if looks and not (name.isupper() and after != "(" and "_" not in name and not quoted):
            code.setdefault(name)
        elif len(name) > 2:
            plain.setdefault(name)
    return Names(tuple(code), tuple(name for name in plain if name not in code))
