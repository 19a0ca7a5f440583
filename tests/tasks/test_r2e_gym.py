"""R2E-Gym: what rows say, the rule of comparison, and grading where the tests lie in the image."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments import open_sandbox
from environments.base import Sandbox, SandboxSpec
from tasks import r2e_gym
from tasks.image import place_tree
from tasks.instance import SandboxOpener, Task, TaskError, Verdict
from tasks.r2e_gym import R2eRow, R2eTask, as_expected, normal, outcomes
from tests.tasks.row_fixtures import PATCH, r2e, summary

STATUSES = st.sampled_from(["PASSED", "FAILED", "ERROR"])
NAMES = st.from_regex(r"test_[a-z]{1,5}(\[[a-z0-9]{1,3}\])?", fullmatch=True)
TABLES = st.dictionaries(NAMES, STATUSES, max_size=6)


def row(**changes: Any) -> R2eRow:
    return R2eRow.model_validate(r2e(**changes))


# rows


def test_a_row() -> None:
    one = row()
    assert one.instance_id == "calc__" + "0" * 39 + "1"
    assert one.expected == {"T.test_x": "PASSED", "test_kept": "PASSED"}
    assert one.before == {"T.test_x": "FAILED", "test_kept": "PASSED"}
    assert one.problem == "**Title:** double is wrong\n\n**Description:**\nby one"
    assert row(problem_statement=" plain text\n").problem == "plain text"


def test_the_reference_is_the_commits_change_to_python_files_that_are_no_tests() -> None:
    assert row().patch == PATCH  # neither README.md nor tests/test_calc.py


def commit(path: str, **more: Any) -> str:
    """A commit that adds one file of one line."""
    diff = {
        "header": {"file": {"path": path}, "misc_line": "new file mode 100644"},
        "minus_file": {"path": "/dev/null"},
        "plus_file": {"path": path},
        "hunks": [
            {
                "descriptor": {
                    "old_range": {"start": 0, "length": 0},
                    "new_range": {"start": 1},
                    "section": "",
                },
                "line_group": {
                    "all_lines": [
                        {"type": "added", "content": "x = 1"},
                        {"type": "note", "content": "No newline at end of file"},
                    ]
                },
            }
        ],
    }
    return json.dumps({"file_diffs": [diff | more]})


def test_a_reference_with_a_new_file_whose_last_line_does_not_end() -> None:
    wanted = (
        "diff --git a/pkg/new.py b/pkg/new.py\nnew file mode 100644\n--- /dev/null\n"
        "+++ b/pkg/new.py\n@@ -0,0 +1 @@\n+x = 1\n\\ No newline at end of file\n"
    )
    assert row(parsed_commit_content=commit("pkg/new.py")).patch == wanted


@pytest.mark.parametrize(
    "path",
    ["test_a.py", "a_test.py", "pkg/tests/x.py", "Tests/x.py", "test/x.py", "a.rst", "a.pyx"],
)
def test_what_is_no_source(path: str) -> None:
    assert row(parsed_commit_content=commit(path)).patch == ""
    assert row(parsed_commit_content=commit("latest.py", is_binary_file=True)).patch == ""


def test_rows_need_not_say_what_was_before() -> None:
    for nothing in (None, "", json.dumps({"new_commit_hash": "x"})):
        assert row(execution_result_content=nothing).before == {}
    assert row(parsed_commit_content=None).patch == ""


# the rule


@given(TABLES)
def test_a_summary_says_what_its_tests_did(table: dict[str, str]) -> None:
    lines = [
        f"{status} r2e_tests/test_1.py::{name}" + (" - why it failed" * (status != "PASSED"))
        for name, status in table.items()
    ]
    log = f"PASSED x.py::not_in_the_summary\n{summary(*lines)}\n"
    assert outcomes(log) == table
    coloured = log.replace("PASSED", "\x1b[32mPASSED\x1b[0m").replace("::", "::\x1b[1m")
    assert outcomes(coloured.replace("\n", "\r\n")) == table


def test_classes_are_joined_by_dots_and_skips_are_not_counted() -> None:
    log = summary(
        "PASSED r2e_tests/test_1.py::TestA::test_b[a - b]",
        "SKIPPED [1] r2e_tests/test_1.py:3: no",
        "XFAIL r2e_tests/test_1.py::test_c",
        "ERROR r2e_tests/test_1.py - ImportError",
    )
    found = outcomes(log)
    assert found == {"TestA.test_b[a - b]": "PASSED", "": "ERROR"}
    assert normal(found) == {"TestA.test_b[a": "PASSED", "": "ERROR"}
    assert outcomes("no such heading\nPASSED a::b") == {}


@given(TABLES, st.data())
def test_equal_tables_are_as_expected_and_one_difference_is_not(
    table: dict[str, str], data: st.DataObject
) -> None:
    assert as_expected(table, table)
    assert as_expected({f"\x1b[1m{name}\x1b[0m": status for name, status in table.items()}, table)
    assert as_expected({f"{name} - because": status for name, status in table.items()}, table)
    assert not as_expected({**table, "test_more_of_it": "PASSED"}, table)
    assert not as_expected(table, {**table, "test_more_of_it": "PASSED"})
    if table:
        name = data.draw(st.sampled_from(sorted(table)))
        other = data.draw(STATUSES.filter(lambda status: status != table[name]))
        assert not as_expected({**table, name: other}, table)
        renamed = {**table, "test_renamed_one": table[name]}
        del renamed[name]
        assert not as_expected(renamed, table)


def test_tests_without_a_name_count_by_their_number_only() -> None:
    assert as_expected({"": "ERROR", "a": "PASSED"}, {"": "FAILED", "a": "PASSED"})
    assert not as_expected({"": "ERROR", "a": "PASSED"}, {"a": "PASSED"})


# grading: an image's /testbed with r2e_tests and run_tests.sh, a runner like pytest in them

RUNNER = """
import sys, traceback
sys.path.insert(0, ".")
from r2e_tests import test_1
lines = []
for name, test in vars(test_1).items():
    if name.startswith("test_"):
        try:
            test()
            lines.append(f"PASSED r2e_tests/test_1.py::{name}")
        except BaseException as error:
            lines.append(f"FAILED r2e_tests/test_1.py::{name} - {error!r}")
