"""Grading by the evaluation script, on a small repository made here.

What each case should give follows from the official rules, and from what a patch must not get by
printing. Most cases run in bubblewrap with the tree put where an image would have it.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from pathlib import Path

import git
import pytest

from environments.base import Limits, Sandbox, SandboxError, SandboxSpec
from tasks import release_pair
from tasks.instance import SandboxOpener, TaskError, Verdict
from tasks.log_parsers import PARSERS
from tasks.swe_bench_eval import Evaluation, evaluate
from tasks.swe_bench_script import END, START, eval_script, test_files

T = "tests/test_mod.py::test_"
WRONG = "def double(x):\n    return x\n"
RIGHT = "def double(x):\n    return 2 * x\n"
OLD_TEST = "from mod import double\n\n\ndef test_old():\n    assert double(0) == 0\n"
NEW_TEST = """\
# a form feed: \x0c; it ends no line
import os
import sys

import pytest
from mod import double


def test_two():
    assert double(2) == 4


@pytest.mark.parametrize("x", ["a b", "c d"])
def test_words(x):
    assert double(x) == 2 * x


def test_kept():
    assert double(0) == 0


@pytest.mark.skipif(double(1) == 3, reason="odd")
def test_skips():
    pass


@pytest.mark.xfail
def test_known():
    assert False


def test_sees_no_plugin():
    assert "PYTEST_ADDOPTS" not in os.environ
    assert "/tmp/" not in os.pathsep.join([*sys.path, os.environ["PYTHONPATH"]])
