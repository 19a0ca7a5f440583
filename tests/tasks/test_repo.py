"""A user's own repository: what is copied, and what `apply` does and refuses."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import git
import pytest

from tasks.instance import Task
from tasks.patches import PatchRefused
from tasks.project import find_tests, guess_requirements
from tasks.repo import RepoTask, read_issue
from tasks.working_tree import RepoError

ODD = ["with space.py", "ümlaut.txt", 'quote".txt', "new\nline.txt", "-dash", "tab\there"]


def commit(folder: Path) -> git.Repo:
    repo = git.Repo.init(folder, initial_branch="main")
    with repo.config_writer() as config:
        config.set_value("user", "name", "A").set_value("user", "email", "a@b")
    repo.git.add("--all")
    repo.git.commit("-qm", "first")
    return repo


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def listing(folder: Path) -> dict[str, bytes | str]:
    """Every file (content and mode) and link below a folder."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = oct(path.stat().st_mode).encode() + path.read_bytes()
    return found


def without_git(found: dict[str, bytes | str]) -> dict[str, bytes | str]:
    return {k: v for k, v in found.items() if ".git" not in Path(k).parts}


def real_diff(before: Path, change: Callable[[Path], object]) -> bytes:
    """A patch as git itself makes it, in a repository of its own."""
    work = before.with_name(before.name + "-work")
    subprocess.run(["cp", "-a", str(before), str(work)], check=True)
    subprocess.run(["rm", "-rf", str(work / ".git")], check=True)
    repo = git.Repo.init(work)
    (work / ".git" / "info" / "attributes").write_text("* -text\n")
    repo.git.add("--all", "--force")
    repo.git.execute(
        ["git", "-c", "user.name=A", "-c", "user.email=a@b", "commit", "-qm", "x", "--allow-empty"]
    )
    change(work)
    repo.git.add("--all", "--force")
    return repo.git.diff(
        "--cached", "--binary", stdout_as_string=False, strip_newline_in_stdout=False
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write(
        tmp_path / "my project",
        {
            "pkg/a.py": "x = 1\ny = 2\n",
            "tests/test_a.py": "def test(): ...\n",
            ".gitignore": "*.log\n/build/\n",
        },
    )


def task(path: Path, **more: Any) -> RepoTask:
    return RepoTask(path, "something is wrong", **more)


# --- the copy


def test_the_copy_is_the_working_tree_as_it_is_now(project: Path) -> None:
    write(project, {"gone.py": "1", "staged.py": "1", **dict.fromkeys(ODD, "odd")})
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o755)
    (project / "link").symlink_to("pkg/a.py")
    (project / "dangling").symlink_to("nowhere")
    (project / "folderlink").symlink_to("pkg")
    repo = commit(project)
    (project / "gone.py").unlink()
    write(project, {"pkg/a.py": "x = 1\r\n", "staged.py": "2", "new.py": "n", "crlf.txt": "a\r\n"})
    repo.git.add("staged.py")
    write(project, {"noise.log": "no", "build/out": "no", "pkg/new dir/deep file": b"\x00\xff"})
    before = listing(project)
    with task(project) as made:
        copied = listing(made.tree())
        assert made.tree() == made.tree()
    expected = without_git(before)
    del expected["noise.log"], expected["build/out"]
    assert copied == expected
    assert {*ODD, "pkg/new dir/deep file", "dangling"} <= set(copied)
    assert listing(project) == before  # index and all


def test_a_name_that_is_not_utf8_is_copied(project: Path) -> None:
    raw = os.fsencode(project) + b"/latin-\xe9.txt"
    with open(raw, "wb") as out:  # noqa: PTH123 (bytes path)
        out.write(b"e")
    commit(project)
    with task(project) as made:
        assert (made.tree() / os.fsdecode(b"latin-\xe9.txt")).read_bytes() == b"e"


def test_a_folder_that_is_no_repository_is_copied_whole(project: Path) -> None:
    write(project, {"noise.log": "yes", "__pycache__/a.pyc": "no", ".venv/lib": "no"})
    with task(project) as made:
        assert set(listing(made.tree())) == {
            ".gitignore",
            "noise.log",
            "pkg/a.py",
            "tests/test_a.py",
        }


def test_a_fresh_repository_without_commits(project: Path) -> None:
    git.Repo.init(project)
    with task(project) as made:
        assert listing(made.tree()) == without_git(listing(project))


