"""Grading a patch in a fresh sandbox, by the official rules of SWE-bench.

Resolved means: every FAIL_TO_PASS test passes, and every PASS_TO_PASS test passes, is an expected
failure, or is skipped. A test without a result counts as failed. Results are taken by test id from
a plugin of ours (`pytest_recorder`), never from what the tests print. Code under test runs in the
same process as pytest, so a patch made for it could still cheat: patches that touch what decides
how tests run are named in the verdict's detail.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from environments.base import Sandbox, SandboxError, SandboxSpec
from tasks.instance import SandboxOpener, Verdict
from tasks.judging import ERROR as ERROR
from tasks.judging import FAILED as FAILED
from tasks.judging import MISSING as MISSING
from tasks.judging import PASSED as PASSED
from tasks.judging import flags, judge
from tasks.patches import PatchRefused, apply_in_sandbox
from tasks.recording import Recorder


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
    """Run the tests with the recorder."""
    recorder = Recorder.place(box)
    command = f"{exam.test_command} -p {recorder.plugin} --rootdir={shlex.quote(box.workdir)}"
    done = box.run(
        command, timeout=exam.timeout, env=recorder.environment(env), stdin=recorder.stdin
    )
    records = recorder.read(box)
    trouble = records.trouble
    if done.timed_out:
        trouble = f"the tests ran longer than {exam.timeout:.0f} s"
    elif done.out_of_memory and not records.finished:
        trouble = "the tests used more memory than the sandbox has"
    return TestRun(
        outcomes=records.outcomes,
        started=records.started,
        finished=records.finished,
        tampered=records.tampered,
        tail=done.text[-600:],
        uncollected=records.uncollected,
        trouble=trouble,
        seconds=done.duration,
    )


def _judge(exam: Exam, run: TestRun, touched: Sequence[str], seconds: float) -> Verdict:
    notes = flags(touched, exam.test_paths, exam.import_roots)
    if run.tampered:
        notes.append("the results file holds lines that the recorder did not write (ignored)")
    trouble = run.trouble
    if not run.started:
        trouble = trouble or f"pytest did not start: {run.tail.strip()}"
    missed = [f"not collected: {', '.join(run.uncollected[:5])}"] if run.uncollected else []
    return judge(
        {test: run.outcomes.get(test, MISSING) for test in exam.fail_to_pass},
        {test: run.outcomes.get(test, MISSING) for test in exam.pass_to_pass},
        cut_short="" if run.finished else "the test run ended early",
        trouble=trouble,
        remarks=missed,
        notes=notes,
        seconds=seconds,
    )
