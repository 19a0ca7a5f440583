"""Grading a patch in a fresh sandbox, by the official rules of SWE-bench.

Resolved means: every FAIL_TO_PASS test passes, and every PASS_TO_PASS test passes, is an expected
failure, or is skipped. A test without a result counts as failed. Results are taken by test id from
a plugin of ours (`pytest_recorder`), never from what the tests print. Code under test runs in the
same process as pytest, so a patch made for it could still cheat: patches that touch what decides
how tests run are named in the verdict's detail.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from environments.base import Sandbox, SandboxError, SandboxSpec
from tasks.instance import SandboxOpener, Verdict
from tasks.patches import PatchRefused, apply_in_sandbox

PASSED, XPASSED, XFAILED, SKIPPED, FAILED, ERROR = (
    "passed",
    "xpassed",
    "xfailed",
    "skipped",
    "failed",
    "error",
)
MISSING = "missing"  # no result: not collected, or the run ended before
_WORSE = (PASSED, XPASSED, XFAILED, SKIPPED, FAILED, ERROR)  # of two reports the worse one counts
_KEPT = frozenset({PASSED, XFAILED, SKIPPED})  # fine for PASS_TO_PASS

_RECORDER = Path(__file__).with_name("pytest_recorder.py")
_RESULTS_CAP = 50_000_000  # bytes
# files that pytest or Python reads by itself
_MACHINERY = {"conftest.py", "sitecustomize.py", "usercustomize.py", "entry_points.txt"}
_SETTINGS = {"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
_STEERING = frozenset(_MACHINERY | _SETTINGS | {"pyproject.toml"})


@dataclass(frozen=True, slots=True)
class Exam:
    """All that decides about a patch. Only `grade` sees it, the agent never does."""

    tree: Path  # host folder: the original source
    hidden: Path  # host folder that has the deciding tests at `test_paths`
    test_paths: tuple[str, ...]  # replaced as a whole: what the patch did there does not count
    test_command: str  # a pytest command line, run in the workspace; options are appended to it
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    timeout: float  # seconds for the test run
    import_roots: tuple[str, ...] = (".",)  # folders of the tree on the module path


def grade(exam: Exam, patch: bytes, spec: SandboxSpec, open_sandbox: SandboxOpener) -> Verdict:
    """Original tree, then the patch, then the hidden tests, in a sandbox opened for this alone.

    Never raises for what the patch does. Status `error` stands for trouble of the sandbox, the time
    limit and the memory limit: the patch was not judged.
    """
    if not patch.strip():
        return Verdict(False, "empty_patch", detail="the patch is empty")
    begun = time.monotonic()
    try:
        run, touched = observe(exam, patch, spec, open_sandbox)
    except PatchRefused as error:
        return Verdict(False, "patch_failed", detail=str(error), seconds=time.monotonic() - begun)
    except SandboxError as error:
        detail = f"{type(error).__name__}: {error}"
        return Verdict(False, "error", detail=detail, seconds=time.monotonic() - begun)
    return _judge(exam, run, touched, time.monotonic() - begun)


def observe(
    exam: Exam, patch: bytes, spec: SandboxSpec, open_sandbox: SandboxOpener
) -> tuple[TestRun, tuple[str, ...]]:
    """What the hidden tests do with a patch (none if it is empty), and the paths it touched.

    Raises PatchRefused and SandboxError.
    """
    with open_sandbox(spec) as box:
        box.put_tree(exam.tree)
        touched: tuple[str, ...] = ()
        if patch.strip():
            touched = apply_in_sandbox(box, patch, f"/tmp/{secrets.token_hex(12)}")
        _place_hidden(box, exam)
        return _run_tests(box, exam, spec.env), touched


@dataclass(frozen=True, slots=True)
class TestRun:
    """What came out of one run of the tests."""

    __test__ = False  # not a test, whatever pytest thinks of its name

    outcomes: Mapping[str, str]  # test id -> outcome
    started: bool  # the recorder was loaded
    finished: bool  # pytest came to its end
    tampered: bool  # the results hold lines that the recorder did not write
    tail: str  # end of the output
    uncollected: tuple[str, ...]  # ids that failed to be collected
    trouble: str = ""  # a limit that was hit
    seconds: float = 0.0  # of the test command alone


def _place_hidden(box: Sandbox, exam: Exam) -> None:
    """Remove what the tree has at the test paths, links included; put the hidden tests there."""
    gone = box.run(["rm", "-rf", "--", *exam.test_paths])
    if gone.exit_code != 0:
        raise SandboxError(f"cannot replace {exam.test_paths} in the sandbox: {gone.text[-300:]}")
    with tempfile.TemporaryDirectory(prefix="hidden-") as folder:
        for path in exam.test_paths:
            source, target = exam.hidden / path, Path(folder) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True)
            elif source.is_file():
                shutil.copy2(source, target)
        Path(folder).chmod(0o755)
        box.put_tree(Path(folder))


def _run_tests(box: Sandbox, exam: Exam, env: Mapping[str, str]) -> TestRun:
    """Run the tests with the recorder, whose folder, name, key and file are drawn afresh."""
    folder, plugin = f"/tmp/{secrets.token_hex(12)}", f"p{secrets.token_hex(8)}"
    results, key = f"{folder}/{secrets.token_hex(12)}", secrets.token_bytes(32)
    box.run(["mkdir", "-m", "700", folder])
    put = box.run(f"cat > {folder}/{plugin}.py", stdin=_RECORDER.read_bytes())
    if put.exit_code != 0:
        raise SandboxError(f"cannot write to {folder} in the sandbox: {put.text[-300:]}")
    command = f"{exam.test_command} -p {plugin} --rootdir={shlex.quote(box.workdir)}"
    path = os.pathsep.join(part for part in (env.get("PYTHONPATH"), folder) if part)
    done = box.run(
        command,
        timeout=exam.timeout,
        env={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=json.dumps([results, key.hex(), folder]).encode() + b"\n",
    )
    written = box.run(["cat", results], output_cap=_RESULTS_CAP)
    lines = written.output.splitlines() if written.exit_code == 0 else []
    run = _read(lines, key, done.text[-600:])
    trouble = ""
    if done.timed_out:
        trouble = f"the tests ran longer than {exam.timeout:.0f} s"
    elif done.out_of_memory and not run.finished:
        trouble = "the tests used more memory than the sandbox has"
    elif written.omitted:
        trouble = f"the results are larger than {_RESULTS_CAP} bytes"
    return replace(run, trouble=trouble, seconds=done.duration)


def _read(lines: Sequence[bytes], key: bytes, tail: str) -> TestRun:
    """What the recorder's lines say. Lines that it did not write are left out and reported."""
    outcomes: dict[str, str] = {}
    uncollected: list[str] = []
    started = finished = tampered = False
    number = 0
    for line in lines:
        tag, _, text = line.partition(b" ")
        expected = hmac.new(key, text, hashlib.sha256).hexdigest().encode()
        record = json.loads(text) if hmac.compare_digest(tag, expected) else None
        if record is None or record["n"] != number:
            tampered = True
            continue
        number += 1
        event = record["event"]
        started = started or event == "start"
        finished = finished or event == "finish"
        if event == "collect":
            uncollected.append(record["id"])
        elif event == "report" and (outcome := _outcome(record)):
            known = outcomes.get(record["id"], PASSED)
            outcomes[record["id"]] = max(known, outcome, key=_WORSE.index)
    return TestRun(outcomes, started, finished, tampered, tail, tuple(uncollected))


