"""SWE-bench instances of Flask on images made here: our grading and the official harness's.

    python benchmarks/swe_bench_local.py ROWS [--python .oracles-swebench/bin/python] [--ids ...]

ROWS is a file of classic rows (SWE-bench Lite). Every instance is graded with its reference patch,
with an empty, a wrong and several forged patches, by both on the same images; the table goes to
stdout as Markdown. Images are built where they are missing (about 20 s each).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tasks.local_images import RECIPES, build
from tasks.official_harness import evaluate, installed
from tasks.swe_bench import SweBenchTask
from tasks.swe_bench_rows import SweRow


def added(path: str, text: str) -> str:
    """A patch that adds a file."""
    lines = textwrap.dedent(text).strip("\n").split("\n")
    body = "".join(f"+{line}\n" for line in lines)
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(lines)} @@\n{body}"
    )


def hooked(text: str) -> str:
    """A patch whose code runs when Flask is imported."""
    hook = (
        "diff --git a/src/flask/__init__.py b/src/flask/__init__.py\n"
        "--- a/src/flask/__init__.py\n+++ b/src/flask/__init__.py\n"
        "@@ -1,2 +1,3 @@\n+from . import forged\n"
        " from markupsafe import escape\n from markupsafe import Markup\n"
    )
    return added("src/flask/forged.py", text) + hook


def lines(row: SweRow) -> str:
    """Passes for all tests that are asked for, as pytest prints them."""
    return "".join(f"PASSED {test}\n" for test in (*row.fail_to_pass, *row.pass_to_pass))


def printed(row: SweRow) -> str:
    """Lines printed on import."""
    return hooked(f"print({lines(row)!r}, flush=True)")


def at_exit(row: SweRow) -> str:
    """Lines written after pytest's own, with success as the exit status."""
    return hooked(
        f"""
        import atexit, os
        def last():
            os.write(1, {lines(row).encode()!r})
            os._exit(0)
        atexit.register(last)
        """,
    )


def early(row: SweRow) -> str:
    """Lines instead of a test run."""
    return hooked(
        f"""
        import glob, os, sys
        if "pytest" in sys.modules:
            for held in sorted(glob.glob("/proc/self/fd/*")):  # pytest keeps the real output there
                try:
                    os.write(int(held.split("/")[-1]), {lines(row).encode()!r})
                except OSError:
                    pass
            os._exit(0)
        """,
    )


def markers(row: SweRow) -> str:
    """Lines between markers of their own, before the tests come."""
    text = f"\n>>>>> Start Test Output\n{lines(row)}>>>>> End Test Output\n"
    return hooked(f"import sys\nsys.__stderr__.write({text!r})")


def conftest(row: SweRow) -> str:
    """No lines: pytest itself is told that all is well."""
    return added(
        "conftest.py",
        """
        import pytest
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_makereport(item, call):
            report = (yield).get_result()
            report.outcome = "passed"
        def pytest_sessionfinish(session):
            session.exitstatus = 0
        """,
    )


PATCHES: Mapping[str, Callable[[SweRow], str]] = {
    "reference": lambda row: row.patch,
    "empty": lambda row: "",
    "wrong": lambda row: added("src/flask/unrelated.py", "VALUE = 1"),
    "forged: printed on import": printed,
    "forged: printed at exit, status 0": at_exit,
    "forged: printed instead of tests": early,
    "forged: markers printed as well": markers,
    "conftest.py that turns reports": conftest,
}


def say(text: str) -> None:
    """For whoever waits: stdout holds the table only."""
    print(text, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("--python", default=sys.executable, help="a Python with swebench")
    parser.add_argument("--ids", nargs="*", default=list(RECIPES))
    args = parser.parse_args()
    rows = [SweRow.model_validate_json(line) for line in args.rows.read_text().splitlines()]
    rows = [row for row in rows if row.instance_id in args.ids]
    version = installed(args.python)
    with tempfile.TemporaryDirectory(prefix="swe-bench-local-") as name:
        folder = Path(name)
        records = build(rows, folder / "rows.json", say)
        tasks = {r["instance_id"]: SweBenchTask(SweRow.model_validate(r)) for r in records}
        print(f"official harness: swebench {version}\n")
        print("| instance | patch | ours | seconds | official | notes of ours |")
        print("|---|---|---|---|---|---|")
        for number, (kind, make) in enumerate(PATCHES.items()):
            patches = {row.instance_id: make(row) for row in rows}
            began = time.perf_counter()
            official = evaluate(
                records, patches, folder / str(number), python=args.python, run_id=str(number)
            )
            say(f"{kind}: official in {time.perf_counter() - began:.0f} s")
            for name, patch in patches.items():
                verdict = tasks[name].grade(patch.encode())
                notes = [part for part in verdict.detail.split(". ") if "FLAGGED" in part]
                early = ["ended early"] if "ended early" in verdict.detail else []
                said = "; ".join([*early, *(note.split(":")[0] for note in notes)])
                ours, theirs = verdict.status, official.get(name, "missing")
                print(
                    f"| {name} | {kind} | {ours} | {verdict.seconds:.0f} | {theirs} | {said} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
