"""The script that runs the tests of a classic SWE-bench row; rows of version 5 bring their own.

Two markers enclose what the tests print. The table says how each repository's tests are run and
how it is installed again after a patch, by version where that differs.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from tasks.instance import TaskError

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
EXIT_CODE = ">>>>> Test Exit Code"
TESTBED = "/testbed"
CONDA = ("source /opt/miniconda3/bin/activate", "conda activate testbed")

_PYTEST = "pytest -rA"
_DJANGO = "./tests/runtests.py --verbosity 2"
_DJANGO_SQLITE = f"{_DJANGO} --settings=test_sqlite --parallel 1"
_SYMPY = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose"
_ENGLISH = ("export LANG=en_US.UTF-8", "export LANGUAGE=en_US:en", "export LC_ALL=en_US.UTF-8")
_LOCALE = "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen"
_DATA = (  # ends of files that no runner takes
    *(".json", ".png", "csv", ".txt", ".md", ".jpg"),
    *(".jpeg", ".pkl", ".yml", ".yaml", ".toml"),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a repository is tested."""

    test: str = _PYTEST  # the test files are appended
    install: str = "python -m pip install -e ."
    before: tuple[str, ...] = ()  # lines for the shell's settings
    network: bool = False  # whether tests or installation need one


_SETUP = "python setup.py install"
# (repository, pattern of the whole version, recipe); the first that fits counts
_TABLE: tuple[tuple[str, str, Recipe], ...] = (
    (
        "astropy/astropy",
        r"[01]\..*",
        Recipe(
            "pytest -rA -vv -o console_output_style=classic --tb=no",
            "python -m pip install -e .[test] --verbose",
            network=True,
        ),
    ),
    (
        "astropy/astropy",
        r".*",
        Recipe(install="python -m pip install -e .[test] --verbose", network=True),
    ),
    ("django/django", r"1\.[456]", Recipe(_DJANGO_SQLITE, _SETUP)),
    (
        "django/django",
        r"1\.9",
        Recipe(_DJANGO, _SETUP, (*_ENGLISH, "export PYTHONIOENCODING=utf8")),
    ),
    (
        "django/django",
        r"[12]\..*",
        Recipe(_DJANGO_SQLITE, _SETUP, (*_ENGLISH, "export PYTHONIOENCODING=utf8")),
    ),
    ("django/django", r"3\..*", Recipe(_DJANGO_SQLITE, before=(_LOCALE, *_ENGLISH))),
    ("django/django", r".*", Recipe(_DJANGO_SQLITE)),
    ("marshmallow-code/marshmallow", r".*", Recipe(install="python -m pip install -e '.[dev]'")),
    (
        "matplotlib/matplotlib",
        r"[12]\..*",
        Recipe(install="python setup.py build; python setup.py install", network=True),
    ),
    (
        "matplotlib/matplotlib",
        r"3\.[89]",
        Recipe(install='python -m pip install --no-build-isolation -e ".[dev]"', network=True),
    ),
    ("matplotlib/matplotlib", r".*", Recipe(network=True)),
    ("mwaskom/seaborn", r"0\.11", Recipe("pytest --no-header -rA")),
    (
        "mwaskom/seaborn",
        r".*",
        Recipe("pytest --no-header -rA", "python -m pip install -e .[dev]"),
    ),
    ("pallets/flask", r".*", Recipe()),
    ("psf/requests", r".*", Recipe(install="python -m pip install .", network=True)),
    ("pvlib/pvlib-python", r".*", Recipe(install="python -m pip install -e .[all]")),
    ("pydata/xarray", r".*", Recipe()),
    ("pydicom/pydicom", r".*", Recipe()),
    ("pylint-dev/astroid", r".*", Recipe()),
    ("pylint-dev/pylint", r".*", Recipe()),
    ("pytest-dev/pytest", r".*", Recipe()),
    ("pyvista/pyvista", r".*", Recipe()),
    (
        "scikit-learn/scikit-learn",
        r".*",
        Recipe(install="python -m pip install -v --no-use-pep517 --no-build-isolation -e ."),
    ),
    (
        "sphinx-doc/sphinx",
        r".*",
        Recipe("tox --current-env -epy39 -v --", "python -m pip install -e .[test]"),
    ),
    ("sqlfluff/sqlfluff", r".*", Recipe()),
    ("sympy/sympy", r".*", Recipe(_SYMPY)),
)