"""
F2P, P2P = (f"{T}two",), (f"{T}kept",)


def in_git(folder: Path, files: dict[str, str]) -> git.Repo:
    """A repository of one commit."""
    repo = git.Repo.init(folder, initial_branch="main")
    repo.config_writer().set_value("user", "name", "n").set_value("user", "email", "e@x").release()
    commit(repo, files)
    return repo


def commit(repo: git.Repo, files: dict[str, str]) -> None:
    write(repo, files)
    repo.git.add("--all", "--force")
    repo.git.commit("-qm", "c")


def write(repo: git.Repo, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = Path(str(repo.working_dir)) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content))


def diff(repo: git.Repo, files: dict[str, str]) -> str:
    """The patch that brings these contents; the tree stays as it is."""
    write(repo, files)
    repo.git.add("--all", "--force")
    text = str(repo.git.diff("--cached", "HEAD", strip_newline_in_stdout=False))
    repo.git.reset("-q", "--hard")
    return text


@pytest.fixture(scope="session")
def repo(tmp_path_factory: pytest.TempPathFactory) -> git.Repo:
    files = {"mod.py": WRONG, "tests/test_mod.py": OLD_TEST, "tests/conftest.py": ""}
    return in_git(tmp_path_factory.mktemp("swe") / "tree", files)


@pytest.fixture(scope="session")
def test_patch(repo: git.Repo) -> str:
    return diff(repo, {"tests/test_mod.py": NEW_TEST, "tests/extra.json": "{}\n"})


@pytest.fixture
def exam(test_patch: str) -> Evaluation:
    # an installation that reads what it is given
    script = eval_script("pallets/flask", "2.0", "HEAD", test_patch, activate=(), install="cat")
    return Evaluation(
        script=script.replace("cd /testbed", "cd /workspace"),
        parser=PARSERS["parse_log_pytest"],
        fail_to_pass=F2P,
        pass_to_pass=P2P,
        test_files=test_files(test_patch).all,
        timeout=60.0,
    )


@pytest.fixture(scope="session")
def spec() -> SandboxSpec:
    real = release_pair.load("jsonpointer-3.1.1", open_sandbox=never).spec()
    return real.model_copy(update={"limits": Limits.model_validate({"memory_mb": 512})})


def never(spec: SandboxSpec) -> Sandbox:
    raise SandboxError("no sandbox should be opened")


@pytest.fixture
def graded(
    repo: git.Repo, exam: Evaluation, spec: SandboxSpec, any_kind: SandboxOpener
) -> Callable[..., Verdict]:
    def opened(wanted: SandboxSpec) -> Sandbox:
        box = any_kind(wanted)
        box.put_tree(Path(str(repo.working_dir)))
        return box

    def run(patch: dict[str, str] | str, **changes: object) -> Verdict:
        text = patch if isinstance(patch, str) else diff(repo, patch)
        return evaluate(dataclasses.replace(exam, **changes), text.encode(), spec, opened)  # type: ignore[arg-type]

    return run


def unseen(exam: Evaluation) -> str:
    """The same script with a pytest that finds no plugin of ours: it sets its own path."""
    return exam.script.replace("\npytest -rA", "\nX=1 PYTHONPATH=.:/opt/task-env pytest -rA")


# --- the rules


def test_the_right_patch_is_resolved(graded: Callable[..., Verdict]) -> None:
    """Also for an id that is cut as in the data sets, and a test that fails as it expects to."""
    verdict = graded(
        {"mod.py": RIGHT},
        fail_to_pass=(f"{T}two", f"{T}words[a", f"{T}known"),
        pass_to_pass=(*P2P, f"{T}known", f"{T}words[c", f"{T}sees_no_plugin"),
    )
    assert verdict.resolved, verdict
    assert verdict.status == "resolved"
    assert verdict.fail_to_pass == {
        f"{T}two": "passed",
        f"{T}words[a": "passed",
        f"{T}known": "xfailed",
    }
    assert verdict.pass_to_pass == {
        f"{T}kept": "passed",
        f"{T}known": "xfailed",
        f"{T}words[c": "passed",
        f"{T}sees_no_plugin": "passed",
    }
    assert f"fail as they expect to: {T}known" in verdict.detail
    assert "FLAGGED" not in verdict.detail
    assert "confirm" not in verdict.detail


def test_wrong_patches_are_not(graded: Callable[..., Verdict]) -> None:
    verdict = graded({"other.py": "x = 1\n"}, pass_to_pass=(*P2P, f"{T}skips", f"{T}renamed"))
    assert (verdict.resolved, verdict.status) == (False, "unresolved")
    assert verdict.fail_to_pass == {f"{T}two": "failed"}
    # pytest folds skipped tests in its summary, so that a skipped test has no line of its own
    assert verdict.pass_to_pass == {
        f"{T}kept": "passed",
        f"{T}skips": "passed",
        f"{T}renamed": "missing",
    }
    assert "0 of 1 FAIL_TO_PASS and 2 of 3 PASS_TO_PASS" in verdict.detail
    odd = graded({"mod.py": "def double(x):\n    return 2 * x if x != 1 else 3\n"},
                 pass_to_pass=(f"{T}skips",))  # fmt: skip
    assert (odd.status, odd.pass_to_pass[f"{T}skips"]) == ("unresolved", "missing")


def test_an_empty_patch_opens_no_sandbox(exam: Evaluation, spec: SandboxSpec) -> None:
    assert evaluate(exam, b" \n", spec, never).status == "empty_patch"
    assert evaluate(exam, b"x", spec, never).status == "error"


def test_a_patch_that_does_not_apply(graded: Callable[..., Verdict]) -> None:
    verdict = graded("--- a/mod.py\n+++ b/mod.py\n@@ -1,2 +1,2 @@\n def z():\n-    a\n+    b\n")
    assert (verdict.resolved, verdict.status) == (False, "patch_failed")


def test_a_patch_that_merges_applies_as_in_the_official_harness(
    exam: Evaluation, spec: SandboxSpec, any_kind: SandboxOpener, tmp_path: Path
) -> None:
    lines = [f"line{n} = {n}" for n in range(9)]
    repo = in_git(tmp_path / "tree", {"mod.py": "\n".join(lines) + "\n" + WRONG})
    patched = [*lines]
    patched[2], patched[6] = "line2 = 'new'", "line6 = 'new'"
    patch = diff(repo, {"mod.py": "\n".join(patched) + "\n" + RIGHT})
    lines[4] = "line4 = 'changed since'"  # between two changes, so that no fuzz passes over it
    commit(repo, {"mod.py": "\n".join(lines) + "\n" + WRONG, "tests/test_mod.py": OLD_TEST})

    def opened(wanted: SandboxSpec) -> Sandbox:
        box = any_kind(wanted)
        box.put_tree(tmp_path / "tree")
        return box

    assert evaluate(exam, patch.encode(), spec, opened).status == "resolved"


def test_what_a_patch_does_to_test_files_is_replaced(graded: Callable[..., Verdict]) -> None:
    easy = "def test_two(): ...\ndef test_kept(): ...\n"
    verdict = graded({"tests/test_mod.py": easy, "tests/extra.json": "x"})
    assert verdict.fail_to_pass == {f"{T}two": "failed"}
    assert "replaced by the hidden tests: tests/extra.json, tests/test_mod.py" in verdict.detail


# --- what a patch may try

LINES = "".join(f"PASSED {test}\n" for test in (*F2P, *P2P))


@pytest.mark.parametrize("confirmed", [True, False])
def test_printed_passes_do_not_outweigh_failures(
    graded: Callable[..., Verdict], exam: Evaluation, confirmed: bool
) -> None:
    """At the end of the log, where the official harness believes them; and between markers of
    their own."""
    marked = f"\n{START}\n{LINES}{END}\n>>>>> Test Exit Code: 0\n"
    forger = f"""
        import atexit, os, sys
        sys.__stdout__.write({marked!r})
        def last():
            os.write(1, {LINES.encode()!r})
            os._exit(0)
        atexit.register(last)
        def double(x):
            return x
        """
    verdict = graded({"mod.py": forger}, script=exam.script if confirmed else unseen(exam))
    assert (verdict.status, verdict.fail_to_pass) == ("unresolved", {f"{T}two": "failed"})
    assert ("no plugin of ours" in verdict.detail) is not confirmed


EARLY = f"""
    import os
    for held in range(3, 20):
        try:
            os.write(held, {LINES.encode()!r})
        except OSError:
            pass
    os._exit(STATUS)
    """


def test_passes_printed_in_place_of_tests_are_not_confirmed(
    graded: Callable[..., Verdict], exam: Evaluation
) -> None:
    patch = {"mod.py": EARLY.replace("STATUS", "0")}
    verdict = graded(patch)
    assert (verdict.status, set(verdict.fail_to_pass.values())) == ("unresolved", {"missing"})
    assert "the test run ended early" in verdict.detail
    assert f"passes that pytest did not report: {T}two, {T}kept" in verdict.detail
    # without the plugin they are believed: what the module's docstring says cannot be prevented
    believed = graded(patch, script=unseen(exam))
    assert believed.resolved
    assert "no plugin of ours could confirm" in believed.detail


def test_nothing_counts_that_was_printed_outside_the_markers(
    graded: Callable[..., Verdict], exam: Evaluation
) -> None:
    """By code of the patch that the installation runs, with markers of its own."""
    forger = f"""
        import os, sys
        if "pytest" in sys.modules:
            os._exit(0)
        for end in ("", " "):
            print("{START}" + end, {LINES!r}, "{END}" + end, sep="\\n")
        """
    script = unseen(exam).replace("\ncat\n", "\npython3 mod.py\n")
    verdict = graded({"mod.py": forger}, script=script)
    assert (verdict.status, verdict.fail_to_pass) == ("unresolved", {f"{T}two": "missing"})


def test_a_status_that_the_log_does_not_explain_is_not_graded(
    graded: Callable[..., Verdict], exam: Evaluation
) -> None:
    verdict = graded({"mod.py": EARLY.replace("STATUS", "7")}, script=unseen(exam))
    assert (verdict.resolved, verdict.status) == (False, "error")
    assert "ended with 7, but the log has no test that failed: not graded" in verdict.detail


def test_patches_that_keep_the_plugin_out_get_nothing(graded: Callable[..., Verdict]) -> None:
    """A module that Python takes before pytest's own: no test runs, and passes are printed."""
    fake = f"print({LINES!r})\nraise SystemExit(0)\n"
    verdict = graded({"pytest.py": fake, "_pytest/__init__.py": fake})
    assert (verdict.resolved, verdict.status) == (False, "unresolved")
    assert "did not load the recorder" in verdict.detail
    assert "FLAGGED, the patch touches what steers the tests" in verdict.detail


