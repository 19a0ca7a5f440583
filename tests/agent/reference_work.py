"""A work function without a model: it makes the reference change, or none, in a real sandbox.

`SUBMIT` is "reference" or "nothing". The patch is exported from one sandbox and graded in another,
as an agent's is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batch_work import log

from agent.batch.item import Item
from agent.batch.worker_state import WorkerState
from environments import Sandbox, SandboxSpec, open_sandbox
from tasks.image import place_tree
from tasks.patches import apply_in_sandbox
from tasks.source import open_source


def run_item(
    item: Item, folder: Path, tell: Callable[[Mapping[str, Any]], None], state: WorkerState
) -> dict[str, Any]:
    """Change, export, grade."""
    log("start", item)

    def opened(spec: SandboxSpec) -> Sandbox:
        return open_sandbox(spec, item.options["sandbox"])

    entry = open_source(item.source, only=[item.instance_id]).find(item.instance_id)
    assert entry.digest == item.digest
    task = entry.task(opened)
    began = time.monotonic()
    tell({"phase": "working"})
    with opened(task.spec()) as box:
        place_tree(task, box)
        if os.environ["SUBMIT"] == "reference":
            apply_in_sandbox(box, entry.reference_patch(), "/tmp/reference")
        patch = box.diff()
    ran = time.monotonic() - began
    (folder / "patch.diff").write_bytes(patch.data)
    prediction = patch.without(patch.tests(task.instance.test_paths))
    (folder / "prediction.diff").write_bytes(prediction.data)
    tell({"phase": "grading"})
    verdict = task.grade(prediction.data)
    assert verdict is not None
    log("end", item)
    return {
        "verdict": {
            "resolved": verdict.resolved, "status": verdict.status, "detail": verdict.detail,
        },
        "exit": "submitted",
        "seconds": {"run": ran, "grade": verdict.seconds},
    }  # fmt: skip
