"""Commits read from repositories that mean harm, or are odd in other ways."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import git
import pytest

from tasks import commits, sources
from tasks.instance import TaskError

Commit = Callable[[dict[str, str | bytes | None]], str]


@pytest.fixture
def repo(tmp_path: Path) -> git.Repo:
    made = git.Repo.init(tmp_path / "the repo", initial_branch="main")
    with made.config_writer() as config:
        config.set_value("user", "name", "A").set_value("user", "email", "a@b")
        config.set_value("commit", "gpgsign", "false").set_value("core", "autocrlf", "false")
    return made


@pytest.fixture
def commit(repo: git.Repo) -> Commit:
    """Write files (None deletes) and commit them as they are."""
    folder = Path(str(repo.working_tree_dir))

    def make(files: dict[str, str | bytes | None], message: str = "change") -> str:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        repo.git.add("--all", "--force")
        repo.git.commit("-qm", message, "--allow-empty")
        return repo.head.commit.hexsha

    return make


def members(packed: bytes) -> dict[str, tuple[int, bytes | str]]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        found: dict[str, tuple[int, bytes | str]] = {}
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            found[member.name] = (member.mode, content.read() if content else member.linkname)
    return found


def everything(folder: Path) -> dict[str, tuple[float, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def test_a_tree_is_the_bytes_of_the_commit(repo: git.Repo, commit: Commit, tmp_path: Path) -> None:
    folder = Path(str(repo.working_tree_dir))
    odd = {"with space/a.py": "x\n", "ümlaut": "y", "crlf.txt": b"a\r\nb\r\n", "bin": b"\0\1"}
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o755)
    (folder / "link").symlink_to("with space")
    (folder / "deep").mkdir()
    (folder / "deep" / "up").symlink_to("../tool")
    (folder / "away").symlink_to("/etc/passwd")
    (folder / "deep" / "out").symlink_to("../../x")
    name = commit(odd)  # type: ignore[arg-type]
    commit({"bin": "later", "more": "later"})
    with commits.opened(folder, "HEAD~1") as (history, names):
        assert names == [name]
        packed, left_out = history.archive(name, lambda path: True)
        again, _ = history.archive(name, lambda path: True)
        some, _ = history.archive(name, lambda path: path.startswith("deep/"))
    assert packed == again
    assert packed[4:8] == bytes(4)  # gzip's time
    assert members(packed) == {
        "tree/with space/a.py": (0o644, b"x\n"),
        "tree/ümlaut": (0o644, b"y"),
        "tree/crlf.txt": (0o644, b"a\r\nb\r\n"),
        "tree/bin": (0o644, b"\0\1"),
        "tree/tool": (0o755, b"#!/bin/sh\n"),
        "tree/link": (0o644, "with space"),
        "tree/deep/up": (0o644, "../tool"),
    }
    assert set(members(some)) == {"tree/deep/up"}
    assert left_out == ["away (a link to /etc/passwd)", "deep/out (a link to ../../x)"]
    place = sources.unpack(packed, tmp_path / "out", "it")
    assert (place / "link" / "a.py").read_text() == "x\n"
    assert os.access(place / "tool", os.X_OK)


def test_settings_of_the_repository_run_nothing_and_change_nothing(
    repo: git.Repo, commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(str(repo.working_tree_dir))
    first = commit({"a.py": "one $Id$ $Format:%H$\n", "hidden.txt": "kept\n"})
    second = commit({"a.py": "stays\ntwo\n"})
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    trap.chmod(0o755)
    attributes = "* filter=evil diff=evil merge=evil ident text eol=crlf export-subst\n"
    for place in (folder / ".gitattributes", folder / ".git" / "info" / "attributes"):
        place.parent.mkdir(exist_ok=True)
        place.write_text(attributes + "hidden.txt export-ignore\n")
    third = commit({"a.py": "stays\nthree $Id$ $Format:%H$\n"})
    (folder / ".git" / "config").open("a").write(
        f"""
[filter "evil"]
    smudge = {trap}
    clean = {trap}
    process = {trap}
    required = true
[diff "evil"]
    command = {trap}
    textconv = {trap}
[diff]
    external = {trap}
    noprefix = true
    mnemonicPrefix = true
[core]
    fsmonitor = {trap}
    hooksPath = {tmp_path}
    pager = {trap}
    sshCommand = {trap}
    gitProxy = {trap}
[alias]
    rev-parse = !{trap}
    cat-file = !{trap}
[uploadpack]
    packObjectsHook = {trap}
