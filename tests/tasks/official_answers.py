"""Run by the Python that has the official harness: what its parsers and its rule make of logs.

python official_answers.py CASES.json ANSWERS.json
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swebench.harness.grading import get_eval_tests_report, get_resolution_status
from swebench.harness.log_parsers import PARSER_REGISTRY
from swebench.harness.log_parsers.python import MAP_REPO_TO_PARSER_PY


def answer(case: dict[str, Any]) -> dict[str, Any]:
    spec = SimpleNamespace(instance_id="x", repo="o/n", version="1")
    found = PARSER_REGISTRY[case["parser"]](case["log"], spec)
    lists = {"FAIL_TO_PASS": case["fail_to_pass"], "PASS_TO_PASS": case["pass_to_pass"]}
    report = get_eval_tests_report(found, lists)
    return {"found": found, "resolved": get_resolution_status(report) == "RESOLVED_FULL"}


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    answers = {
        "answers": [answer(case) for case in cases],
        "registry": sorted(PARSER_REGISTRY),
        "repositories": {
            repo: value if isinstance(value, str) else value.__name__
            for repo, value in MAP_REPO_TO_PARSER_PY.items()
        },
    }
    Path(sys.argv[2]).write_text(json.dumps(answers))


main()
