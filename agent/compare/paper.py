"""The paper's agentic results, to be shown beside ours and never mixed with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from agent.compare.grid import DENSE, Cell


@dataclass(frozen=True, slots=True)
class Paper:
    """A table of resolved counts: whose, with which model, on what."""

    source: str
    model: str
    benchmark: str
    n: int
    density: float
    rows: tuple[dict[str, Any], ...]

    @property
    def label(self) -> str:
        """What must stand wherever one of the numbers does."""
        return f"the paper's: {self.model}, {self.benchmark}, {self.density:.0%} density"

    def resolved(self, cell: Cell) -> int | None:
        """How many the paper resolved with this method, protocol and scope, whatever our size."""
        method = cell.method.removesuffix("-paper")
        for row in self.rows:
            if (row["method"], row["protocol"]) == (method, cell.protocol) and (
                method == DENSE or row["scope"] == cell.scope
            ):
                return int(row["resolved"])
        return None


@cache
def paper() -> Paper:
    """Table 3 of "Nexus Sampling"."""
    file = resources.files("agent.compare") / "data" / "paper_agentic.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    return Paper(**{**data, "rows": tuple(data["rows"])})
