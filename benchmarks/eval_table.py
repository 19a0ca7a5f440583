"""A row for each run of an `agent eval` folder, as Markdown.

python -m benchmarks.eval_table DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_COLUMNS = ("instance", "verdict", "exit", "turns", "evictions", "tokens evicted", "tokens seen")


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """What `agent eval` kept of each run, by instance."""
    for path in sorted(folder.glob("runs/*/*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        totals = result["totals"]
        yield {
            "instance": result["item"]["instance_id"],
            "verdict": (result["verdict"] or {}).get("status", "none"),
            "exit": result["exit"],
            "turns": totals["steps"],
            "evictions": totals["evictions"],
            "tokens evicted": totals["evicted_tokens"],
            "tokens seen": totals["tokens"],
            "minutes": f"{(result['seconds']['run'] + result['seconds']['grade']) / 60:.1f}",
        }


def table(folder: Path) -> str:
    """The rows as a Markdown table."""
    columns = (*_COLUMNS, "minutes")
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    lines += [f"| {' | '.join(str(row[name]) for name in columns)} |" for row in rows(folder)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