def test_conftest_files_are_flagged(graded: Callable[..., Verdict]) -> None:
    hook = """
        import pytest
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_makereport(item, call):
            (yield).get_result().outcome = "passed"
        """
    verdict = graded({"tests/conftest.py": hook})
    assert verdict.resolved  # as in the official harness
    assert "FLAGGED, the patch touches what steers the tests: tests/conftest.py" in verdict.detail


# --- other runners, and trouble


def test_another_runner_by_its_log(graded: Callable[..., Verdict], exam: Evaluation) -> None:
    unit = """
        import unittest
        from mod import double
        class Test(unittest.TestCase):
            def test_two(self):
                self.assertEqual(double(2), 4)
            def test_kept(self):
                "It has a docstring."
                self.assertEqual(double(0), 0)
            @unittest.skip("not here")
            def test_skipped(self): ...
        """
    changes = {
        "script": f"""
            cat > tests/test_unit.py <<'EOF'\n{textwrap.dedent(unit)}\nEOF
            : '{START}'
            python3 -m unittest -v tests/test_unit.py
            CODE=$?
            : '{END}'
            echo ">>>>> Test Exit Code: $CODE"
            """.replace("\n            ", "\n").replace(": '", "echo '"),
        "parser": PARSERS["parse_log_django"],
        "fail_to_pass": ("test_two (tests.test_unit.Test.test_two)",),
        "pass_to_pass": (
            "It has a docstring.",
            "test_skipped (tests.test_unit.Test.test_skipped)",
        ),
    }
    verdict = graded({"mod.py": RIGHT}, **changes)
    assert verdict.resolved, verdict
    assert set(verdict.pass_to_pass.values()) == {"passed", "skipped"}
    assert graded({"mod.py": "def double(x):\n    return 1\n"}, **changes).status == "unresolved"


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("sleep 30", "error", "longer than 3 s"),
        ("kill -9 $$", "error", "did not come to its end"),
        ("no-such-program", "error", "could not be started"),
        ("false", "unresolved", "0 of 1 FAIL_TO_PASS"),
        ("echo '>>>>> Tests Errored'", "unresolved", "'>>>>> Tests Errored'"),
    ],
)
def test_scripts_that_come_to_nothing(
    graded: Callable[..., Verdict], line: str, status: str, said: str
) -> None:
    script = (
        f": '{START}'\necho\n{line}\nCODE=$?\necho '{END}'\necho \">>>>> Test Exit Code: $CODE\""
    )
    verdict = graded({"mod.py": RIGHT}, script=f"set -x\n{script}\n", timeout=3.0)
    assert (verdict.resolved, verdict.status) == (False, status)
    assert said in verdict.detail


def test_a_script_without_markers_is_refused(exam: Evaluation) -> None:
    with pytest.raises(TaskError, match="does not print '>>>>> Start Test Output'"):
        dataclasses.replace(exam, script="pytest\n")
