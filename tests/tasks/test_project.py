"""How a project's tests are run, told from its files; and which of the ways is there inside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.instance import SandboxOpener
from tasks.project import is_python, ways_to_test
from tasks.repo import RepoTask
from tests.tasks.test_repo import write


def commands(folder: Path) -> list[str]:
    return [item.command for item in ways_to_test(folder)]


def package(**scripts: str) -> str:
    return json.dumps({"scripts": scripts})


CASES: dict[str, tuple[dict[str, str | bytes], list[str]]] = {
    "python": ({"pkg/a.py": "", "tests/test_a.py": ""}, ["python -m pytest -q"]),
    "python without tests": ({"setup.py": "", "tests/data.txt": ""}, []),
    "a makefile": ({"a.c": "", "Makefile": "all:\n\nTEST = 1\ntest: all\n\t./t\n"}, ["make test"]),
    "check": ({"GNUmakefile": "check: x\n", "Makefile": "test:\n"}, ["make check"]),
    "a variable is no target": ({"Makefile": "test := a\ntests:\n"}, []),
    "go": ({"go.mod": "module x\n", "x_test.go": ""}, ["go test ./..."]),
    "rust": ({"Cargo.toml": "[package]\n"}, ["cargo test --offline --quiet"]),
    "npm init": ({"package.json": package(test='echo "Error: no test specified" && exit 1')}, []),
    "a broken package.json": ({"package.json": "{"}, []),
    "scripts is a list": ({"package.json": '{"scripts": []}'}, []),
    "javascript with a folder of tests": (
        {"package.json": package(test="node test/a.js"), "test/a.js": "", "scripts/tool.py": ""},
        ["npm test --silent", "PATH=\"$PWD/node_modules/.bin:$PATH\" sh -c 'node test/a.js'"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ways_to_run_tests(tmp_path: Path, name: str) -> None:
    files, expected = CASES[name]
    assert commands(write(tmp_path / "p", files)) == expected


def test_a_lock_file_names_the_package_manager(tmp_path: Path) -> None:
    folder = write(tmp_path, {"package.json": package(test="jest"), "yarn.lock": ""})
    assert commands(folder)[:2] == ["yarn test", "npm test --silent"]


def test_several_languages_have_several_ways(tmp_path: Path) -> None:
    folder = write(tmp_path, {"test_a.py": "", "Makefile": "test:\n", "Cargo.toml": ""})
    assert commands(folder) == [
        "python -m pytest -q",
        "cargo test --offline --quiet",
        "make test",
    ]


def test_a_project_of_another_language_gets_no_packages(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.c": "", "test/t.c": "", "Makefile": "test:\n\t./t\n"})
    assert not is_python(folder)
    with RepoTask(folder, "wrong") as task:
        assert task.requirements == ()
        assert task.spec().mounts == {}
        assert "PYTHONPATH" not in task.instance.env
        assert not task.instance.python
        assert task.instance.test_command == "make test"


def test_the_way_that_is_there_inside_is_taken(tmp_path: Path, any_kind: SandboxOpener) -> None:
    files: dict[str, str | bytes] = {"go.mod": "", "Makefile": "test:\n\ttrue\n", "a.c": ""}
    with RepoTask(write(tmp_path / "a", files), "wrong") as task, any_kind(task.spec()) as box:
        task._guesses[0] = type(task._guesses[0])("go test ./...", "command -v no-such-go")
        task.prepare(box)
        assert task.instance.test_command == "make test"
        assert task.notes == []
    files = {"Cargo.toml": "", "a.rs": ""}
    with RepoTask(write(tmp_path / "b", files), "wrong") as task, any_kind(task.spec()) as box:
        task._guesses[0] = type(task._guesses[0])("cargo test", "command -v no-such-cargo")
        task.prepare(box)
        assert task.instance.test_command is None
        assert task.notes == ["no tests are run: nothing in the sandbox can do `cargo test`"]
    with (
        RepoTask(tmp_path / "b", "wrong", test_command="./t") as task,
        any_kind(task.spec()) as box,
    ):
        task.prepare(box)
        assert task.instance.test_command == "./t"
