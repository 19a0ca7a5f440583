"""The rules of grading, on a small project made here: outcomes, cheats, limits, flags.

What each case should give follows from the official rules (all FAIL_TO_PASS pass; all PASS_TO_PASS
pass, are expected failures, or are skipped) and from what pytest documents for each outcome.
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
from tasks.grading import Exam, grade
from tasks.instance import SandboxOpener, Verdict

FIX = "def double(x):\n    return 2 * x\n"
HIDDEN = """
import pytest
from mod import double
def test_two(): assert double(2) == 4
def test_three(): assert double(3) == 6
def test_kept(): assert double(0) == 0
@pytest.mark.xfail
def test_expected(): assert False
@pytest.mark.skip
def test_skipped(): ...
"""
T = "tests/test_mod.py::test_"

Graded = Callable[..., Verdict]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def patch_of(tree: Path, files: dict[str, str | None]) -> bytes:
    """A patch that git makes of a change (None deletes)."""
    repo = git.Repo.init(tree.with_name("patch"))
    work = tree.with_name("patch")
    for path in tree.rglob("*.*"):
        write(work, {str(path.relative_to(tree)): path.read_text()})
    repo.git.add("--all")
    base = repo.git.write_tree()
    for name, content in files.items():
        if content is None:
            (work / name).unlink()
        else:
            write(work, {name: textwrap.dedent(content)})
    repo.git.add("--all", "--force")
    return repo.git.diff("--cached", base, stdout_as_string=False, strip_newline_in_stdout=False)


@pytest.fixture(scope="session")
def spec() -> SandboxSpec:
    real = release_pair.load("jsonpointer-3.1.1", open_sandbox=never).spec()
    return real.model_copy(
        update={"limits": Limits.model_validate({"memory_mb": 512}), "start_timeout": 30.0}
    )


def never(spec: SandboxSpec) -> Sandbox:
    raise SandboxError("no sandbox should be opened")


@pytest.fixture
def exam(tmp_path: Path) -> Exam:
    old = {
        "mod.py": "def double(x):\n    return x\n",
        "tests/test_mod.py": "def test_old(): ...\n",
        "tests/conftest.py": "",
        "README.md": "read me\n",
    }
    return Exam(
        tree=write(tmp_path / "tree", old),
        hidden=write(tmp_path / "new", {"tests/test_mod.py": HIDDEN, "mod.py": FIX}),
        test_paths=("tests",),
        test_command="python -m pytest -q -p no:cacheprovider tests",
        fail_to_pass=(f"{T}two", f"{T}three"),
        pass_to_pass=(f"{T}kept",),
        timeout=60.0,
    )


@pytest.fixture
def graded(exam: Exam, spec: SandboxSpec, any_kind: SandboxOpener) -> Graded:
    def run(files: dict[str, str | None], hidden: str | None = None, **changes: object) -> Verdict:
        if hidden is not None:
            write(exam.hidden, {"tests/test_mod.py": textwrap.dedent(hidden)})
        patch = patch_of(exam.tree, files)
        return grade(dataclasses.replace(exam, **changes), patch, spec, any_kind)  # type: ignore[arg-type]

    return run


# --- the rules


def test_the_right_patch_is_resolved(graded: Graded) -> None:
    verdict = graded({"mod.py": FIX}, pass_to_pass=(f"{T}kept", f"{T}expected", f"{T}skipped"))
    assert verdict.status == "resolved", verdict
    assert verdict.resolved
    assert verdict.fail_to_pass == {f"{T}two": "passed", f"{T}three": "passed"}
    assert verdict.pass_to_pass == {
        f"{T}kept": "passed",
        f"{T}expected": "xfailed",
        f"{T}skipped": "skipped",
    }
    assert "FLAGGED" not in verdict.detail


@pytest.mark.parametrize(
    ("mod", "failing"),
    [
        ("def double(x):\n    return 4 if x == 2 else x\n", {"three"}),
        ("def double(x):\n    return 2 * x if x else 7\n", {"kept"}),
        ("def double(x):\n    import pytest\n    pytest.skip()\n", {"two", "three"}),
        ("def double(x):\n    import pytest\n    pytest.xfail()\n", {"two", "three"}),
        ("def double(x:\n", {"two", "three", "kept"}),
    ],
    ids=["half", "breaks another", "skips", "xfails", "syntax error"],
)
def test_wrong_patches_are_unresolved(graded: Graded, mod: str, failing: set[str]) -> None:
    verdict = graded({"mod.py": mod})
    assert (verdict.resolved, verdict.status) == (False, "unresolved")
    outcomes = {**verdict.fail_to_pass, **verdict.pass_to_pass}
    bad = {test.removeprefix(T) for test, outcome in outcomes.items() if outcome != "passed"}
    assert bad - ({"kept"} if "pytest" in mod else set()) == failing


def test_a_test_without_a_result_counts_as_failed(graded: Graded) -> None:
    verdict = graded({"mod.py": FIX}, pass_to_pass=(f"{T}kept", f"{T}renamed_away"))
    assert verdict.status == "unresolved"
    assert verdict.pass_to_pass[f"{T}renamed_away"] == "missing"


def test_every_outcome_of_pytest_is_told_apart(graded: Graded) -> None:
    hidden = """
        import os, pytest, unittest
        def test_passed(): ...
        def test_failed(): assert False
        @pytest.mark.xfail
        def test_xfailed(): assert False
        @pytest.mark.xfail
        def test_xpassed(): ...
        @pytest.mark.xfail(strict=True)
        def test_strict(): ...
        def test_skipped(): pytest.skip()
        @pytest.fixture
        def broken(): raise RuntimeError
        def test_setup(broken): ...
        @pytest.fixture
        def late():
            yield
            raise RuntimeError
        def test_teardown(late): ...
        @pytest.mark.parametrize("x", ["a b", "[", "é"])
        def test_named(x): ...
        def test_patched(monkeypatch):
            for name in ("write", "open", "getpid"):
                monkeypatch.setattr(os, name, None)
            monkeypatch.setattr("json.dumps", None)
        def test_forked():
            if os.fork() == 0:
                raise SystemExit(0)
        class Test(unittest.TestCase):
            def test_case(self):
                with self.subTest("inner"):
                    self.fail()
        """
    expected = {
        f"{T}passed": "passed",
        f"{T}failed": "failed",
        f"{T}xfailed": "xfailed",
        f"{T}xpassed": "xpassed",
        f"{T}strict": "failed",
        f"{T}skipped": "skipped",
        f"{T}setup": "error",
        f"{T}teardown": "error",
        f"{T}named[a b]": "passed",
        f"{T}named[[]": "passed",
        f"{T}named[\\xe9]": "passed",
        f"{T}patched": "passed",
        f"{T}forked": "passed",
        "tests/test_mod.py::Test::test_case": "failed",
    }
    verdict = graded({"mod.py": FIX}, hidden, fail_to_pass=(), pass_to_pass=tuple(expected))
    assert dict(verdict.pass_to_pass) == expected
    assert "did not write" not in verdict.detail


def test_empty_patches_open_no_sandbox(exam: Exam, spec: SandboxSpec) -> None:
    for patch in (b"", b"\n \n"):
        assert grade(exam, patch, spec, never).status == "empty_patch"


@pytest.mark.parametrize(
    "patch",
    [
        b"this is no patch\n",
        b"--- a/absent.py\n+++ b/absent.py\n@@ -1 +1 @@\n-a\n+b\n",
        b"--- a/mod.py\n+++ b/mod.py\n@@ -1,2 +1,2 @@\n def z():\n-    return 1\n+    return 2\n",
        b"--- /dev/null\n+++ b/.git/hooks/post-checkout\n@@ -0,0 +1 @@\n+evil\n",
        b"--- /dev/null\n+++ b/../outside\n@@ -0,0 +1 @@\n+evil\n",
    ],
)
def test_patches_that_do_not_apply(
    exam: Exam, spec: SandboxSpec, any_kind: SandboxOpener, patch: bytes
) -> None:
    verdict = grade(exam, patch, spec, any_kind)
    assert (verdict.resolved, verdict.status) == (False, "patch_failed")
    assert "does not apply" in verdict.detail


def test_a_patch_with_moved_context_still_applies_as_the_official_harness_does(
    exam: Exam, spec: SandboxSpec, any_kind: SandboxOpener
) -> None:
    fuzzy = (
        b"--- a/mod.py\n+++ b/mod.py\n@@ -1,3 +1,3 @@\n def double(x):\n-    return x\n"
        b"+    return 2 * x\n # a line that is not there\n"
    )
    assert grade(exam, fuzzy, spec, any_kind).status == "resolved"


# --- what a patch may try


def test_printed_results_do_not_count(graded: Graded) -> None:
    lines = "\\n".join([f"PASSED {T}two", f"PASSED {T}three", f"PASSED {T}kept", "3 passed"])
    forged = f"""
        import atexit, sys
        atexit.register(lambda: sys.__stdout__.write("{lines}\\n"))
        print("{lines}")
        def double(x):
            return x
        """
    verdict = graded({"mod.py": forged})
    assert verdict.status == "unresolved"
    assert verdict.fail_to_pass[f"{T}two"] == "failed"


def test_leaving_early_with_success_does_not_count(graded: Graded) -> None:
    verdict = graded({"mod.py": "import os\nos._exit(0)\n"})
    assert verdict.status == "unresolved"
    assert set(verdict.fail_to_pass.values()) == {"missing"}
    assert "ended early" in verdict.detail


def test_a_run_cut_short_is_not_resolved_even_if_the_wanted_tests_had_passed(
    graded: Graded,
) -> None:
    verdict = graded({"mod.py": FIX}, HIDDEN + "def test_zz():\n    import os; os._exit(0)\n")
    assert set(verdict.fail_to_pass.values()) == {"passed"}
    assert verdict.status == "unresolved"


def test_lines_written_into_the_results_do_not_count(graded: Graded) -> None:
    forger = f"""
        import glob, hashlib, json, os
        [path] = [p for p in glob.glob("/tmp/*/*") if not p.endswith(".py")]
        count = len(open(path, "rb").read().splitlines())
        reports = [dict(event="report", id=test, when="call", outcome="passed", xfail=False)
                   for test in ("{T}two", "{T}three", "{T}kept")]
        with open(path, "ab") as out:
            for n, record in enumerate([*reports, dict(event="finish", exit=0)], count):
                text = json.dumps(dict(n=n, **record)).encode()
                out.write(hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\\n")
        os._exit(0)
        """
    verdict = graded({"mod.py": forger})
    assert verdict.status == "unresolved"
    assert set(verdict.fail_to_pass.values()) == {"missing"}
    assert "did not write" in verdict.detail


def test_the_key_is_not_where_code_looks_first(graded: Graded) -> None:
    probe = r"""
        import os, re, sys
        def double(x):
            seen = [*os.environ.values(), *sys.argv, *sys.path, str(os.read(0, 10_000))]
            seen += [open(f"/proc/self/{name}").read() for name in ("environ", "cmdline")]
            return 0 if re.search("[0-9a-f]{64}", " ".join(seen)) else 2 * x
        """
    assert graded({"mod.py": probe}).status == "resolved"


def test_the_agents_own_tests_are_replaced(graded: Graded) -> None:
    cheat = {
        "mod.py": "def double(x):\n    return x\n",
        "tests/test_mod.py": "def test_two(): ...\ndef test_three(): ...\ndef test_kept(): ...\n",
        "tests/conftest.py": "collect_ignore = ['test_mod.py']\n",
        "tests/sub/conftest.py": "raise SystemExit(0)\n",
    }
    verdict = graded(cheat)
    assert verdict.status == "unresolved"
    assert verdict.fail_to_pass[f"{T}two"] == "failed"
    assert "replaced by the hidden tests: tests/conftest.py" in verdict.detail
    assert "FLAGGED" not in verdict.detail


def test_a_link_in_place_of_the_tests_is_replaced_too(
    exam: Exam, spec: SandboxSpec, any_kind: SandboxOpener
) -> None:
    for name in ("test_mod.py", "conftest.py"):
        (exam.tree / "tests" / name).unlink()
    (exam.tree / "tests").rmdir()
    link = (
        b"diff --git a/tests b/tests\nnew file mode 120000\n--- /dev/null\n+++ b/tests\n"
        b"@@ -0,0 +1 @@\n+/tmp\n\\ No newline at end of file\n"
    )
    fix = patch_of(exam.tree, {"mod.py": FIX})
    assert grade(exam, fix + link, spec, any_kind).status == "resolved"


HOOK = """
    import pytest
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(item, call):
        report = (yield).get_result()
        report.outcome = "passed"
    """


@pytest.mark.parametrize(
    "names",
    [
        ("conftest.py", "pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini"),
        ("_pytest/x.py", "a.pth", "json/__init__.py", "pytest_mine.py", "sitecustomize.py"),
        ("x.egg-info/entry_points.txt",),
    ],
)
def test_patches_that_steer_the_tests_are_flagged(graded: Graded, names: tuple[str, ...]) -> None:
    verdict = graded({name: HOOK if name == "conftest.py" else "" for name in names})
    assert f"touches what steers the tests: {', '.join(sorted(names))}" in verdict.detail


def test_a_flag_cannot_be_hidden_by_gitignore_or_by_renaming(
    exam: Exam, spec: SandboxSpec, any_kind: SandboxOpener
) -> None:
    hidden = patch_of(exam.tree, {".gitignore": "conftest.py\n", "conftest.py": HOOK})
    assert "steers the tests: conftest.py" in grade(exam, hidden, spec, any_kind).detail
    write(exam.tree, {"conftest.py": "# here\n"})
    moved = (
        b"diff --git a/conftest.py b/other.txt\nsimilarity index 100%\n"
        b"rename from conftest.py\nrename to other.txt\n"
    )
    assert "steers the tests: conftest.py" in grade(exam, moved, spec, any_kind).detail


def test_other_test_files_are_flagged_and_plain_sources_are_not(graded: Graded) -> None:
    verdict = graded({"mod.py": FIX, "check/test_more.py": "", "contest.py": "", "latest.py": ""})
    assert "FLAGGED, the patch touches test files: check/test_more.py" in verdict.detail
    assert "contest.py" not in verdict.detail
    assert verdict.resolved


# --- trouble


def test_the_time_limit_is_an_error_not_a_verdict(graded: Graded) -> None:
    verdict = graded({"mod.py": "while True: ...\n"}, timeout=3.0)
    assert (verdict.resolved, verdict.status) == (False, "error")
    assert "longer than 3 s" in verdict.detail
    assert verdict.seconds < 15


def test_a_sandbox_that_does_not_open_is_an_error(exam: Exam, spec: SandboxSpec) -> None:
    verdict = grade(exam, b"x", spec, never)
    assert verdict.status == "error"
    assert "no sandbox should be opened" in verdict.detail


def test_pytest_that_cannot_start_is_an_error(graded: Graded) -> None:
    verdict = graded({"mod.py": FIX}, test_command="python -m pytest_absent")
    assert verdict.status == "error"
    assert "No module named" in verdict.detail


def test_nothing_of_the_new_release_but_its_tests_is_in_the_sandbox(
    exam: Exam, spec: SandboxSpec, any_kind: SandboxOpener
) -> None:
    write(exam.hidden, {"secret_solution.py": "x"})
    hidden = """
        import os, subprocess
        def test_two():
            found = subprocess.run(["find", "/", "-name", "secret_solution*", "-not", "-path",
                                    "/proc/*"], stdout=-1).stdout
            assert found == b""
            assert os.path.exists("tests/test_mod.py")
            assert not os.path.exists("tests/conftest.py")
        """
    write(exam.hidden, {"tests/test_mod.py": textwrap.dedent(hidden)})
    narrow = dataclasses.replace(exam, fail_to_pass=(f"{T}two",), pass_to_pass=())
    verdict = grade(narrow, patch_of(exam.tree, {"README.md": "x\n"}), spec, any_kind)
    assert verdict.status == "resolved", verdict
