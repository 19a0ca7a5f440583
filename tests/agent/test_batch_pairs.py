"""`agent eval` over the thirteen release pairs in real sandboxes, also killed on the way. Slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent.batch.store import Store

HERE = Path(__file__).parent
EVAL = "import typer; from agent.cli_eval import evaluate; typer.run(evaluate)"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def start(out: Path, submit: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", EVAL, "--tasks", "pairs", "--out", str(out), "--workers", "2",
         "--work", "reference_work:run_item", "--device", "cpu", "--dtype", "float32"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]),
            "BATCH_LOG": str(out.with_suffix(".log")),
            "SUBMIT": submit,
        },
    )  # fmt: skip


def entries(out: Path, kind: str) -> list[dict[str, Any]]:
    file = out.with_suffix(".log")
    lines = file.read_text().splitlines() if file.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def report(out: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((out / "report.json").read_text())
    return data


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A batch that nobody disturbed."""
    out = tmp_path_factory.mktemp("pairs") / "whole"
    assert start(out, "reference").wait() == 0
    return out


def test_references_resolve_all(whole: Path) -> None:
    cell = report(whole)["summary"][""]
    assert (cell["runs"], cell["finished"], cell["resolved"]) == (13, 13, 13)


def test_empty_patches_resolve_none(tmp_path: Path) -> None:
    out = tmp_path / "empty"
    assert start(out, "nothing").wait() == 0
    cell = report(out)["summary"][""]
    assert (cell["finished"], cell["resolved"]) == (13, 0)
    assert cell["verdicts"] == {"empty_patch": 13}


def test_killed_three_times_it_comes_to_the_same(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    store = Store(out)
    kept: list[set[str]] = []
    begun: list[int] = []
    for number in (2, 5, 8):
        process = start(out, "reference")
        while len(list(store.results())) < number:
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        process.wait()
        time.sleep(0.3)  # workers end with it
        kept.append({result["key"] for result in store.results()})
        begun.append(len(entries(out, "start")))
    assert start(out, "reference").wait() == 0
    for done, line in zip(kept, begun, strict=True):
        assert not done & {entry["key"] for entry in entries(out, "start")[line:]}
    assert len(entries(out, "start")) <= 13 + 3 * 2
    assert max(Counter(entry["key"] for entry in entries(out, "end")).values()) <= 2

    def outcome(folder: Path) -> list[tuple[Any, ...]]:
        results = Store(folder).results()
        return sorted(
            (r["key"], r["state"], r["verdict"]["status"], r["patch_sha256"]) for r in results
        )

    assert outcome(out) == outcome(whole)
    assert report(out)["summary"][""]["resolved"] == 13
    for name in ("predictions.jsonl",):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