def recipe_of(repo: str, version: str) -> Recipe:
    """How a version of a repository is tested. TaskError if the table does not have it."""
    for name, pattern, recipe in _TABLE:
        if name == repo and re.fullmatch(pattern, version.removeprefix("v")):
            return recipe
    raise TaskError(
        f"it is not known how {repo} {version or '(no version)'} is tested; a row of another "
        "repository must bring its own eval_script, image and log_parser"
    )


@dataclass(frozen=True, slots=True)
class TestFiles:
    """Paths in a test patch."""

    __test__ = False  # not a test, whatever pytest thinks of its name

    old: tuple[str, ...]  # that the base has
    new: tuple[str, ...]  # that the patch adds
    after: tuple[str, ...]  # that are there after it

    @property
    def all(self) -> tuple[str, ...]:
        """Every path, once."""
        return tuple(dict.fromkeys((*self.old, *self.new, *self.after)))


def test_files(test_patch: str) -> TestFiles:
    """The paths that a test patch names, in its order."""
    old: list[str] = []
    new: list[str] = []
    after: list[str] = []
    for part in re.split(r"(?m)^(?=diff --git )", test_patch):
        names = re.match(r"diff --git a/(.*?) b/(.*)", part)
        if not names:
            continue
        head = part.split("\n@@", 1)[0]
        if "\nnew file mode" in head or "\n--- /dev/null" in head:
            new.append(names[2])
        else:
            old.append(names[1])
            if names[1] != names[2]:
                new.append(names[2])
        if "\ndeleted file mode" not in head and "\n+++ /dev/null" not in head:
            after.append(names[2])
    return TestFiles(tuple(old), tuple(new), tuple(after))


test_files.__test__ = False  # type: ignore[attr-defined]  # no test, whatever its name says


def directives(repo: str, files: Sequence[str]) -> list[str]:
    """What the test command takes for these files: themselves, or modules for Django's runner."""
    files = [path for path in files if not path.endswith(_DATA)]
    if repo != "django/django":
        return files
    modules = [path.removesuffix(".py").removeprefix("tests/") for path in files]
    return [path.replace("/", ".") for path in modules]


def eval_script(
    repo: str,
    version: str,
    base: str,
    test_patch: str,
    *,
    activate: Sequence[str] = CONDA,
    install: str | None = None,
) -> str:
    """The script for a row: activate, install, reset and patch the test files, test, reset.

    base: the commit that test files are reset to; activate: lines that put the environment on PATH;
    install: replaces the recipe's. Raises TaskError.
    """
    recipe = recipe_of(repo, version)
    files = test_files(test_patch)
    if not files.after:
        raise TaskError("its test_patch names no file that could be run")
    reset = []
    if files.old:
        reset.append(f"git checkout {shlex.join([base, *files.old])}")
    if files.new:
        reset.append(f"rm -f {shlex.join(files.new)}")
    text = test_patch if test_patch.endswith("\n") else test_patch + "\n"
    end = f"EOF_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        *activate,
        f"cd {TESTBED}",
        *recipe.before,
        f"git config --global --add safe.directory {TESTBED}",
        recipe.install if install is None else install,
        *reset,
        f"git apply -v - <<'{end}'\n{text}{end}",
        f": '{START}'",
        f"{recipe.test} {shlex.join(directives(repo, files.after))}",
        "TEST_EXIT_CODE=$?",
        f": '{END}'",
        f'echo "{EXIT_CODE}: $TEST_EXIT_CODE"',
        *reset,
    ]
    return "\n".join(line for line in lines if line) + "\n"


def pytest_command(script: str) -> str:
    """The one command between the markers, if it runs pytest; else an empty string."""
    lines = script.split("\n")
    first = next((n for n, line in enumerate(lines) if START in line), None)
    last = next((n for n, line in enumerate(lines) if END in line), None)
    if first is None or last is None:
        return ""
    text = "\n".join(lines[first + 1 : last]).replace("\\\n", " ")
    commands = [line for line in map(str.strip, text.split("\n")) if line and line[0] != "#"]
    commands = [line for line in commands if not re.fullmatch(r"\w+=\$\?", line)]
    if len(commands) != 1:
        return ""
    try:
        words = shlex.split(commands[0])
    except ValueError:
        return ""
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    if not words:
        return ""
    name = PurePosixPath(words[0]).name
    module = name.startswith("python") and words[1:3] == ["-m", "pytest"]
    return commands[0] if module or name in ("pytest", "py.test") else ""
