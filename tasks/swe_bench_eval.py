"""Grading by the official rules of SWE-bench (harness 5.0.2): the evaluation script and its log.

In a fresh sandbox of the instance's image the patch is applied, the script is run, the log between
its markers is parsed, and the tests of the lists are judged. As there: an expected failure counts
as a pass, also for FAIL_TO_PASS; a skipped test is fine for PASS_TO_PASS if the log names it; tests
that the log does not name have failed; a test command that fails though no test does is not graded.

Forged lines. The official harness believes the log, of several statuses of a test the last one.
Here:
- the markers carry a number drawn for the run, so that nothing printed outside them counts, and
  none that the tests print moves them;
- of several statuses of a test the worst counts;
- where the test command is one run of pytest, our own plugin must confirm every pass, and must see
  pytest come to its end. If it can be loaded without the patch but not with it, nothing counts.
What this cannot prevent: code that is made for it (it runs in pytest's own process, where it can
patch pytest, or the plugin) and conftest files and settings, which the patch may change as in the
official harness; those are FLAGGED in the verdict's detail. Where another runner is used (Django's,
SymPy's, tox) passes printed for tests that then have no result of their own are believed.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from posixpath import join, relpath

from environments.base import ExecResult, Sandbox, SandboxError, SandboxSpec
from tasks.instance import SandboxOpener, TaskError, Verdict
from tasks.judging import (
    ERROR,
    FAILED,
    KEPT,
    PASSED,
    SKIPPED,
    XFAILED,
    flags,
    judge,
    some,
    worst,
)
from tasks.log_parsers import Parser, outcome_of, outcomes
from tasks.patches import PatchRefused, apply_in_sandbox
from tasks.recording import Recorder, Records
from tasks.swe_bench_script import END, EXIT_CODE, START, pytest_command

TIMEOUT = 1800.0  # seconds for the script; the official harness's
_LOG_CAP = 100_000_000  # bytes
_VARIABLES = ("PYTHONPATH", "PYTEST_ADDOPTS")  # by which pytest finds the plugin
# a script that sets them itself; lines of the test patch begin with a sign
_OWN_VARIABLES = re.compile(rf"(?m)^(export )?(\w+=\S* )*({'|'.join(_VARIABLES)})=")
_MENDED = frozenset({PASSED, XFAILED})
_PRINTED = {PASSED: "PASSED", FAILED: "FAILED", ERROR: "ERROR", SKIPPED: "SKIPPED"} | {
    XFAILED: "XFAIL"  # a test that passes unexpectedly has no status that parsers know
}
# what scripts print when they could not do their part
_FAILURES = (
    ">>>>> Patch Apply Failed",
    ">>>>> Reset Failed",
    ">>>>> Tests Errored",
    ">>>>> Tests Timed Out",
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All that decides about a patch of an instance. The agent never sees it."""

    script: str  # run by bash in the workspace; prints the markers
    parser: Parser
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_files: tuple[str, ...] = ()  # that the script replaces
    import_roots: tuple[str, ...] = (".", "src", "lib")  # as far as the tree has them
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        if START not in self.script or END not in self.script:
            raise TaskError(
                f"the evaluation script does not print {START!r} and {END!r}, between which the "
                "log is read"
            )


def evaluate(
    exam: Evaluation, patch: bytes, spec: SandboxSpec, open_sandbox: SandboxOpener
) -> Verdict:
    """Grade a patch in a sandbox opened for this alone.

    Never raises for what the patch does. Status `error` stands for trouble of the sandbox, the time
    limit and the memory limit, and for logs that do not show what happened: it was not judged.
    """
    if not patch.strip():
        return Verdict(False, "empty_patch", detail="the patch is empty")
    begun = time.monotonic()
    try:
        with open_sandbox(spec) as box:
            recorder, env = _recorder(box, exam)
            scratch = f"/tmp/{secrets.token_hex(12)}"
            touched = apply_in_sandbox(box, patch, scratch, three_way=True)
            run = _run(box, exam, recorder, env)
    except PatchRefused as error:
        verdict = Verdict(False, "patch_failed", detail=str(error))
    except SandboxError as error:
        verdict = Verdict(False, "error", detail=f"{type(error).__name__}: {error}")
    else:
        verdict = _judged(exam, run, touched)
    return replace(verdict, seconds=time.monotonic() - begun)


