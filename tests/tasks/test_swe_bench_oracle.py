"""The official harness of SWE-bench (5.0.2) on the same logs, patches and images.

It runs in processes of its own. Logs are drawn from a seed: what each runner prints, with
parameters that hold blanks and brackets, every status, and the noise that comes between.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tasks.judging import PASSED, XFAILED, judge
from tasks.log_parsers import PARSERS, REPOSITORIES, outcome_of, outcomes

PYTHON = Path(__file__).parents[2] / ".oracles-swebench" / "bin" / "python"
LITE = Path(__file__).parents[3] / "shared" / "data" / "swe_bench_lite.jsonl"
LOGS = 3000
KNOWN = {"PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL"}

pytestmark = [pytest.mark.oracle("swebench"), pytest.mark.slow]

WORDS = (
    "a",
    "b c",
    "x-1",
    "[",
    "]",
    "",
    "/usr/lib/x",
    "//h/x",
    "/a/*/b",
    "é",
    "1 - 2",
    "a - b",
    "'q'",
)
NOISE = (
    "",
    "collected 3 items",
    "tests/test_a.py ..F.                      [100%]",
    "----------------------------- Captured stdout call -----------------------------",
    "Traceback (most recent call last):",
    '  File "/testbed/x.py", line 3, in test_a',
    "E       assert 1 == 2",
    "+ pytest -rA tests",
    "Creating test database for alias 'default'...",
    "  Applying auth.0001_initial... OK",
    "System check identified no issues (0 silenced).",
    "Ran 3 tests in 0.1s",
    "FAILED (failures=1)",
    "OK (skipped=2)",
    "SKIPPED [2] tests/test_a.py:7: not today",
    "XPASS tests/test_a.py::test_x",
    "\x1b[31m3 failed\x1b[0m",
    "sympy/core/tests/test_basic.py[6]",
    "________________________________________________________________________________",
)


def pytest_id(draw: random.Random) -> str:
    name = f"tests/test_{draw.choice('abc')}.py::"
    name += draw.choice(("", "TestIt::")) + f"test_{draw.choice('stuvwxyz')}"
    if draw.random() < 0.5:
        name += f"[{'-'.join(draw.choices(WORDS, k=draw.randint(1, 2)))}]"
    return name


def pytest_lines(draw: random.Random) -> list[str]:
    name, status = pytest_id(draw), draw.choice(sorted(KNOWN))
    why = draw.choice(("", " - assert 1 == 2", " - reason", " - "))
    if status in ("PASSED", "SKIPPED"):
        why = ""
    shape = draw.random()
    if shape < 0.1:
        return [f"{name} {status}"]
    if shape < 0.2:
        return [f"{name} {status}    [ 50%]"]
    if shape < 0.25:
        return [f"\x1b[32m{status}\x1b[0m \x1b[1m{name}\x1b[0m"]
    if shape < 0.3:
        return [f"PASSED lib/t.py::test_m[MouseButton.{draw.choice(('LEFT', 'RIGHT'))}]"]
    return [f"{status} {name}{why}"]


def django_lines(draw: random.Random) -> list[str]:
    name = f"test_{draw.choice('stuvwxyz')} ({draw.choice(('a.tests.A', 'b.tests.B'))})"
    result = draw.choice(
        ("ok", "ok", "FAIL", "ERROR", "skipped 'why'", "expected failure", "unexpected success")
    )
    shape = draw.random()
    if shape < 0.2:
        return [name, f"What it does, no. {draw.randint(1, 9)}. ... {result}"]
    if shape < 0.3:
        return [f"{name} ... Internal Server Error: /x/", draw.choice(NOISE), result]
    if shape < 0.4:
        return [f"  Applying sites.0002_alter_domain_unique...{name} ... {result}"]
    if shape < 0.45:
        return ["--version is equivalent to version", f"{name} ... {result}"]
    if shape < 0.55:
        return [f"{draw.choice(('FAIL', 'ERROR'))}: {name}"]
    return [f"{name} ... {result}"]


def sympy_lines(draw: random.Random) -> list[str]:
    name = f"test_{draw.choice('stuvwxyz')}"
    if draw.random() < 0.2:
        return [f"______ sympy/core/tests/test_basic.py:{name} ______"]
    return [f"{name} {draw.choice(('ok', 'ok', 'F', 'E', 'f', 's', 'X', '- why s', 'ok   [OK]'))}"]


LINES: Mapping[str, Callable[[random.Random], list[str]]] = {
    "parse_log_django": django_lines,
    "parse_log_sympy": sympy_lines,
}


def case(draw: random.Random, parser: str) -> dict[str, Any]:
    """A log, and lists of which most tests are in it."""
    lines: list[str] = []
    for _ in range(draw.randint(1, 12)):
        noise = draw.choice(NOISE)
        # what its parser takes for a failure's title (a blank, then a path) is not from SymPy
        if draw.random() < 0.3 and not (parser == "parse_log_sympy" and ".py:" in noise):
            lines.append(noise)
        lines += LINES.get(parser, pytest_lines)(draw)
    log = "\n".join(lines)
    found = dict(PARSERS[parser](log))
    passed = [test for test, status in found.items() if status == "PASSED"]

    def some(most: int) -> list[str]:
        pool = passed if draw.random() < 0.6 else [*found, "tests/test_a.py::absent"]
        tests = draw.sample(pool, min(len(pool), draw.randint(0, most)))
        return [
            test[: draw.randint(5, len(test))] if draw.random() < 0.1 else test for test in tests
        ]

    return {"parser": parser, "log": log, "fail_to_pass": some(2), "pass_to_pass": some(4)}


def ours(asked: Mapping[str, Any], seen: Mapping[str, str]) -> bool:
    to_pass = {test: outcome_of(test, seen) for test in asked["fail_to_pass"]}
    to_keep = {test: outcome_of(test, seen) for test in asked["pass_to_pass"]}
    return judge(to_pass, to_keep, mended={PASSED, XFAILED}).resolved


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    draw = random.Random(5)
    names = sorted(PARSERS)
    cases = [case(draw, names[number % len(names)]) for number in range(LOGS)]
    folder = tmp_path_factory.mktemp("official")
    (folder / "cases.json").write_text(json.dumps(cases))
    program = Path(__file__).with_name("official_answers.py")
    subprocess.run(
        [PYTHON, program, "cases.json", "answers.json"],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=True,
        capture_output=True,
    )
    return {"cases": cases, **json.loads((folder / "answers.json").read_text())}


def test_the_registry_has_our_names_and_repositories(official: dict[str, Any]) -> None:
    assert set(PARSERS) <= set(official["registry"])
    assert official["repositories"] == REPOSITORIES


def test_parsers_find_the_same(official: dict[str, Any]) -> None:
    """Where they do not: the official one takes `ERROR:` for a status; no rule knows it."""
    different, entries = [], 0
    for asked, answer in zip(official["cases"], official["answers"], strict=True):
        mine = dict(PARSERS[asked["parser"]](asked["log"]))
        theirs = {test: status for test, status in answer["found"].items() if status in KNOWN}
        entries += len(theirs)
        if mine != theirs:
            different.append((asked["parser"], asked["log"], mine, theirs))
    print(f"{len(official['cases'])} logs, {entries} entries, {len(different)} differ")
    assert not different, different[:3]
    assert entries > 3 * LOGS


def test_verdicts_are_the_same_where_no_test_has_two_statuses(official: dict[str, Any]) -> None:
    """With two the worst counts here, there the last one: then ours is never the milder."""
    seen = {True: 0, False: 0}
    stricter = 0
    for asked, answer in zip(official["cases"], official["answers"], strict=True):
        pairs = list(PARSERS[asked["parser"]](asked["log"]))
        mine = ours(asked, outcomes(pairs))
        seen[mine] += 1
        if len({test for test, _ in pairs}) == len(set(pairs)):
            assert mine == answer["resolved"], asked
        elif mine != answer["resolved"]:
            stricter += 1
            assert not mine, asked
    print(f"resolved {seen[True]}, not {seen[False]}; stricter where statuses differ: {stricter}")
    assert min(seen.values()) > LOGS / 10
    assert stricter > 0


@pytest.mark.docker
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not LITE.is_file(), reason="the rows of SWE-bench Lite are not here")
def test_flask_is_graded_the_same_on_the_same_images(tmp_path: Path) -> None:
    """Except where forged lines work there: those two ways are named."""
    program = Path(__file__).parents[2] / "benchmarks" / "swe_bench_local.py"
    done = subprocess.run(
        [os.sys.executable, program, LITE, "--python", PYTHON],  # type: ignore[attr-defined]
        env={**os.environ, "PYTHONPATH": str(program.parents[1])},
        check=True,
        capture_output=True,
        text=True,
    )
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| pallets")]
    assert len(rows) == 24
    for _, kind, mine, _, theirs, *notes in rows:
        fooled = kind in ("forged: printed at exit, status 0", "forged: printed instead of tests")
        assert theirs == ("resolved" if fooled or kind == "reference" else theirs)
        if not fooled:
            assert mine == theirs, (kind, notes)
        if kind.startswith("forged") or kind == "wrong":
            assert mine == "unresolved"