"""
    )
    for hook in ("post-checkout", "pre-commit", "reference-transaction", "post-index-change"):
        (folder / ".git" / "hooks").mkdir(exist_ok=True)
        (folder / ".git" / "hooks" / hook).write_bytes(trap.read_bytes())
        (folder / ".git" / "hooks" / hook).chmod(0o755)
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(trap))
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=0")
    before = everything(folder)
    with commits.opened(folder, second, "main") as (history, names):
        assert names == [second, third]
        packed, left_out = history.archive(third, lambda path: True)
        patch = history.patch(second, third)
        changed = history.changed(second, third)
        assert history.patch(first, second).count(b"\n+two\n") == 1
    assert not (tmp_path / "ran").exists()
    assert everything(folder) == before
    assert left_out == []
    assert members(packed)["tree/a.py"] == (0o644, b"stays\nthree $Id$ $Format:%H$\n")
    assert "tree/hidden.txt" in members(packed)
    assert changed == [".gitattributes", "a.py"]
    assert b"diff --git a/a.py b/a.py" in patch
    assert b"\n stays\n" in patch
    assert b"\n+three $Id$ $Format:%H$\n" in patch


def test_a_clone_without_all_objects_fetches_nothing(
    repo: git.Repo, commit: Commit, tmp_path: Path
) -> None:
    commit({"a.py": "a\n", "big.bin": b"\0" * 5000})
    source = Path(str(repo.working_tree_dir))
    subprocess.run(["git", "-C", source, "config", "uploadpack.allowFilter", "true"], check=True)
    clone = tmp_path / "partial"
    command = ["git", "clone", "-q", "--no-checkout", "--filter=blob:none"]
    subprocess.run([*command, source.as_uri(), clone], check=True, capture_output=True)
    before = everything(clone)
    with commits.opened(clone, "HEAD") as (history, (name,)):
        with pytest.raises(TaskError, match=r"a\.py is not in this clone"):
            history.archive(name, lambda path: True)
    assert everything(clone) == before


def test_worktrees_subfolders_submodules_and_the_callers_variables(
    repo: git.Repo, commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = commit({"sub/a.py": "a\n"})
    folder = Path(str(repo.working_tree_dir))
    repo.git.worktree("add", "-q", "--detach", str(tmp_path / "worktree"))
    repo.git.update_index("--add", "--cacheinfo", f"160000,{name},vendored")
    repo.git.commit("-qm", "a submodule")
    other = git.Repo.init(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(other.git_dir))
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere")
    for place in (folder / "sub", tmp_path / "worktree"):
        with commits.opened(place, name, "main") as (history, names):
            packed, left_out = history.archive(names[1], lambda path: True)
            assert set(members(packed)) == {"tree/sub/a.py"}
            assert left_out == ["vendored (a submodule)"]
            assert history.patch(*names) == b""


def test_what_cannot_be_opened_is_named(repo: git.Repo, commit: Commit, tmp_path: Path) -> None:
    folder = Path(str(repo.working_tree_dir))
    commit({"a.py": "a\n"})
    blob = repo.git.rev_parse("HEAD:a.py")
    for bad in ("nothing", "--all", "HEAD..HEAD", blob, "", "-n"):
        with pytest.raises(TaskError, match=r"there is no commit|is not one commit"):
            with commits.opened(folder, bad):
                pass
    (tmp_path / "plain").mkdir()
    for place in (tmp_path / "plain", tmp_path / "absent"):
        with pytest.raises(TaskError, match="no git repository"):
            with commits.opened(place, "HEAD"):
                pass


def test_a_message_without_its_signatures(commit: Callable[..., str], repo: git.Repo) -> None:
    text = "Fix it\n\nIt was: broken.\n\nSigned-off-by: A <a@b>\nCo-authored-by: C <c@d>\n"
    name = commit({"a": "a"}, text)
    with commits.opened(Path(str(repo.working_tree_dir)), name) as (history, _):
        assert history.message(name) == "Fix it\n\nIt was: broken."


def test_repositories_named_by_sha256(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    made = subprocess.run(
        ["git", "init", "-q", "--object-format=sha256", folder], capture_output=True
    )
    if made.returncode:
        pytest.skip("this git has no sha256")
    (folder / "a.py").write_text("a\n")
    options = ["-c", "user.name=A", "-c", "user.email=a@b"]
    for command in (["add", "."], [*options, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", folder, *command], check=True)
    with commits.opened(folder, "HEAD") as (history, (name,)):
        assert len(name) == 64
        assert set(members(history.archive(name, lambda path: True)[0])) == {"tree/a.py"}