def test_a_worktree_and_a_subfolder(project: Path, tmp_path: Path) -> None:
    repo = commit(project)
    repo.git.worktree("add", "-b", "two", str(tmp_path / "tree two"))
    write(tmp_path / "tree two", {"pkg/a.py": "other\n"})
    with task(tmp_path / "tree two") as made:
        assert (made.tree() / "pkg/a.py").read_text() == "other\n"
        assert not (made.tree() / ".git").exists()
    with task(project / "pkg") as made:
        assert set(listing(made.tree())) == {"a.py"}


def test_an_ignored_folder_of_a_repository_is_not_taken_for_empty(project: Path) -> None:
    commit(project)
    write(project, {"build/own/a.py": "x"})
    with task(project / "build" / "own") as made:
        assert set(listing(made.tree())) == {"a.py"}


def test_submodules_and_nested_repositories(project: Path, tmp_path: Path) -> None:
    library = write(tmp_path / "library", {"lib.py": "l", ".gitignore": "*.log\n"})
    commit(library)
    repo = commit(project)
    repo.git.execute(
        ["git", "-c", "protocol.file.allow=always", "submodule", "add", str(library), "sub"]
    )
    commit(write(project / "nested", {"n.py": "n", ".gitignore": "*.tmp\n", "x.tmp": "no"}))
    write(project, {"sub/new.py": "s", "sub/noise.log": "no"})
    with task(project) as made:
        names = set(listing(made.tree()))
    assert {"sub/lib.py", "sub/new.py", "nested/n.py"} <= names
    assert not {"sub/noise.log", "nested/x.tmp", "sub/.git"} & names
    with task(project / "sub") as made:  # its .git is a file
        assert set(listing(made.tree())) == {".gitignore", "lib.py", "new.py"}


def test_the_repository_is_the_one_named_even_inside_a_hook(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write(tmp_path / "other", {"other.py": "o"})
    commit(other)
    commit(project)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    with task(project) as made:
        assert set(listing(made.tree())) == {".gitignore", "pkg/a.py", "tests/test_a.py"}


def test_a_copy_that_would_be_too_large_is_refused(project: Path) -> None:
    write(project, {"data.bin": b"0" * 3_000_000})
    with task(project, max_bytes=2**20) as made:
        with pytest.raises(RepoError, match=r"3 MiB in 4 files, more than the limit of 1 MiB"):
            made.tree()


def test_close_removes_the_temporary_copy_but_not_a_named_one(
    project: Path, tmp_path: Path
) -> None:
    with task(project) as made:
        copy = made.tree()
    assert not copy.exists()
    with task(project, copy_to=tmp_path / "kept" / "tree") as made:
        made.tree()
    assert (tmp_path / "kept" / "tree" / "pkg" / "a.py").exists()
    with task(project, copy_to=tmp_path / "kept" / "tree") as made:
        with pytest.raises(RepoError, match=r"must be new: .*File exists"):
            made.tree()


def test_user_errors(project: Path, tmp_path: Path) -> None:
    with pytest.raises(RepoError, match="not a folder"):
        task(tmp_path / "absent")
    with pytest.raises(RepoError, match="--issue is empty"):
        RepoTask(project, " \n")
    git.Repo.init(tmp_path / "bare.git", bare=True)
    with task(tmp_path / "bare.git") as made, pytest.raises(RepoError, match="bare repository"):
        made.tree()


# --- apply


def change(folder: Path) -> None:
    write(
        folder, {"pkg/a.py": "x = 1\ny = 3\n", "tests/test new.py": "n\n", "ü.bin": b"\0\r\n\xff"}
    )
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / ".gitignore").unlink()


@pytest.mark.parametrize("repository", [True, False])
def test_apply_gives_exactly_the_changed_tree(project: Path, repository: bool) -> None:
    write(project, {"crlf.txt": "a\r\nb\r\n", ".gitattributes": "* text=auto eol=crlf\n"})
    patch = real_diff(
        project, lambda work: (change(work), write(work, {"crlf.txt": "a\r\nc\r\n", "lf": "l\n"}))
    )
    if repository:
        repo = commit(project)
        index = (project / ".git" / "index").read_bytes()
    task(project).apply(patch)
    work = project.with_name(project.name + "-work")
    assert without_git(listing(project)) == without_git(listing(work))
    if repository:
        assert (project / ".git" / "index").read_bytes() == index
        assert repo.is_dirty()


