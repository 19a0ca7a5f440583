"""A patch as a commit on a new branch; nothing else of the repository changes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tasks.branch import BranchRefused, message_of, new_branch
from tests.tasks.test_repo import commit, listing, real_diff, write

FILES: dict[str, str | bytes] = {"pkg/a.py": "x = 1\ny = 2\n", "pkg/b.py": "b\n", "top.txt": "t\n"}


def git(folder: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = write(tmp_path / "my project", FILES)
    commit(folder)
    return folder


def change(folder: Path) -> None:
    write(folder, {"pkg/a.py": "x = 1\ny = 3\n", "pkg/new ü.py": "n\n"})
    (folder / "pkg/b.py").unlink()
    (folder / "top.txt").chmod(0o755)


def state(folder: Path) -> dict[str, bytes | str]:
    """All of the tree and of `.git` but for objects, and for the new branch and its log."""
    found = listing(folder)
    return {k: v for k, v in found.items() if "/objects/" not in k and "fix/it" not in k}


def test_one_commit_on_a_new_branch_and_all_else_as_it_was(project: Path) -> None:
    patch = real_diff(project, change)
    write(project, {"untracked.txt": "u", "pkg/staged.py": "s"})
    git(project, "add", "pkg/staged.py")
    before, head = state(project), git(project, "rev-parse", "HEAD")
    made = new_branch(project, "fix/it").commit(patch, message_of("# It fails\n\nmore", "Signed."))
    assert state(project) == before
    assert git(project, "symbolic-ref", "HEAD") == "refs/heads/main"
    assert git(project, "rev-parse", "fix/it", "fix/it^") == f"{made}\n{head}"
    assert git(project, "log", "-1", "--format=%an %ae|%B", "fix/it") == "A a@b|It fails\n\nSigned."
    names = git(project, "-c", "core.quotePath=off", "diff", "--name-status", head, "fix/it")
    expected = {"M\tpkg/a.py", "D\tpkg/b.py", "A\tpkg/new ü.py", "M\ttop.txt"}
    assert set(names.splitlines()) == expected
    assert git(project, "show", "fix/it:pkg/a.py") == "x = 1\ny = 3"


def test_no_hook_and_no_program_of_the_configuration_runs(project: Path, tmp_path: Path) -> None:
    patch = real_diff(project, change)
    mark = tmp_path / "ran"
    for hook in ("pre-commit", "commit-msg", "post-commit", "reference-transaction"):
        path = project / ".git" / "hooks" / hook
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\ntouch '{mark}'\n")
        path.chmod(0o755)
    git(project, "config", "core.fsmonitor", f"touch '{mark}'; false")
    git(project, "config", "commit.gpgSign", "true")
    git(project, "config", "gpg.program", "/nonexistent")
    new_branch(project, "fix/it").commit(patch, "m")
    assert not mark.exists()


def test_from_a_folder_of_a_repository_and_from_a_worktree(project: Path, tmp_path: Path) -> None:
    inner = real_diff(project / "pkg", lambda work: write(work, {"a.py": "x = 9\ny = 2\n"}))
    new_branch(project / "pkg", "sub").commit(inner, "m")
    assert git(project, "diff", "--name-only", "main", "sub") == "pkg/a.py"
    git(project, "worktree", "add", "-q", "-b", "two", str(tmp_path / "tree two"))
    tree = tmp_path / "tree two"
    patch = real_diff(project, change)
    new_branch(tree, "from-two").commit(patch, "m")
    assert "pkg/a.py" in git(project, "diff", "--name-only", "two", "from-two")


def test_somebody_without_a_name_gets_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("user.name", "user.email"):
        git(project, "config", "--unset", key)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    git(project, "config", "user.useConfigOnly", "true")
    new_branch(project, "fix/it").commit(real_diff(project, change), "m")
    assert git(project, "log", "-1", "--format=%an", "fix/it") == "nexus-agent"


def test_what_cannot_be_done_is_said_before_anything_is(project: Path, tmp_path: Path) -> None:
    git(project, "branch", "old")
    for name, told in {
        "old": "there is one; give another name",
        "a..b": "git takes no such name",
        "-x": "git takes no such name",
    }.items():
        with pytest.raises(BranchRefused, match=told):
            new_branch(project, name)
    with pytest.raises(BranchRefused, match=r"in no git repository; use --apply"):
        new_branch(write(tmp_path / "plain", {"a": "a"}), "x")
    git(tmp_path / "plain", "init", "-q")
    with pytest.raises(BranchRefused, match="no commit to start from"):
        new_branch(tmp_path / "plain", "x")


def refused(branch_of: Path, patch: bytes, told: str) -> None:
    branch, before = new_branch(branch_of, "fix/it"), state(branch_of)
    with pytest.raises(BranchRefused, match=told):
        branch.commit(patch, "m")
    assert state(branch_of) == before
    assert "fix/it" not in git(branch_of, "branch", "--list", "fix/it")


def test_a_patch_of_uncommitted_changes_does_not_fit_and_says_why(project: Path) -> None:
    write(project, {"pkg/a.py": "x = 1\ny = 'mine'\n"})
    patch = real_diff(project, lambda work: write(work, {"pkg/a.py": "x = 1\ny = 'theirs'\n"}))
    refused(project, patch, r"does not fit on HEAD .*uncommitted changes.*commit them")
    shutil.rmtree(project.with_name(project.name + "-work"))
    write(project, {"pkg/a.py": "x = 1\ny = 2\n", "new.py": "1\n"})
    patch = real_diff(project, lambda work: write(work, {"new.py": "2\n"}))
    refused(project, patch, r"new\.py: does not exist in index.*uncommitted changes")


def test_files_of_a_submodule_need_a_commit_of_their_own(project: Path, tmp_path: Path) -> None:
    library = write(tmp_path / "library", {"lib.py": "l\n"})
    commit(library)
    allowed = ["-c", "protocol.file.allow=always"]
    git(project, *allowed, "submodule", "--quiet", "add", str(library), "sub")
    git(project, "commit", "-qm", "with it")
    patch = (
        b"diff --git a/sub/lib.py b/sub/lib.py\n--- a/sub/lib.py\n+++ b/sub/lib.py\n"
        b"@@ -1 +1 @@\n-l\n+m\n"
    )
    refused(project, patch, "files of a submodule")


def test_long_titles_are_cut_between_words() -> None:
    text = message_of("word " * 40, "s")
    assert len(text.splitlines()[0]) <= 72
    assert text.splitlines()[0].endswith("word")
