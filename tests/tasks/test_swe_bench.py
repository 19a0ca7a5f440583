"""Rows of SWE-bench as tasks, and an image in the official layout that is made here."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_swe_bench_eval import NEW_TEST, OLD_TEST, RIGHT, WRONG, T, diff, in_git, never

from environments.engine import connect
from tasks import local_images, sources
from tasks.instance import SandboxOpener, Task, TaskError
from tasks.local_images import LocalRecipe, build
from tasks.sources import Sdist
from tasks.swe_bench import SweBenchTask
from tasks.swe_bench_rows import SweRow
from tasks.swe_bench_script import END, START

TEST_PATCH = "diff --git a/tests/test_x.py b/tests/test_x.py\n--- a/tests/test_x.py\n"
CLASSIC: dict[str, Any] = {
    "instance_id": "pallets__flask-1",
    "repo": "pallets/flask",
    "version": "2.0",
    "base_commit": "abc123",
    "problem_statement": "It is broken.\n\nAll of it.",
    "hints_text": "look at the secret hint",
    "patch": "the secret fix",
    "test_patch": TEST_PATCH + "+++ b/tests/test_x.py\n@@ -1 +1 @@\n-a\n+secret test\n",
    "FAIL_TO_PASS": '["tests/test_x.py::test_secret"]',
    "PASS_TO_PASS": "[]",
}


def task(**changes: object) -> SweBenchTask:
    return SweBenchTask(SweRow.model_validate({**CLASSIC, **changes}), never)


def test_a_classic_row_is_completed_from_what_is_known() -> None:
    made = task()
    assert isinstance(made, Task)
    assert made.tree() is None
    assert made.spec().image == "swebench/sweb.eval.x86_64.pallets_1776_flask-1:latest"
    assert not made.spec().limits.network
    script = made.evaluation.script
    assert "git checkout abc123 tests/test_x.py" in script
    assert "pytest -rA tests/test_x.py" in script
    assert made.evaluation.test_files == ("tests/test_x.py",)
    assert made.evaluation.fail_to_pass == ("tests/test_x.py::test_secret",)


def test_the_agent_sees_the_issue_and_nothing_of_the_answer() -> None:
    instance = task().instance
    assert instance.problem == CLASSIC["problem_statement"]
    assert instance.test_command == "python -m pytest -q"
    assert "secret" not in repr(instance)
    assert "test_x" not in repr(instance)
    assert "secret" not in repr(task().spec())
    django = task(repo="django/django", version="4.2").instance
    assert django.test_command is not None
    assert django.test_command.startswith("./tests/runtests.py")


def test_a_row_of_version_5_brings_its_own() -> None:
    script = f"echo '{START}'\n./check\necho '{END}'\n"
    own = {"image": "me/own:1", "eval_script": script, "log_parser": "parse_log_sympy"}
    made = task(repo="me/mine", version="", **own)
    assert made.spec().image == "me/own:1"
    assert made.evaluation.script == script
    assert list(made.evaluation.parser("test_a ok")) == [("test_a", "PASSED")]
    assert made.instance.test_command is None


def test_only_repositories_that_need_a_network_are_graded_with_one() -> None:
    asked: list[bool] = []

    def opener(spec: Any) -> Any:
        asked.append(spec.limits.network)
        return never(spec)

    for repo, options in (
        ("pallets/flask", {}),
        ("psf/requests", {}),
        ("psf/requests", {"network": False}),
    ):
        row = SweRow.model_validate({**CLASSIC, "repo": repo})
        assert SweBenchTask(row, opener, **options).grade(b"x").status == "error"  # type: ignore[arg-type]
    assert asked == [False, True, False]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"repo": "me/mine"}, "how me/mine 2.0 is tested"),
        ({"log_parser": "parse_log_jest"}, "'parse_log_jest' is not among"),
        ({"eval_script": "pytest"}, "does not print"),
        ({"eval_type": "fail_only"}, "use the official harness"),
        ({"test_patch": ""}, "names no file"),
    ],
)
def test_rows_that_cannot_be_graded_are_refused_before_any_work(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(TaskError, match=f"pallets__flask-1 cannot be graded: .*{said}"):
        task(**changes)


# --- images made here


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], dict[str, Any]]]:
    """A project made up here, its image, and the row that names it."""
    folder = tmp_path_factory.mktemp("made")
    setup = "from setuptools import setup\nsetup(name='mod', version='1', py_modules=['mod'])\n"
    files = {"mod.py": WRONG, "setup.py": setup, "tests/test_mod.py": OLD_TEST}
    repo = in_git(folder / "tree", {**files, "mod.egg-info/PKG-INFO": "x", "PKG-INFO": "x"})
    row = {
        **CLASSIC,
        "patch": diff(repo, {"mod.py": RIGHT}),
        "test_patch": diff(repo, {"tests/test_mod.py": NEW_TEST}),
        "FAIL_TO_PASS": [f"{T}two"],
        "PASS_TO_PASS": [f"{T}kept"],
    }
    (folder / "tree" / ".git").rename(folder / "git")
    # the image's name comes from the sum, and is to be this process's own
    sdist = Sdist(project="mod", file="mod-1.tar.gz", sha256=f"{os.getpid():064x}")
    images: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "tree", lambda sdist: folder / "tree")
        recipe = LocalRecipe(sdist, local_images._TOOLS)
        patch.setattr(local_images, "RECIPES", {"pallets__flask-1": recipe})

        def run(**changes: object) -> dict[str, Any]:
            rows = [SweRow.model_validate({**row, **changes})]
            [record] = build(rows, folder / "rows.jsonl")
            assert [json.loads(line) for line in (folder / "rows.jsonl").open()] == [record]
            images.add(record["image"])
            return record

        yield run
        with contextlib.closing(connect()) as client:
            for image in images:
                client.images.remove(image, force=True)


@pytest.mark.docker
def test_an_image_made_here_is_graded_as_an_official_one(
    made: Callable[..., dict[str, Any]], docker: SandboxOpener, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match="its patch does not apply to the release"):
        made(patch="--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(TaskError, match="images can be built for: pallets__flask-1"):
        build([SweRow.model_validate({**CLASSIC, "instance_id": "other"})], tmp_path / "out")
    record = made()
    row = SweRow.model_validate(record)
    assert (row.log_parser, row.eval_type) == ("parse_log_pytest", "pass_and_fail")
    assert record["made_of"] == "mod-1.tar.gz"
    task = SweBenchTask(row, docker)
    with docker(task.spec()) as box:
        assert (box.workdir, box.kind) == ("/testbed", "docker")
        assert box.run("git status --porcelain; git log --oneline | wc -l").text == "1\n"
        assert box.run("git rev-parse HEAD").text.strip() == row.base_commit
        assert box.run("git ls-files").text.split() == ["mod.py", "setup.py", "tests/test_mod.py"]
        where = "python -c 'import mod, sys; print(mod.__file__, sys.prefix)'"
        env = "/opt/miniconda3/envs/testbed"
        assert box.run(where, cwd="/").text.split() == ["/testbed/mod.py", env]
        plain = "export PATH=/usr/bin:/bin; source /opt/miniconda3/bin/activate; conda activate"
        assert box.run(f"{plain} testbed; command -v python").text == f"{env}/bin/python\n"
    resolved = task.grade(row.patch.encode())
    assert resolved.resolved, resolved
    assert "confirm" not in resolved.detail
    unrelated = "--- /dev/null\n+++ b/other.py\n@@ -0,0 +1 @@\n+x = 1\n"
    assert task.grade(unrelated.encode()).fail_to_pass == {f"{T}two": "failed"}
    # once more from what lies there: nothing is built, the row is the same
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_images, "_build", None)
        assert made() == record
