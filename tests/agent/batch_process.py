"""A batch in a process of its own, for tests that end it by a signal.

    python batch_process.py FOLDER WORKERS ITEMS.json

ITEMS.json: {instance id: what it does, see batch_work}. Ends with 130 when it was interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agent.batch.carry_out import carry_out
from agent.batch.engine import LocalEngine
from agent.batch.item import Item
from agent.batch.store import Store


def items(file: Path) -> list[Item]:
    given = json.loads(file.read_text())
    return [
        Item(source="made up", instance_id=name, digest="0", options={"do": do})
        for name, do in given.items()
    ]


def main(folder: Path, workers: int, file: Path) -> int:
    store = Store(folder)
    with store.lock():
        engine = LocalEngine(store, workers=workers, grace=5)
        try:
            carry_out(items(file), store, engine, "batch_work:run_item")
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
