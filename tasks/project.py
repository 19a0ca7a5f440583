"""What a project's files say about it: where its tests are, how they are run, what Python needs.

Read on the host, never run: a guess names a program that must be looked for inside the sandbox.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PYTEST = "python -m pytest -q"
TEST_RUNNER = "pytest<9"
_TEST_FOLDERS = ("tests", "test", "testing", "spec", "__tests__")
_PYTHON = ("pyproject.toml", "setup.py", "setup.cfg", "tox.ini", "Pipfile", "requirements.txt")
_NO_TEST = "no test specified"  # what `npm init` writes where there is no test
_TARGET = re.compile(r"^(test|check)[ \t]*::?(?!=)", re.MULTILINE)
_SCANNED = 200_000  # characters of a build file that are looked at


@dataclass(frozen=True, slots=True)
class WayToTest:
    """A way to run a project's tests, and what shows that its programs are there."""

    command: str
    probe: str  # a shell line that gives 0 inside a sandbox where the command can work


def is_python(folder: Path) -> bool:
    """Whether a project is one of Python's, by its files of set-up or its modules."""
    if any((folder / name).is_file() for name in _PYTHON):
        return True
    return any(True for depth in ("*.py", "*/*.py", "src/*/*.py") for _ in folder.glob(depth))


def find_tests(folder: Path) -> tuple[str, ...]:
    """Files and folders of a project that hold tests; empty if none are seen."""
    found = [name for name in _TEST_FOLDERS if (folder / name).is_dir()]
    found += sorted(
        path.name
        for path in folder.glob("*.py")
        if path.stem in ("test", "tests") or path.name.startswith("test_")
    )
    if not found:  # tests that lie beside the modules, or in a package
        inner = (
            path for depth in ("*", "*/*", "*/*/*") for path in folder.glob(f"{depth}/test_*.py")
        )
        found = sorted({str(path.parent.relative_to(folder)) for path in inner})
    return tuple(found)


def ways_to_test(folder: Path) -> list[WayToTest]:
    """Ways to run the project's tests, the likeliest first: none is known to work."""
    found = []
    if is_python(folder) and has_python_tests(folder):
        found.append(WayToTest(PYTEST, 'python -c "import pytest"'))
    found += _javascript(folder)
    if (folder / "Cargo.toml").is_file():
        found.append(WayToTest("cargo test --offline --quiet", "command -v cargo"))
    if (folder / "go.mod").is_file():
        found.append(WayToTest("go test ./...", "command -v go"))
    for name in ("GNUmakefile", "makefile", "Makefile"):
        if target := _TARGET.search(_text(folder / name)):
            found.append(WayToTest(f"make {target[1]}", "command -v make"))
            break
    return found


def has_python_tests(folder: Path) -> bool:
    """Whether any of the places of tests holds a Python file."""
    for name in find_tests(folder):
        path = folder / name
        if path.is_file() or any(True for _ in path.rglob("*.py")):
            return True
    return False


def _javascript(folder: Path) -> list[WayToTest]:
    try:
        script = json.loads(_text(folder / "package.json") or "{}")["scripts"]["test"]
    except (ValueError, KeyError, TypeError):
        return []
    if not isinstance(script, str) or not script.strip() or _NO_TEST in script:
        return []
    managers = {"pnpm-lock.yaml": "pnpm", "yarn.lock": "yarn"}
    named = [program for lock, program in managers.items() if (folder / lock).is_file()]
    found = [WayToTest(f"{program} test", f"command -v {program}") for program in named]
    found.append(WayToTest("npm test --silent", "command -v npm"))
    # Debian has node without npm: then the script as npm would start it
    inner = f'PATH="$PWD/node_modules/.bin:$PATH" sh -c {shlex.quote(script)}'
    found.append(WayToTest(inner, "command -v node"))
    return found


def _text(path: Path) -> str:
    """The text of a file; empty where there is none or it is no text."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(_SCANNED)
    except (OSError, ValueError):
        return ""


def guess_requirements(folder: Path, *, with_runner: bool) -> tuple[str, ...]:
    """What `pyproject.toml` says in plain words: `project.dependencies`, and the extra or group of
    dependencies named `test` or `tests`. With `with_runner` pytest is among them."""
    try:
        data: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    except (OSError, ValueError):  # there is none, or it is broken: perhaps that is the issue
        data = {}
    project = data.get("project", {})
    needs = list(_strings(project.get("dependencies")))
    for table in (project.get("optional-dependencies", {}), data.get("dependency-groups", {})):
        for name in ("test", "tests"):
            needs += _strings(table.get(name))
    own = str(project.get("name", folder.name)).lower()
    needs = [need for need in needs if not need.lower().replace("_", "-").startswith(f"{own}[")]
    if with_runner and not any(
        need.lower().startswith("pytest") and need[6:7] in "<>=~! [;" for need in needs
    ):
        needs.append(TEST_RUNNER)
    return tuple(dict.fromkeys(needs))


def _strings(value: Any) -> Iterable[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
