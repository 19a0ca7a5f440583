"""Rows with the fields of the real files and made-up content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[3] / "shared" / "data"  # beside the checkout, where it is there

PATCH = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def double(x):
-    return x + x + 1
+    return x + x
"""

ISSUE = "**Title:** double is wrong\n\n**Description:**\nby one"


def classic(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A row as Lite has it: lists of tests are JSON text."""
    row = {
        "repo": "owner/calc",
        "instance_id": f"owner__calc-{number}",
        "base_commit": "0" * 39 + str(number),
        "patch": PATCH,
        "test_patch": PATCH.replace("calc.py", "tests/test_calc.py"),
        "problem_statement": f"double({number}) is wrong\n\nIt is one too large.",
        "hints_text": "",
        "created_at": "2022-03-03T15:14:54Z",
        "version": "1.2",
        "FAIL_TO_PASS": '["tests/test_calc.py::test_double[a, \\"b\\"]"]',
        "PASS_TO_PASS": "[]",
        "environment_setup_commit": "1" * 40,
    }
    return row | changes


def fifth(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A row of version 5: lists, and an image, script and parser of its own."""
    own = {
        "FAIL_TO_PASS": ["tests/test_calc.py::test_double"],
        "PASS_TO_PASS": [],
        "image": "local/calc:1",
        "eval_script": "#!/bin/bash\npytest -rA\n",
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }
    return classic(number, **own) | changes


def summary(*lines: str) -> str:
    """What `pytest -rA` prints at its end."""
    return "\n".join(["=== short test summary info ===", *lines, "=== 2 passed in 0.01s ==="])


def r2e(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A row of R2E-Gym."""
    lines = [("context", "def double(x):"), ("deleted", "    return x + x + 1")]
    lines.append(("added", "    return x + x"))
    diff = {
        "old_file_content": "def double(x):\n    return x + x + 1\n",
        "new_file_content": "def double(x):\n    return x + x\n",
        "header": {"file": {"path": "calc.py"}, "misc_line": None},
        "index_line": {"old_commit_hash": "a", "new_commit_hash": "b", "mode": "100644"},
        "is_binary_file": False,
        "minus_file": {"path": "a/calc.py"},
        "plus_file": {"path": "b/calc.py"},
        "hunks": [
            {
                "descriptor": {
                    "old_range": {"start": 1, "length": 2},
                    "new_range": {"start": 1, "length": 2},
                    "section": "",
                },
                "line_group": {"all_lines": [{"type": t, "content": c} for t, c in lines]},
            }
        ],
    }
    test = json.loads(json.dumps(diff))
    test["header"]["file"]["path"] = "tests/test_calc.py"
    docs = json.loads(json.dumps(diff))
    docs["header"]["file"]["path"] = "README.md"
    commit = f"{number:040x}"
    before = summary(
        "PASSED r2e_tests/test_1.py::test_kept", "FAILED r2e_tests/test_1.py::T::test_x - 1"
    )
    row = {
        "repo_name": "calc",
        "docker_image": f"owner/calc_final:{commit}",
        "commit_hash": commit,
        "parsed_commit_content": json.dumps(
            {"file_diffs": [diff, test, docs], "new_commit_hash": commit}
        ),
        "execution_result_content": json.dumps({"old_commit_res_stdout": before}),
        "modified_files": ["calc.py"],
        "relevant_files": ["calc.py"],
        "num_non_test_files": 1,
        "prompt": "how the issue was written",
        "problem_statement": f"[ISSUE]\n{ISSUE}\n[/ISSUE]",
        "expected_output_json": json.dumps({"T.test_x": "PASSED", "test_kept": "PASSED"}),
    }
    return row | changes


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(folder: Path, name: str = "calc-1") -> dict[str, Any]:
    """A row as `agent tasks make` writes it, with its reference in `folder`."""
    (folder / name).mkdir()
    (folder / name / "reference.diff").write_text(PATCH)
    stored = {
        "file": f"{name}/reference.diff",
        "sha256": hashlib.sha256(PATCH.encode()).hexdigest(),
    }
    return {
        "kind": "made",
        "instance_id": name,
        "package": "calc",
        "issue_title": "double is wrong",
        "issue_text": "by one",
        "issue_from": "me",
        "made_from": {"repo": "my-calc", "base": "a" * 40, "fix": "b" * 40},
        "changed_files": {"calc.py": {"added": 1, "removed": 1}},
        "fail_to_pass": ["tests/test_calc.py::test_double"],
        "pass_to_pass": [],
        "test_paths": ["tests"],
        "own_modules": ["calc"],
        "test_command": "python -m pytest",
        "test_seconds": 1.0,
        "requirements": ["pytest<9"],
        "resolved": [],
        "base": stored,
        "tests": stored,
        "reference": stored,
    }