def test_apply_to_a_dirty_tree_and_to_a_subfolder_of_a_repository(project: Path) -> None:
    commit(project)
    write(project, {"pkg/a.py": "# mine\n\n\n\n\nx = 1\ny = 2\n"})
    patch = real_diff(
        project / "pkg", lambda work: write(work, {"a.py": "# mine\n\n\n\n\nx = 1\ny = 3\n"})
    )
    task(project / "pkg").apply(patch)
    assert (project / "pkg" / "a.py").read_text() == "# mine\n\n\n\n\nx = 1\ny = 3\n"


def test_a_patch_without_its_last_newline_applies(project: Path) -> None:
    patch = real_diff(project, lambda work: write(work, {"pkg/a.py": "x = 1\ny = 3\n"}))
    task(project).apply(patch.rstrip(b"\n"))
    assert (project / "pkg" / "a.py").read_text() == "x = 1\ny = 3\n"


def test_an_empty_patch_changes_nothing(project: Path) -> None:
    before = listing(project)
    task(project).apply(b"\n")
    assert listing(project) == before


def test_the_users_git_settings_do_not_change_the_bytes(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitconfig").write_text("[apply]\nwhitespace = fix\n[core]\nautocrlf = true\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    patch = real_diff(project, lambda work: write(work, {"w.txt": "trailing  \t\n"}))
    task(project).apply(patch)
    assert (project / "w.txt").read_bytes() == b"trailing  \t\n"


def test_the_users_git_settings_do_not_loosen_the_check(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitconfig").write_text("[apply]\nignoreWhitespace = change\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    patch = real_diff(project, lambda work: write(work, {"pkg/a.py": "x = 1\ny = 3\n"}))
    write(project, {"pkg/a.py": "x  =  1\ny = 2\n"})
    refused(project, patch, "nothing was changed")


def refused(project: Path, patch: bytes, told: str) -> None:
    before = listing(project)
    modes = hashlib.sha256(repr(sorted(p.stat().st_mode for p in project.iterdir())).encode())
    with pytest.raises(PatchRefused, match=told):
        task(project).apply(patch)
    after = hashlib.sha256(repr(sorted(p.stat().st_mode for p in project.iterdir())).encode())
    assert listing(project) == before
    assert modes.digest() == after.digest()


def test_a_conflict_leaves_everything_as_it_was(project: Path) -> None:
    commit(project)
    patch = real_diff(project, change)  # would change other files as well
    write(project, {"pkg/a.py": "x = 1\ny = 'edited since'\n"})
    refused(project, patch, r"pkg/a.py.*nothing was changed")


def test_a_new_file_does_not_overwrite_one_that_is_there(project: Path) -> None:
    patch = real_diff(project, lambda work: write(work, {"new.txt": "theirs\n"}))
    write(project, {"new.txt": "mine\n"})
    refused(project, patch, "new.txt: already exists")


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".git/hooks/pre-commit",
        "sub/.git/config",
        ".GIT/config",
        "git~1/config",
        "../outside.txt",
        "pkg/../../outside.txt",
        "/tmp/absolute-outside.txt",
    ],
)
def test_paths_in_git_folders_and_outside_are_refused(project: Path, path: str) -> None:
    commit(project)
    new = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+evil\n"
    refused(project, new.encode(), "invalid path|.git/config: already exists")
    renamed = f"diff --git a/pkg/a.py b/{path}\nsimilarity index 100%\nrename from pkg/a.py\n"
    refused(project, (renamed + f"rename to {path}\n").encode(), "nothing was changed")


def test_the_repositorys_settings_cannot_be_edited(project: Path) -> None:
    commit(project)
    lines = (project / ".git" / "config").read_text().splitlines()
    edit = f"@@ -1,{len(lines)} +1,{len(lines) + 1} @@\n" + "".join(f" {line}\n" for line in lines)
    patch = f"--- a/.git/config\n+++ b/.git/config\n{edit}+\tfsmonitor = evil\n"
    refused(project, patch.encode(), "invalid path")


def test_one_bad_path_refuses_the_whole_patch(project: Path) -> None:
    commit(project)
    good = real_diff(project, change)
    refused(project, good + b"--- /dev/null\n+++ b/.git/x\n@@ -0,0 +1 @@\n+evil\n", "invalid path")


