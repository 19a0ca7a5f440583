"""The scripts of classic rows, and which of them run pytest alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tasks.instance import TaskError
from tasks.swe_bench_script import (
    END,
    START,
    directives,
    eval_script,
    pytest_command,
    recipe_of,
    test_files,
)

PATCH = """\
diff --git a/tests/test_old.py b/tests/test_old.py
--- a/tests/test_old.py
+++ b/tests/test_old.py
@@ -1 +1 @@
-a
+--- /dev/null
diff --git a/tests/sub/test_new.py b/tests/sub/test_new.py
new file mode 100644
--- /dev/null
+++ b/tests/sub/test_new.py
@@ -0,0 +1 @@
+b
diff --git a/tests/gone.py b/tests/gone.py
deleted file mode 100644
--- a/tests/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-c
diff --git a/tests/was.py b/tests/is.py
similarity index 100%
rename from tests/was.py
rename to tests/is.py
diff --git a/tests/data.json b/tests/data.json
--- a/tests/data.json
+++ b/tests/data.json
@@ -1 +1 @@
-1
+2
"""


def test_what_a_test_patch_does_to_files() -> None:
    files = test_files(PATCH)
    old = ("tests/test_old.py", "tests/gone.py", "tests/was.py", "tests/data.json")
    assert files.old == old
    assert files.new == ("tests/sub/test_new.py", "tests/is.py")
    after = ("tests/test_old.py", "tests/sub/test_new.py", "tests/is.py", "tests/data.json")
    assert files.after == after
    assert set(files.all) == {*old, *files.new}


def test_what_runners_take() -> None:
    files = test_files(PATCH).after
    shown = ["tests/test_old.py", "tests/sub/test_new.py", "tests/is.py"]
    assert directives("pallets/flask", files) == shown
    assert directives("django/django", files) == ["test_old", "sub.test_new", "is"]


@pytest.mark.parametrize(
    ("repo", "version", "test", "install"),
    [
        ("pallets/flask", "2.3", "pytest -rA", "python -m pip install -e ."),
        ("mwaskom/seaborn", "0.12", "pytest --no-header -rA", "python -m pip install -e .[dev]"),
        ("mwaskom/seaborn", "0.11", "pytest --no-header -rA", "python -m pip install -e ."),
        ("sphinx-doc/sphinx", "7.1", "tox --current-env -epy39 -v --", "pip install -e .[test]"),
        ("sympy/sympy", "1.10", "bin/test -C --verbose", "python -m pip install -e ."),
        ("psf/requests", "2.4", "pytest -rA", "python -m pip install ."),
        ("astropy/astropy", "1.3", "-o console_output_style=classic --tb=no", "--verbose"),
        ("astropy/astropy", "v5.3", "pytest -rA", "--verbose"),
        ("django/django", "1.9", "./tests/runtests.py --verbosity 2", "setup.py install"),
        ("django/django", "1.11", "--settings=test_sqlite --parallel 1", "setup.py install"),
        ("django/django", "4.2", "--settings=test_sqlite --parallel 1", "pip install -e ."),
    ],
)
def test_recipes(repo: str, version: str, test: str, install: str) -> None:
    recipe = recipe_of(repo, version)
    assert recipe.test.endswith(test)
    assert recipe.install.endswith(install)


def test_django_has_an_english_locale_up_to_version_3() -> None:
    assert any("LC_ALL=en_US.UTF-8" in line for line in recipe_of("django/django", "3.2").before)
    assert not recipe_of("django/django", "4.0").before
    assert not recipe_of("django/django", "4.0").network
    assert recipe_of("psf/requests", "2.4").network


def test_unknown_repositories_are_told() -> None:
    with pytest.raises(TaskError, match="how me/mine 1 is tested; a row"):
        recipe_of("me/mine", "1")
    with pytest.raises(TaskError, match="names no file"):
        eval_script("pallets/flask", "2.0", "HEAD", "")


def test_a_script_resets_patches_tests_and_resets(tmp_path: Path) -> None:
    """It is run by bash, with programs that only say how they were called."""
    bin_dir, tree = tmp_path / "bin", tmp_path / "tree"
    for folder in (bin_dir, tree):
        folder.mkdir()
    for name in ("git", "pytest", "python", "rm"):
        text = f'#!/bin/sh\necho "{name} $*"\n' + ("cat\n" if name == "git" else "")
        (bin_dir / name).write_text(text + ("exit 3\n" if name == "pytest" else ""))
        (bin_dir / name).chmod(0o755)
    script = eval_script("pallets/flask", "2.0", "abc", PATCH, activate=()).replace(
        "cd /testbed", f"cd {tree}"
    )
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{bin_dir}:/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    reset = [
        "git checkout abc tests/test_old.py tests/gone.py tests/was.py tests/data.json",
        "rm -f tests/sub/test_new.py tests/is.py",
    ]
    assert done.stdout.splitlines() == [
        "git config --global --add safe.directory /testbed",
        "python -m pip install -e .",
        *reset,
        "git apply -v -",
        *PATCH.splitlines(),
        "pytest -rA tests/test_old.py tests/sub/test_new.py tests/is.py",
        ">>>>> Test Exit Code: 3",
        *reset,
    ]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("pytest -rA a.py", True),
        ("X=1 Y='2 3' python3.9 -m pytest -rA \\\n  a.py\nCODE=$?", True),
        ("# all tests\n/opt/env/bin/pytest a.py", True),
        ("pytest a.py\npytest b.py", False),
        ("env pytest a.py", False),
        ("tox -- a.py", False),
        ("python -m unittest", False),
        ("pytest 'a", False),
        ("", False),
    ],
)
def test_which_scripts_run_pytest_once(lines: str, found: bool) -> None:
    script = f"pytest --version\n: '{START}'\n{lines}\n: '{END}'\npytest --version\n"
    assert bool(pytest_command(script)) is found
    assert not pytest_command(lines)  # no markers