print("=== short test summary info ===")
print("\\n".join(lines))
print(f"=== {len(lines)} in 0.1s ===")
"""
FILES = {
    "calc.py": "def double(x):\n    return x + x + 1\n",
    "r2e_tests/__init__.py": "",
    "r2e_tests/run.py": RUNNER,
    "r2e_tests/test_1.py": (
        "from calc import double\ndef test_two(): assert double(2) == 4\n"
        "def test_callable(): assert callable(double)\ndef test_never(): assert False\n"
    ),
    "run_tests.sh": "python3 -m r2e_tests.run\n",
}
EXPECTED = {"test_two": "PASSED", "test_callable": "PASSED", "test_never": "FAILED"}
BEFORE = summary(*(f"{'FAILED' if n != 'test_callable' else 'PASSED'} a::{n}" for n in EXPECTED))
WRONG = PATCH.replace("+    return x + x\n", "+    return x\n").encode()


def made(image: str, **changes: Any) -> R2eRow:
    return row(
        docker_image=image,
        expected_output_json=json.dumps(EXPECTED),
        execution_result_content=json.dumps({"old_commit_res_stdout": BEFORE}),
        **changes,
    )


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


Graded = Callable[..., Verdict]


@pytest.fixture
def grade(tmp_path: Path, any_kind: SandboxOpener) -> Graded:
    """Grades in a sandbox without an image that holds what one has in /testbed."""

    def graded(patch: bytes, files: dict[str, str] = FILES, **changes: Any) -> Verdict:
        tree = write(tmp_path / "tree", files)

        def opened(spec: SandboxSpec) -> Sandbox:
            assert spec.image == "calc:1"
            box = any_kind(SandboxSpec())
            box.put_tree(tree)
            return box

        return R2eTask(made("calc:1", **changes), opened).grade(patch)

    return graded


def test_the_reference_resolves_and_nothing_else_does(grade: Graded) -> None:
    right = grade(PATCH.encode())
    assert right.status == "resolved", right.detail
    assert right.resolved
    assert right.fail_to_pass == {"test_two": "passed"}
    assert right.pass_to_pass == {"test_callable": "passed"}  # test_never is not to pass
    assert right.detail == "3 of 3 tests are as expected"
    assert right.seconds > 0
    wrong = grade(WRONG)
    assert wrong.status == "unresolved"
    assert wrong.fail_to_pass == {"test_two": "failed"}
    assert "2 of 3 tests are as expected; test_two failed instead of passed" in wrong.detail
    assert grade(b"\n").status == "empty_patch"
    assert grade(PATCH.replace("x + x + 1", "y + y").encode()).status == "patch_failed"


def test_a_test_that_should_fail_and_passes_is_no_resolution(grade: Graded) -> None:
    tests = FILES["r2e_tests/test_1.py"].replace("assert False", "assert True")
    verdict = grade(PATCH.encode(), FILES | {"r2e_tests/test_1.py": tests})
    assert verdict.status == "unresolved"
    assert "test_never passed instead of failed" in verdict.detail


def added(path: str, text: str) -> bytes:
    lines = text.splitlines()
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
    ).encode()


def test_what_a_patch_puts_in_the_place_of_the_tests_does_not_count(grade: Graded) -> None:
    everything = "\n".join(f"echo '{s} a::{n}'" for n, s in EXPECTED.items())
    script = added("run_tests.sh", f"echo 'short test summary info'\n{everything}")
    passing = "def test_two(): pass\ndef test_callable(): pass\ndef test_never(): assert 0"
    for patch in (script, added("r2e_tests/test_1.py", passing), script + added("c.py", "x = 1")):
        verdict = grade(patch)
        assert verdict.status == "unresolved", verdict.detail
        assert verdict.fail_to_pass == {"test_two": "failed"}
        assert "were replaced by the hidden tests" in verdict.detail


def test_files_that_steer_tests_are_flagged(grade: Graded) -> None:
    verdict = grade(PATCH.encode() + added("conftest.py", "x = 1"))
    assert verdict.status == "resolved"
    assert "FLAGGED, the patch touches what steers the tests: conftest.py" in verdict.detail


def test_a_patch_after_which_no_test_runs(grade: Graded) -> None:
    verdict = grade(PATCH.replace("+    return x + x\n", "+    return ((\n").encode())
    assert verdict.status == "unresolved"
    assert verdict.fail_to_pass == {"test_two": "missing"}
    assert "no summary of tests was printed" in verdict.detail
    assert "SyntaxError" in verdict.detail


def test_tests_without_an_end_are_no_verdict(
    grade: Graded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(r2e_gym, "SECONDS", 1.5)
    verdict = grade(PATCH.encode(), FILES | {"run_tests.sh": "sleep 60\n"})
    assert verdict.status == "error"
    assert "longer than 2 s" in verdict.detail


def test_an_image_without_tests_is_an_error_of_the_row(grade: Graded) -> None:
    verdict = grade(PATCH.encode(), {"calc.py": FILES["calc.py"]})
    assert verdict.status == "error"
    assert "calc:1 has no /r2e_tests and run_tests.sh" in verdict.detail


def test_without_what_was_before_every_test_counts_as_one_to_fix(grade: Graded) -> None:
    verdict = grade(PATCH.encode())
    assert set(verdict.fail_to_pass) == {"test_two"}
    one = made("calc:1").model_copy(update={"before": {}})
    found = r2e_gym._tables(EXPECTED, one.expected, one.before)
    assert found == ({"test_two": "passed", "test_callable": "passed"}, {})


def test_what_the_agent_gets_to_see(any_kind: SandboxOpener, tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", FILES)
    with any_kind(SandboxSpec()) as box:
        box.put_tree(tree)
        place_tree(R2eTask(made("calc:1"), any_kind), box)
        assert box.run("find . -name .git -prune -o -type f -print").text.split() == ["./calc.py"]
        box.run("sed -i 's/ + 1//' calc.py; touch run_tests.sh")
        assert set(box.diff().files) == {"calc.py", "run_tests.sh"}


def test_the_task_shows_no_answers_when_printed() -> None:
    task = R2eTask(made("calc:1"), open_sandbox)
    assert isinstance(task, Task)
    assert "test_two" not in repr(task)
    assert "return" not in repr(task)
    shown = repr(task.instance)
    assert "test_two" not in shown
    assert "double is wrong" in shown


# an image with the real layout

SETUP = r"""
set -e
cd /testbed; git init -q -b main .
export GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e@x GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e@x
git add calc.py; git commit -qm base
mkdir -p .venv/bin; ln -s "$(command -v python3)" .venv/bin/python
"""
DOCKERFILE = """FROM {base}
COPY files /testbed/
COPY setup /setup
RUN sh /setup && rm /setup && mv /testbed/r2e_tests /r2e_tests
WORKDIR /testbed
"""


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    from environments.engine import connect
    from environments.images import base_image

    name = f"nexus-agent/test-r2e-gym:{os.getpid()}"
    client = connect()
    try:
        sink = io.BytesIO()
        text = DOCKERFILE.replace("{base}", base_image(client).name)
        contents = {f"files/{path}": content for path, content in FILES.items()}
        with tarfile.open(fileobj=sink, mode="w") as archive:
            for path, content in {**contents, "Dockerfile": text, "setup": SETUP}.items():
                item = tarfile.TarInfo(path)
                item.size, item.mode = len(content.encode()), 0o755
                archive.addfile(item, io.BytesIO(content.encode()))
        sink.seek(0)
        client.images.build(
            fileobj=sink, custom_context=True, tag=name, rm=True, forcerm=True, network_mode="none"
        )
        yield name
        client.images.remove(name, force=True)
    finally:
        client.close()


@pytest.mark.docker
def test_in_an_image(image: str, docker: SandboxOpener) -> None:
    task = R2eTask(made(image), docker)
    with docker(task.spec()) as box:
        assert box.workdir == "/testbed"
        place_tree(task, box)
        assert box.run("ls -d / /r2e_tests run_tests.sh").text.count("cannot access") == 2
        assert box.run("grep -rl test_callable / --include=*.py 2>/dev/null").text == ""
        box.run("sed -i 's/ + 1//' calc.py")
        patch = box.diff()
    assert patch.files == ("calc.py",)
    right = task.grade(patch.data)
    assert right.status == "resolved", right.detail
    assert task.grade(WRONG).status == "unresolved"


def test_an_image_whose_tests_cannot_be_taken_out() -> None:
    class Refusing:
        workdir = "/testbed"

        def run(self, command: Any, **_: Any) -> Any:
            from environments.base import ExecResult

            return ExecResult(1, b"rm: cannot remove '/r2e_tests': Permission denied")

    with pytest.raises(TaskError, match=r"cannot take the hidden tests out of calc:1: .*denied"):
        R2eTask(made("calc:1"), open_sandbox).prepare(Refusing())  # type: ignore[arg-type]