def test_links_do_not_lead_outside(project: Path, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"file": "safe\n"})
    (project / "out").symlink_to(outside)
    (project / "direct").symlink_to(outside / "file")
    commit(project)
    new = b"--- /dev/null\n+++ b/out/new\n@@ -0,0 +1 @@\n+evil\n"
    refused(project, new, "beyond a symbolic link")
    refused(project, b"--- a/direct\n+++ b/direct\n@@ -1 +1 @@\n-safe\n+evil\n", "nothing was")
    both = (
        b"diff --git a/in b/in\nnew file mode 120000\n--- /dev/null\n+++ b/in\n@@ -0,0 +1 @@\n+"
        + os.fsencode(outside)
        + b"\n\\ No newline at end of file\n"
        + new.replace(b"out/", b"in/")
    )
    refused(project, both, "beyond a symbolic link")
    assert listing(outside) == {"file": listing(outside)["file"]}
    assert (outside / "file").read_text() == "safe\n"


def test_the_trees_own_git_programs_do_not_run(project: Path, tmp_path: Path) -> None:
    repo = commit(write(project, {".gitattributes": "*.py filter=evil diff=evil\n"}))
    mark = tmp_path / "ran"
    with repo.config_writer() as config:
        for key in ("clean", "smudge"):
            config.set_value('filter "evil"', key, f"sh -c 'touch {mark}; cat'")
        config.set_value("core", "fsmonitor", f"touch {mark}; false")
        config.set_value("core", "hooksPath", str(tmp_path / "hooks"))
    patch = real_diff(project, lambda work: write(work, {"pkg/a.py": "x = 1\ny = 3\n"}))
    with task(project) as made:
        made.tree()
        made.apply(patch)
    assert (project / "pkg" / "a.py").read_text() == "x = 1\ny = 3\n"
    assert not mark.exists()


# --- what is guessed


def test_it_is_a_task_without_a_verdict(project: Path) -> None:
    with task(project) as made:
        assert isinstance(made, Task)
        assert made.grade(b"x") is None
        assert made.instance.test_command == "python -m pytest -q"
        assert made.instance.test_paths == ("tests",)


def test_test_commands_are_guessed_or_taken(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", {"a.py": "x"})
    with task(plain) as made:
        assert made.instance.test_command is None
        assert made.requirements == ()
        assert made.spec().mounts == {}
    with task(plain, test_command="make check") as made:
        assert made.instance.test_command == "make check"
    assert find_tests(write(tmp_path / "b", {"test_b.py": ""})) == ("test_b.py",)
    assert find_tests(write(tmp_path / "c", {"pkg/tests/test_c.py": ""})) == ("pkg/tests",)


def test_requirements_come_from_pyproject(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "p",
        {
            "pyproject.toml": '[project]\nname = "thing"\ndependencies = ["attrs>=20"]\n'
            '[project.optional-dependencies]\ntest = ["pytest-mock", "thing[extra]"]\n'
            'docs = ["sphinx"]\n[dependency-groups]\ntests = ["freezegun", {include-group = "x"}]\n'
        },
    )
    found = guess_requirements(folder, with_runner=True)
    assert found == ("attrs>=20", "pytest-mock", "freezegun", "pytest<9")
    assert guess_requirements(tmp_path, with_runner=False) == ()
    write(folder, {"pyproject.toml": '[project]\nname="x"\ndependencies=["pytest>=7"]'})
    assert guess_requirements(folder, with_runner=True) == ("pytest>=7",)
    write(folder, {"pyproject.toml": "[project\n"})
    assert guess_requirements(folder, with_runner=True) == ("pytest<9",)


def test_the_spec_takes_src_and_the_requirements(project: Path, tmp_path: Path) -> None:
    write(project, {"src/p/__init__.py": ""})
    packages = tmp_path / "packages"
    with task(project, requirements=["a", "b"], python_env=lambda needs: packages) as made:
        spec = made.spec()
    inside = spec.mounts[str(packages)]
    assert spec.env["PYTHONPATH"] == f"{spec.workdir}/src:{spec.workdir}:{inside}"


def test_issue_text_and_files(tmp_path: Path) -> None:
    file = tmp_path / "issue one.md"
    file.write_text("Title\n\nText é\n", encoding="utf-8")
    assert read_issue(str(file)) == "Title\n\nText é\n"
    for text in (
        "It crashes",
        "a/b is wrong",
        "x" * 9000,
        "x" * 300 + " y",
        "nul\0",
        "two\nlines",
        "crash",
        "~nobody-x fails",
    ):
        assert read_issue(text) == text
    for missing in ("no/such/file", "issue.md"):
        with pytest.raises(RepoError, match="no such file"):
            read_issue(missing)
    (tmp_path / "latin").write_bytes(b"\xe9\xff")
    with pytest.raises(RepoError, match="latin"):
        read_issue(str(tmp_path / "latin"))
