"""Images that hold a project: where it lies, whose `python` runs, and what its history tells."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from environments import SandboxError, SandboxSpec, open_sandbox
from tests.environments.project_images import project_image

pytestmark = pytest.mark.docker
CONDA = "/opt/miniconda3/envs/testbed"


@pytest.fixture(scope="module")
def swe_bench():
    with project_image("nexus-agent/test-swe-bench:1") as name:
        yield name


@pytest.fixture(scope="module")
def box(swe_bench):
    with open_sandbox(SandboxSpec(image=swe_bench)) as opened:
        opened.mark_base()
        yield opened


def test_the_workspace_is_the_images_project(box):
    assert box.workdir == "/testbed"
    assert box.run("pwd; ls").text == "/testbed\ncalc.py\nrequirements.lock\ntests\n"
    assert box.way == "resident"  # its entry point, `false`, had no say


def test_python_is_the_projects_own_in_every_kind_of_command(box):
    show = "import os, sys; print(os.environ.get(sys.argv[1]))"
    line = f"python -c '{show}' PROJECT_ENVIRONMENT"
    for command in (
        ["python", "-c", show, "PROJECT_ENVIRONMENT"],
        line,
        ["bash", "-c", line],
        f"env {line}",
    ):
        assert box.run(command).text == f"{CONDA}\n"
    assert box.run("echo $CONDA_PREFIX $CONDA_DEFAULT_ENV").text == f"{CONDA} testbed\n"
    code = "from calc import double; print(double(2))"
    assert box.run(["python", "-c", code]).text == "5\n"


def test_no_future_is_reachable(box):
    assert box.run("git log --all --format=%s").text == "SWE-bench\nbase\n"
    assert box.run("git tag; git remote; git reflog").text == ""
    objects = "git cat-file --batch-all-objects --batch"
    assert b"the fix" not in box.run(objects).output


def test_the_patch_is_against_the_state_at_start(box):
    box.run("sed -i 's/ + 1//' calc.py && git -c user.name=n -c user.email=e@x commit -qam mine")
    patch = box.diff()
    assert patch.files == ("calc.py",)
    assert b"-    return x + x + 1\n+    return x + x\n" in patch.data


def test_another_workspace_when_the_spec_says_so(swe_bench):
    with open_sandbox(SandboxSpec(image=swe_bench, workdir="/workspace")) as other:
        assert other.run("pwd; ls").text == "/workspace\n"


def test_a_python_that_is_not_the_projects_own_is_refused(swe_bench):
    spec = SandboxSpec(image=swe_bench, env={"PATH": "/usr/bin:/bin"})
    with pytest.raises(SandboxError, match=r"/usr/bin/python, not the project's own /opt/mini"):
        open_sandbox(spec)


def test_an_environment_in_the_project_and_an_owner_who_is_not_root():
    name = "nexus-agent/test-r2e:1"
    with project_image(name, "/testbed/.venv", owner="1234:1234") as image:
        with open_sandbox(SandboxSpec(image=image)) as box:
            assert box.run("id -u; id -g").text == "1234\n1234\n"
            assert box.run("command -v python; echo $VIRTUAL_ENV").text == (
                "/testbed/.venv/bin/python\n/testbed/.venv\n"
            )
            box.mark_base()
            box.write_file("new.py", b"x = 1\n")
            assert box.diff().files == ("new.py",)
            assert box.run("git status --porcelain new.py").text == "?? new.py\n"


BROKEN = "#!/bin/sh\necho no such library >&2\nexit 1\n"


def test_the_command_that_checks_images(swe_bench):
    from agent.cli import app

    done = CliRunner().invoke(app, ["images", "check", swe_bench, "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert row["ok"]
    assert (row["python"], row["project"]) == (f"{CONDA}/bin/python", CONDA)
    assert (row["workdir"], row["way"], row["missing"]) == ("/testbed", "resident", [])
    with project_image("nexus-agent/test-broken:1", wrapper=BROKEN) as broken:
        done = CliRunner().invoke(app, ["images", "check", swe_bench, broken])
    assert done.exit_code == 1
    assert (
        f"{broken}: in image {broken} {CONDA}/bin/python does not run: no such lib" in done.stdout
    )