def _outcome(record: Mapping[str, object]) -> str | None:
    """What one phase of a test says; None for a set-up or tear-down that passed."""
    outcome, xfail = record["outcome"], bool(record["xfail"])
    if outcome == "skipped":
        return XFAILED if xfail else SKIPPED
    if record["when"] != "call":
        return ERROR if outcome == "failed" else None
    if outcome == "passed":
        return XPASSED if xfail else PASSED
    return FAILED


def _judge(exam: Exam, run: TestRun, touched: Sequence[str], seconds: float) -> Verdict:
    to_pass = {test: run.outcomes.get(test, MISSING) for test in exam.fail_to_pass}
    to_keep = {test: run.outcomes.get(test, MISSING) for test in exam.pass_to_pass}
    failing = [test for test, outcome in to_pass.items() if outcome != PASSED]
    broken = [test for test, outcome in to_keep.items() if outcome not in _KEPT]
    notes = _flags(exam, touched)
    if run.tampered:
        notes.append("the results file holds lines that the recorder did not write (ignored)")
    # a run cut short never counts as resolved, even if all that is asked for had passed by then
    resolved = not failing and not broken and run.finished
    if run.trouble:
        resolved, status = False, "error"
        notes.insert(0, run.trouble)
    elif not run.started:
        status = "error"
        notes.insert(0, f"pytest did not start: {run.tail.strip()}")
    else:
        status = "resolved" if resolved else "unresolved"
        counts = (
            f"{len(to_pass) - len(failing)} of {len(to_pass)} FAIL_TO_PASS and "
            f"{len(to_keep) - len(broken)} of {len(to_keep)} PASS_TO_PASS are as they should be"
        )
        if not run.finished:
            counts += "; the test run ended early"
        if run.uncollected:
            counts += f"; not collected: {', '.join(run.uncollected[:5])}"
        bad = [f"{test} {(to_pass | to_keep)[test]}" for test in (failing + broken)[:5]]
        notes.insert(0, "; ".join([counts, *bad]))
    return Verdict(resolved, status, to_pass, to_keep, ". ".join(notes), seconds)


def _flags(exam: Exam, touched: Sequence[str]) -> list[str]:
    """What a reader should know about the files of a patch."""
    tests = tuple(PurePosixPath(path) for path in exam.test_paths)
    replaced: list[str] = []
    machinery: list[str] = []
    others: list[str] = []
    for name in touched:
        path = PurePosixPath(name)
        if any(path.is_relative_to(test) for test in tests):
            replaced.append(name)
        elif _steers_tests(path, exam.import_roots):
            machinery.append(name)
        elif _looks_like_test(path):
            others.append(name)
    notes = []
    if machinery:
        notes.append(f"FLAGGED, the patch touches what steers the tests: {_some(machinery)}")
    if others:
        notes.append(f"FLAGGED, the patch touches test files: {_some(others)}")
    if replaced:
        notes.append(f"changes to test files were replaced by the hidden tests: {_some(replaced)}")
    return notes


def _steers_tests(path: PurePosixPath, roots: Sequence[str]) -> bool:
    if path.name in _STEERING or path.suffix == ".pth":
        return True
    for root in map(PurePosixPath, roots):
        if path.is_relative_to(root):  # does it put a module before pytest's or Python's own?
            top = path.relative_to(root).parts[0].partition(".")[0]
            if top in sys.stdlib_module_names or top.startswith(("pytest", "_pytest", "pluggy")):
                return True
    return False


def _looks_like_test(path: PurePosixPath) -> bool:
    folders = {"test", "tests", "testing"} & set(path.parts[:-1])
    stem = path.stem
    named = stem.startswith("test_") or stem.endswith("_test") or stem in ("test", "tests")
    return path.suffix == ".py" and (bool(folders) or named)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
