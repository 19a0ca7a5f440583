"""A row for each finished run of an `agent eval` folder, as Markdown.

python -m benchmarks.eval_table DIR
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from agent.batch.store import FINISHED, Store
from agent.bench.origin import markdown

HEADER = ["instance", "verdict", "exit", "turns", "evictions", "tokens evicted", "tokens seen"]
HEADER += ["minutes"]


def rows(folder: Path) -> Iterator[list[str]]:
    """What `agent eval` kept of each run, by instance."""
    for result in Store(folder).results():
        if result["state"] != FINISHED:
            continue
        totals, seconds = result["totals"], result["seconds"]
        yield [
            result["item"]["instance_id"],
            (result["verdict"] or {}).get("status", "none"),
            result["exit"],
            str(totals["steps"]),
            str(totals["evictions"]),
            str(totals["evicted_tokens"]),
            str(totals["tokens"]),
            f"{(seconds['run'] + seconds['grade']) / 60:.1f}",
        ]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.eval_table DIR")
    print(markdown(HEADER, list(rows(Path(sys.argv[1])))))
