"""What is said at the end: which commands ran on the last change, and what became of the patch."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent.checks import Check, Checks, checks_of
from agent.display import show_checks, show_left_out, show_taken
from agent.run_options import RunOptions, parse_options
from agent.settings import load_settings
from agent.take import Taken, take
from environments import Patch
from tasks.repo import RepoTask
from tests.tasks.test_repo import commit, real_diff, write

TESTS = "python -m pytest -q"


def step(number: int, name: str, said: str, *, changed: bool = False, **arguments: str) -> Any:
    call = {"name": name, "arguments": arguments}
    return {"kind": "step", "step": number, "call": call, "observation": said, "changed": changed}


def read(folder: Path, *steps: Any, tools: str = "compact", tests: str | None = TESTS) -> Checks:
    lines = [{"kind": "start"}, *steps, {"kind": "end"}]
    (folder / "trajectory.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return checks_of(folder, load_settings(tools, []), tests)


def test_only_what_ran_after_the_last_change_counts(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        step(1, "run", "(exit code 1)\nno", command="python before.py"),
        step(2, "define", "a.py changed", changed=True, path="a.py", text="x"),
        step(3, "run", "(exit code 0)\nno output", command="python between.py"),
        step(4, "edit", "a.py changed\nThe tests of the project pass.", changed=True),
        step(
            5, "run", "(exit code 2, stopped after 60 s, the time limit)\n", command="python  it.py"
        ),
        step(6, "view", "1|x", path="a.py"),
        step(7, "run", "(exit code 0)\nfine", command=TESTS),
    )
    assert found.changed_at == 4
    assert [(c.step, c.command, c.passed, c.tests) for c in found.ran] == [
        (4, TESTS, True, True),
        (5, "python  it.py", False, False),
        (7, TESTS, True, True),
    ]
    assert found.ran[1].outcome == "time limit; exit code 2"


def test_a_command_that_changed_the_tree_itself_checked_nothing(tmp_path: Path) -> None:
    found = read(tmp_path, step(1, "run", "(exit code 0)", changed=True, command="sed -i s/a/b/ a"))
    assert found == Checks(1, ())


def test_tests_that_fail_after_an_edit(tmp_path: Path) -> None:
    said = "a.py changed\nTests of the project fail:\nE  assert 1 == 2"
    found = read(tmp_path, step(1, "define", said, changed=True))
    assert found.ran == (Check(1, TESTS, False, "failed", tests=True),)
    assert read(tmp_path, step(1, "define", said, changed=True), tests=None).ran == ()


def test_other_tool_sets_say_codes_in_other_ways(tmp_path: Path) -> None:
    edit = step(1, "file_editor", "edited", changed=True, command="str_replace", path="a")
    for number, (said, code) in enumerate(
        [
            ("[STDOUT]\nx\n\n[STDERR]", True),
            ("The command failed: exit code 5.\n[STDOUT]", False),
            ("something else", None),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        ran = step(2, "execute_bash", said, command="make")
        assert [check.passed for check in read(folder, edit, ran, tools="r2e").ran] == [code]


def test_no_change_and_no_trajectory(tmp_path: Path) -> None:
    assert read(tmp_path, step(1, "run", "(exit code 0)", command="ls")) == Checks(None, ())
    assert checks_of(tmp_path / "none", load_settings("compact", []), None) == Checks(None, ())


def shown(*parts: Any) -> str:
    sink = io.StringIO()
    console = Console(file=sink, width=200)
    for show, *arguments in parts:
        show(console, *arguments)
    return sink.getvalue()


def test_what_the_user_sees_of_it() -> None:
    ran = (
        Check(4, TESTS, True, "passed", tests=True),
        Check(5, "python \x1b[2Jit.py\nmore", False, "exit code 2", tests=False),
    )
    text = shown((show_checks, Checks(4, ran)))
    assert text.splitlines() == [
        "run after the last change (step 4):",
        f"  passed        {TESTS}  (step 4, the tests)",
        "  exit code 2   python [2Jit.py more  (step 5)",
    ]
    failed = Checks(4, (*ran, Check(6, TESTS, False, "failed", tests=True)))
    assert shown((show_checks, failed)).splitlines()[-1].startswith("The project's tests fail")
    assert "Nothing was run after the last change" in shown((show_checks, Checks(2, ())))
    assert shown((show_checks, Checks(None, ()))) == ""
    patch = Patch(b"x", ("a",), skipped=("big",), submodules=("sub",), problem="odd\nmore")
    text = shown((show_left_out, patch))
    assert "above 50 MB): big" in text
    assert "(apply it there): sub" in text
    assert "may refuse this patch: odd" in text


# --- taking it


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write(tmp_path / "my project", {"a.py": "x = 1\n"})


def options(project: Path, **more: Any) -> RunOptions:
    return parse_options({"repo": str(project), "issue": "It is wrong\n\nmore", **more})


def taken(project: Path, folder: Path, patch: bytes, **more: Any) -> Taken:
    folder.mkdir(exist_ok=True)
    (folder / "patch.diff").write_bytes(patch)
    with RepoTask(project, "It is wrong\n\nmore") as task:
        return take(task, options(project, **more), Patch(patch, ("a.py",)), folder, "a-model")


def test_a_patch_is_left_and_the_commands_that_take_it_work(project: Path, tmp_path: Path) -> None:
    patch = real_diff(project, lambda work: write(work, {"a.py": "x = 2\n"}))
    found = taken(project, tmp_path / "run it", patch)
    assert (found.applied, found.commit, found.error) == (False, None, "")
    command = found.next[0].removeprefix("to take the patch: ").partition(" (")[0]
    subprocess.run(["sh", "-c", command], check=True)
    assert (project / "a.py").read_text() == "x = 2\n"
    assert "--branch NAME" in found.next[0]


def test_applied_and_undone(project: Path, tmp_path: Path) -> None:
    patch = real_diff(project, lambda work: write(work, {"a.py": "x = 2\n"}))
    found = taken(project, tmp_path / "run", patch, apply=True)
    assert found.applied
    assert (project / "a.py").read_text() == "x = 2\n"
    undo = found.next[0].removeprefix("to undo it: ")
    subprocess.run(["sh", "-c", undo], check=True)
    assert (project / "a.py").read_text() == "x = 1\n"


def test_a_branch_and_how_to_look_at_it(project: Path, tmp_path: Path) -> None:
    commit(project)
    patch = real_diff(project, lambda work: write(work, {"a.py": "x = 2\n"}))
    found = taken(project, tmp_path / "run", patch, branch="fix/it")
    assert found.commit is not None
    log = ["git", "-C", project, "log", "-1", "--format=%H %B", "fix/it"]
    told = subprocess.run(log, capture_output=True, text=True, check=True).stdout
    assert told.split()[0] == found.commit
    assert "It is wrong\n\nWritten by a-model (nexus-agent), run run." in told
    assert (project / "a.py").read_text() == "x = 1\n"
    text = shown((show_taken, found, project))
    assert f"commit {found.commit[:12]} on the new branch fix/it" in text
    assert "git -C" in found.next[0]
    assert found.data()["branch"] == "fix/it"


def test_a_patch_that_cannot_be_taken_is_not_lost(project: Path, tmp_path: Path) -> None:
    patch = real_diff(project, lambda work: write(work, {"a.py": "x = 2\n"}))
    write(project, {"a.py": "x = 'edited since'\n"})
    found = taken(project, tmp_path / "run", patch, apply=True)
    assert not found.applied
    assert "does not apply" in found.error
    assert found.next[0].startswith("to take the patch: cd ")
    assert "does not apply" in shown((show_taken, found, project))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"env": "x"}, "--env is an environment for the folder named by --repo"),
        ({"repo": ".", "issue": "i", "env": "x", "image": "y"}, "two environments"),
        ({"setup": "make"}, "--setup prepares --repo or --image"),
        ({"repo": ".", "issue": "i", "setup": " "}, "--setup is empty"),
        ({"branch": "b"}, "--branch is made in the folder named by --repo"),
        ({"repo": ".", "issue": "i", "branch": "b", "attempts": 2}, "leave --attempts at 1"),
    ],
)
def test_options_that_do_not_fit(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_options(values)
