"""What produced a result, and how results get to the disk.

This module imports nothing but torch and transformers, so that a bench runs where the rest of the
package's needs are not installed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

_ROOT = Path(__file__).resolve().parents[2]
_MODELS = ("agent/models.py", "agent/int8_linear.py")  # what a loaded one is made by


def origin(device: torch.device) -> dict[str, Any]:
    """Command, versions, machine and load as they are now."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": f"{_program()} {shlex.join(sys.argv[1:])}".strip(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "commit": _commit(),
        },
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": _load(),
    }
    if device.type == "cuda":
        shape = torch.cuda.get_device_properties(device)
        found["gpu"] = {
            "name": shape.name,
            "memory_bytes": shape.total_memory,
            "cuda": torch.version.cuda,
            "capability": f"{shape.major}.{shape.minor}",
        }
    return found


def at_end(found: dict[str, Any]) -> dict[str, Any]:
    """The same when all is done: with the load as it is then."""
    return {**found, "load_at_end": _load()}


def _load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes; none where the system does not tell."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except (OSError, AttributeError):
        return []


def origin_lines(found: dict[str, Any]) -> list[str]:
    """The same as paragraphs."""
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    machine = f"{found['processor']}, {found['cores']} cores of which torch uses {found['threads']}"
    if gpu := found.get("gpu"):
        memory = gpu["memory_bytes"] / 2**30
        machine = f"{gpu['name']} ({memory:.0f} GiB, CUDA {gpu['cuda']}); {machine}"
    words = " / ".join(f"{value:.1f}" for value in found["load"])
    if "load_at_end" in found:
        words += ", at the end " + " / ".join(f"{value:.1f}" for value in found["load_at_end"])
    return [
        f"{found['date']}. `{found['command']}`",
        f"{versions}. {machine}; load average (1 / 5 / 15 minutes) {words}.",
    ]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV; the columns are all keys, in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def save(path: Path, text: str) -> None:
    """Replace a file in one step: whoever breaks off leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    part.replace(path)


def save_all(
    path: Path, found: Any, rows: Sequence[dict[str, Any]], paragraphs: Sequence[str]
) -> None:
    """Results as JSON in `path`, and beside it as CSV and Markdown."""
    save(path, json.dumps(found, indent=1))
    save(path.with_suffix(".csv"), csv_text(rows))
    save(path.with_suffix(".md"), "\n\n".join(paragraphs))


def _program() -> str:
    """Without its folder; a module that was run with -m under its own name."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return Path(sys.argv[0]).name
    name = spec.name.removesuffix(".__main__")
    return "agent" if name == "agent.cli" else f"python -m {name}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "CPU")


def _commit() -> str:
    if not (_ROOT / ".git").exists():  # installed: a repository around it is another one
        return "unknown"

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    # Only what the numbers depend on: a result file or the README is being written itself.
    changed = git("status", "--porcelain", "--", "cache", "agent/bench", *_MODELS)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")
