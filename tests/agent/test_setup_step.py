"""--setup: once, kept by content, there for the agent and in no patch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from agent.resume import ResumedRepoTask
from agent.run_state import StateFolder
from agent.setup_step import set_up
from environments import Sandbox, open_sandbox
from environments.bubblewrap import why_unusable
from environments.engine import connect
from environments.workspace import DISK_HOME
from tasks.image import ImageTask, place_tree
from tasks.instance import TaskError
from tasks.repo import RepoTask
from tests.tasks.test_repo import commit, write

MAKE = (
    "cat in.txt > made.txt && mkdir -p lib && cp in.txt lib/x && echo at home > ~/kept && date +%N"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write(tmp_path / "project", {"in.txt": "1\n", "pkg/a.c": "int a;\n"})


class Steps:
    """Set-up of fresh tasks on one folder, and what was said."""

    def __init__(self, folder: Path, kind: str, log: Path) -> None:
        self.folder, self.kind, self.log = folder, kind, log
        self.said: list[str] = []

    def __call__(self, command: str) -> RepoTask:
        task = RepoTask(self.folder, "wrong", set_up=True)
        self.made = set_up(task, command, self.kind, log=self.log, say=self.said.append)
        return task


@pytest.fixture
def steps(project: Path, sandbox_kind: str, tmp_path: Path) -> Steps:
    if sandbox_kind not in ("docker", "bubblewrap"):
        pytest.skip("no tree is kept of a sandbox without Python")
    return Steps(project, sandbox_kind, tmp_path / "run" / "setup.log")


@pytest.fixture
def one(project: Path, tmp_path: Path) -> Steps:
    """In the cheaper kind of sandbox only."""
    kind = "bubblewrap" if why_unusable() is None else "docker"
    return Steps(project, kind, tmp_path / "run" / "setup.log")


def opened(task: RepoTask | ImageTask, kind: str, do: Callable[[Sandbox], None]) -> None:
    with open_sandbox(task.spec(), kind) as box:
        place_tree(task, box)
        do(box)


def test_what_it_made_is_there_and_in_no_patch(steps: Steps) -> None:
    with steps(MAKE) as task:
        assert not steps.made.cached
        assert steps.log.read_text().strip().isdigit()

        def look(box: Sandbox) -> None:
            assert box.run("cat made.txt lib/x ~/kept").text == "1\n1\nat home\n"
            box.run("echo 2 > made.txt; echo 2 > lib/y; rm lib/x; echo 2 > in.txt; echo n > new")
            assert box.diff().files == ("in.txt", "new")

        opened(task, steps.kind, look)


def test_it_runs_again_only_where_something_is_other(one: Steps, project: Path) -> None:
    one(MAKE).close()
    first = one.log.read_text()
    (project / "in.txt").touch()
    with one(MAKE) as task:
        assert one.made.cached
        assert one.log.read_text() == first
        opened(task, one.kind, lambda box: None)
        assert "was run on this before" in one.said[-1]
    with one(f"{MAKE} "):
        assert not one.made.cached
    write(project, {"in.txt": "other\n"})
    with one(MAKE) as task:
        assert not one.made.cached
        with open_sandbox(task.spec(), one.kind) as box:
            place_tree(task, box)
            assert box.run("cat made.txt").text == "other\n"


def test_a_command_that_fails_is_shown_by_its_last_lines(one: Steps) -> None:
    with pytest.raises(TaskError) as caught:
        one("for i in $(seq 50); do echo line $i; done; echo to stderr >&2; exit 3")
    text = str(caught.value)
    assert "ended with exit code 3" in text
    assert "  line 50\n  to stderr\n" in text
    assert "line 30\n" not in text
    assert f"All it wrote is in {one.log}" in text
    assert one.log.read_text().startswith("line 1\nline 2\n")
    with pytest.raises(TaskError, match=r"is not in the \w+ sandbox: give --image"):
        one("no-such-program --x")
    with pytest.raises(TaskError, match="ended with exit code"):  # a failure is not kept
        one("no-such-program --x")


def test_programs_it_installs_in_the_tree_come_first_on_path(one: Steps) -> None:
    tool = (
        "mkdir -p .venv/bin node_modules/.bin; printf '#!/bin/sh\\necho mine\\n' > .venv/bin/tool"
    )
    with one(f"{tool}; chmod +x .venv/bin/tool") as task:
        opened(task, one.kind, lambda box: None)
        assert task.spec().python_path is not None
        assert str(task.spec().python_path).startswith("/workspace/.venv/bin:")
        with open_sandbox(task.spec(), one.kind) as box:
            place_tree(task, box)
            assert box.run("tool").text == "mine\n"


def test_the_agents_own_sandbox_has_no_network(steps: Steps) -> None:
    reach = "cat /proc/net/dev | grep -vc -E 'lo:|Inter|face'"
    with steps(f"{reach}; true") as task:
        if re.match("[1-9]", steps.log.read_text()) is None:
            pytest.skip("this machine has no network to give")
        with open_sandbox(task.spec(), steps.kind) as box:
            assert box.run(reach).text == "0\n"


def test_a_repository_is_set_up_from_its_working_tree(one: Steps, project: Path) -> None:
    write(project, {".gitignore": "made.txt\n"})
    commit(project)
    write(project, {"in.txt": "not committed\n", "made.txt": "ignored, so not copied\n"})
    with one("cat made.txt 2>/dev/null; cp in.txt made.txt") as task:
        with open_sandbox(task.spec(), one.kind) as box:
            place_tree(task, box)
            assert box.run("cat made.txt").text == "not committed\n"
            assert not box.diff()
    assert one.log.read_text() == ""


@pytest.mark.docker
def test_of_an_image_the_whole_container_is_kept(project: Path, tmp_path: Path) -> None:
    from tests.environments.plain_image import plain_image

    image, log = plain_image(), tmp_path / "setup.log"
    # the engine's images are everybody's: these are of this process
    command = f": {os.getpid()}; echo 1 > /opt/installed && cp in.txt made.txt"
    names = set()
    try:
        for cached in (False, True):
            with RepoTask(project, "wrong", image=image, set_up=True) as task:
                made = set_up(task, command, "docker", log=log)
                names.add(made.kept)
                assert made.cached is cached
                with open_sandbox(task.spec(), "docker") as box:
                    place_tree(task, box)
                    assert box.run("cat /opt/installed made.txt pkg/a.c").text == "1\n1\nint a;\n"
                    box.run("echo 2 > made.txt; echo 2 > in.txt")
                    assert box.diff().files == ("in.txt",)
                    assert box.run("grep -vc -E 'lo:|Inter|face' /proc/net/dev").text == "0\n"
        alone = ImageTask(image, "wrong")
        command = f": {os.getpid()}; mkdir -p /workspace; echo 1 > /workspace/own"
        made = set_up(alone, command, "docker", log=log)
        names.add(made.kept)
        with open_sandbox(alone.spec(), "docker") as box:
            place_tree(alone, box)
            assert box.run("cat own").text == "1\n"
    finally:
        client = connect()
        for name in names:
            client.images.remove(name, force=True)
        client.close()


def test_a_run_that_goes_on_begins_with_it_too(one: Steps, project: Path, tmp_path: Path) -> None:
    states = StateFolder(tmp_path / "a-run")
    states.folder.mkdir(parents=True)
    with one(MAKE) as task:
        spec = task.spec().model_dump(mode="json")
        kept = {"instance": asdict(task.instance), "spec": spec, "made": list(task.made())}
        tree = task.archive()
        assert tree is not None
        states.keep_archives(tree, task.extras().get(DISK_HOME), kept)
        write(project, {"in.txt": "another tree by now\n"})
        found = states.task()
        assert found is not None
        resumed = ResumedRepoTask(task, found, states)
        with open_sandbox(resumed.spec(), one.kind) as box:
            place_tree(resumed, box)
            assert box.run("cat in.txt made.txt ~/kept").text == "1\n1\nat home\n"
            box.run("echo 2 > made.txt; echo 2 > in.txt")
            assert box.diff().files == ("in.txt",)
        resumed.close()