def _recorder(box: Sandbox, exam: Evaluation) -> tuple[Recorder | None, dict[str, str]]:
    """The plugin in its place and the variables by which pytest loads it, if the tests are run by
    a pytest that can."""
    if not pytest_command(exam.script) or _OWN_VARIABLES.search(exam.script):
        return None, {}
    said = box.run("; ".join(f'printf "%s\\n" "${{{name}-}}"' for name in _VARIABLES))
    present = dict(zip(_VARIABLES, said.text.split("\n"), strict=False))

    def placed() -> tuple[Recorder, dict[str, str]]:
        recorder = Recorder.place(box)
        options = f"-p {recorder.plugin} {present[_VARIABLES[1]]}".strip()
        return recorder, {**recorder.environment(present), _VARIABLES[1]: options}

    trial, env = placed()
    done = box.run(
        ["pytest", "-p", "no:cacheprovider", "--markers"],
        timeout=120.0,
        cwd=trial.folder,  # no conftest, no settings
        env=env,
        stdin=trial.stdin,
    )
    loaded = done.exit_code == 0 and trial.read(box).root
    box.run(["rm", "-rf", trial.folder])
    return placed() if loaded else (None, {})


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the script."""

    done: ExecResult
    text: str  # all that it printed
    log: str | None  # between the markers; None: they are not both there
    exit_code: int | None  # of the test command, where the script tells it
    records: Records | None  # None: no plugin can be used


def _run(box: Sandbox, exam: Evaluation, recorder: Recorder | None, env: Mapping[str, str]) -> _Run:
    """Run the script with its markers numbered; only its test command reads the plugin's line."""
    number = secrets.token_hex(8)
    script = exam.script
    if recorder is not None:
        lines = script.split("\n")
        first = next(n for n, line in enumerate(lines) if START in line)
        lines.insert(first + 1, "exec 0<&9 9<&-")
        script = "\n".join(["exec 9<&0 </dev/null", *lines])
    for mark in (START, END, EXIT_CODE):
        script = script.replace(mark, f"{mark} {number}")
    path = f"/tmp/{secrets.token_hex(12)}.sh"
    box.write_file(path, script.encode())
    done = box.run(
        ["bash", path],
        timeout=exam.timeout,
        output_cap=_LOG_CAP,
        env=env,
        stdin=None if recorder is None else recorder.stdin,
    )
    text = done.text
    begin, end = text.find(f"{START} {number}"), text.rfind(f"{END} {number}")
    log = text[begin:end].partition("\n")[2] if 0 <= begin < end else None
    code = re.search(rf"{re.escape(EXIT_CODE)} {number}:\s*(-?\d+)", text)
    records = None if recorder is None or done.timed_out else recorder.read(box)
    return _Run(done, text, log, int(code[1]) if code else None, records)


def _judged(exam: Evaluation, run: _Run, touched: tuple[str, ...]) -> Verdict:
    seen = outcomes(exam.parser(run.log or ""))
    tests = dict.fromkeys((*exam.fail_to_pass, *exam.pass_to_pass))
    result = {test: outcome_of(test, seen) for test in tests}
    unconfirmed: list[str] = []
    if run.records is not None:
        confirmed = _confirmed(exam.parser, run.records)
        reported = {test: outcome_of(test, confirmed) for test in tests}
        unconfirmed = [t for t in tests if result[t] in _MENDED and reported[t] not in _MENDED]
        result = {test: worst([result[test], reported[test]]) for test in tests}
    to_pass = {test: result[test] for test in exam.fail_to_pass}
    to_keep = {test: result[test] for test in exam.pass_to_pass}
    fine = all(o in _MENDED for o in to_pass.values()) and all(o in KEPT for o in to_keep.values())
    cut_short, trouble = _faults(exam, run, seen, fine)
    notes = flags(touched, exam.test_files, exam.import_roots)
    if unconfirmed:
        notes.append(f"FLAGGED, the log has passes that pytest did not report: {some(unconfirmed)}")
    if run.records is None:
        notes.append("outcomes are as the log has them: no plugin of ours could confirm them")
    elif run.records.tampered:
        notes.append("the results file holds lines that the recorder did not write (ignored)")
    expected = [test for test, result in to_pass.items() if result == XFAILED]
    if expected:
        notes.append(f"FAIL_TO_PASS tests that fail as they expect to: {some(expected)}")
    return judge(
        to_pass,
        to_keep,
        mended=_MENDED,
        cut_short=cut_short,
        trouble=trouble,
        notes=notes,
    )


def _faults(exam: Evaluation, run: _Run, seen: Mapping[str, str], fine: bool) -> tuple[str, str]:
    """How the patch ended the run early, and why the run shows nothing about it; or neither."""
    done, records = run.done, run.records
    tail = run.text.strip()[-600:]
    if done.timed_out:
        return "", f"the evaluation script ran longer than {exam.timeout:.0f} s"
    if done.out_of_memory and not fine:
        return "", "the tests used more memory than the sandbox has"
    if done.pids_exhausted and not fine:
        return "", "the tests used more processes than the sandbox allows"
    if records is not None and records.trouble:
        return "", records.trouble
    if records is not None and records.started and not records.finished:
        return "the test run ended early", ""
    if run.log is None:
        return "", f"the evaluation script did not come to its end: {tail}"
    if failure := next((mark for mark in _FAILURES if mark in run.text), ""):
        return f"the output has {failure!r}", ""
    if records is not None and not records.started:
        return "pytest did not load the recorder, as it did before the patch", ""
    if run.exit_code in (126, 127) and not seen:
        return "", f"the test command could not be started: {tail}"
    failed = any(outcome in (FAILED, ERROR) for outcome in seen.values())
    if run.exit_code not in (None, 0) and seen and not failed:
        return "", (
            f"the test command ended with {run.exit_code}, but the log has no test that failed: "
            "not graded"
        )
    return "", ""


def _confirmed(parser: Parser, records: Records) -> dict[str, str]:
    """What the plugin reported, with ids as the parser would read them in the log.

    The log has paths relative to the folder where pytest was started, reports to pytest's root.
    """
    lines = []
    for test, outcome in records.outcomes.items():
        path, colons, rest = test.partition("::")
        if records.root and records.start != records.root:
            path = relpath(join(records.root, path), records.start)
        lines.append(f"{_PRINTED.get(outcome, 'XPASS')} {path}{colons}{rest}")
    return outcomes(parser("\n".join(lines)))
