"""From a user's tree through a sandbox and back: what was changed inside is what is applied."""

from __future__ import annotations

from pathlib import Path

import git
import pytest

from environments.base import SandboxSpec
from tasks import release_pair
from tasks.instance import SandboxOpener
from tasks.patches import PatchRefused
from tasks.repo import RepoTask

EDIT = r"""
set -e
printf 'a\r\nB\r\n' > crlf.txt
printf 'no newline' > "new folder with space.txt"
mkdir -p deep/er && printf '\0\1\377' > deep/er/b.bin
sed -i 's/x = 1/x = 2/' pkg/a.py
rm gone.txt
chmod +x tool.sh
ln -s pkg/a.py link
git init -q . && git config core.fsmonitor /bin/false
printf '* text eol=crlf\n' > .gitattributes
"""


def tree(folder: Path) -> dict[str, tuple[bool, bytes | str]]:
    return {
        str(path.relative_to(folder)): (
            (False, str(path.readlink()))
            if path.is_symlink()
            else (bool(path.stat().st_mode & 0o100), path.read_bytes())
        )
        for path in folder.rglob("*")
        if (path.is_file() or path.is_symlink()) and ".git" not in path.parts
    }


@pytest.mark.parametrize("repository", [True, False], ids=["repository", "plain folder"])
def test_a_repository_task_there_and_back(
    tmp_path: Path, each_kind: SandboxOpener, repository: bool
) -> None:
    mine = tmp_path / "my tree"
    (mine / "pkg").mkdir(parents=True)
    (mine / "pkg" / "a.py").write_text("x = 1\ny = 1\n")
    (mine / "crlf.txt").write_bytes(b"a\r\nb\r\n")
    (mine / "gone.txt").write_text("gone\n")
    (mine / "tool.sh").write_text("#!/bin/sh\n")
    if repository:
        git.Repo.init(mine)
    before = tree(mine)
    with RepoTask(mine, "change this and that", requirements=[]) as task:
        with each_kind(task.spec()) as box:
            box.put_tree(task.tree())
            box.mark_base()
            done = box.run(EDIT)
            assert done.exit_code == 0, done.text
            patch = box.diff().data
        assert tree(mine) == before
        task.apply(patch)
        after = tree(mine)
        assert after["crlf.txt"] == (False, b"a\r\nB\r\n")
        assert after["new folder with space.txt"] == (False, b"no newline")
        assert after["deep/er/b.bin"] == (False, b"\0\1\377")
        assert after["pkg/a.py"] == (False, b"x = 2\ny = 1\n")
        assert after["tool.sh"][0]
        assert after["link"] == (False, "pkg/a.py")
        assert "gone.txt" not in after
        with pytest.raises(PatchRefused, match="nothing was changed"):
            task.apply(patch)  # a second time
        assert tree(mine) == after
    if not repository:
        assert not (mine / ".git").exists()


def test_a_fix_made_in_the_agents_sandbox_is_graded(each_kind: SandboxOpener) -> None:
    task = release_pair.load("jsonpointer-3.1.1", open_sandbox=each_kind)
    spec: SandboxSpec = task.spec()
    with each_kind(spec) as box:
        box.put_tree(task.tree())
        box.mark_base()
        box.run(
            ["sed", "-i", "s/_RE_ARRAY_INDEX.match/_RE_ARRAY_INDEX.fullmatch/", "jsonpointer.py"]
        )
        box.run(f"{task.instance.test_command}; echo 'def test_mine(): ...' >> tests.py")
        patch = box.diff()
    assert set(patch.files) == {"jsonpointer.py", "tests.py"}
    verdict = task.grade(patch.data)
    assert verdict.status == "resolved", verdict.detail
    assert "replaced by the hidden tests: tests.py" in verdict.detail
