"""The official SWE-bench harness, for a second opinion: run in a process of its own.

Nothing of it is imported here (it pulls in hundreds of megabytes). It is found in this Python after
`pip install 'nexus-agent[harness]'`, or in another one, as `make oracles-swebench` installs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.instance import TaskError

VERSION = "5.0.2"  # whose rules the grading here follows
_GROUPS = {  # in its summary; an id can be in several
    "empty_patch_ids": "empty_patch",
    "error_ids": "error",
    "unresolved_ids": "unresolved",
    "resolved_ids": "resolved",
}


def installed(python: str = sys.executable) -> str | None:
    """The version of the harness that a Python has, None without one."""
    text = "from importlib.metadata import version; print(version('swebench'))"
    try:
        done = subprocess.run([python, "-c", text], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def evaluate(
    rows: Sequence[Mapping[str, Any]],
    patches: Mapping[str, str],
    folder: Path,
    *,
    python: str = sys.executable,
    run_id: str = "nexus",
    workers: int = 1,
    timeout: float = 1800.0,
) -> dict[str, str]:
    """Status by instance id: resolved, unresolved, empty_patch, error.

    rows: of version 5 (with image and script); patches: by instance id. `folder` must be empty: the
    harness takes reports that it finds for its own; its logs stay there. TaskError if it is not
    installed or fails.
    """
    if (found := installed(python)) is None:
        raise TaskError(
            "the official harness is not installed; pip install 'nexus-agent[harness]', or make "
            "oracles-swebench"
        )
    python = str(Path(python).absolute()) if os.sep in python else python  # links stay: a venv's
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise TaskError(f"{folder} is not empty; the harness would take its reports for new ones")
    chosen = [dict(row) for row in rows if row["instance_id"] in patches]
    (folder / "rows.json").write_text(json.dumps(chosen))
    predictions = [
        {"instance_id": name, "model_name_or_path": "nexus", "model_patch": patch}
        for name, patch in patches.items()
    ]
    (folder / "predictions.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in predictions)
    )
    command = [python, "-m", "swebench.harness.run_evaluation", "--dataset_name", "rows.json"]
    command += ["--predictions_path", "predictions.jsonl", "--run_id", run_id]
    command += ["--max_workers", str(workers), "--timeout", str(int(timeout))]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    summary = folder / f"nexus.{run_id}.json"
    if not summary.is_file():
        raise TaskError(f"the official harness {found} failed: {done.stdout.strip()[-800:]}")
    report = json.loads(summary.read_text())
    return {name: status for group, status in _GROUPS.items() for name in report[group]}
