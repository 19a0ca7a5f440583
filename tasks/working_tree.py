"""The files of somebody's working tree, and a copy or an archive of them. It is only read."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import git

from environments.treearchive import TreeArchive
from tasks.instance import TaskError

MAX_BYTES = 4 << 30  # a copy larger than this is more likely a wrong path than a repository
_SKIPPED_FOLDERS = frozenset(
    {".git", ".hg", ".svn", "__pycache__", "node_modules", ".venv", "venv"}
)


class RepoError(TaskError):
    """The repository or the issue that was named cannot be used."""


def copy_tree(source: Path, target: Path, max_bytes: int = MAX_BYTES) -> None:
    """Copy a working tree as `files` lists it: bytes, modes and links, without `.git`.

    Whole or not at all. RepoError if it is larger than `max_bytes` or cannot be read or written.
    """
    names = _names_within(source, max_bytes)
    try:
        target.mkdir(parents=True)
    except OSError as error:
        raise RepoError(f"cannot make {target} for the copy, which must be new: {error}") from error
    try:
        for name in names:
            into = target / name
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, into, follow_symlinks=False)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise RepoError(f"cannot copy {source}: {error}") from error


def archive_of(source: Path, max_bytes: int = MAX_BYTES) -> TreeArchive:
    """The same files as `copy_tree` copies, in a tar that may still grow. RepoError as there."""
    return TreeArchive.of(source, _names_within(source, max_bytes))


def _names_within(source: Path, max_bytes: int) -> list[str]:
    """What `files` lists. RepoError if it is larger than `max_bytes`, or cannot be read."""
    try:
        found = list(files(source))
    except OSError as error:  # closed to the caller, or gone since it was listed
        raise RepoError(f"cannot read {source}: {error}") from error
    size = sum(size for _, size in found)
    if size > max_bytes:
        raise RepoError(
            f"{source} holds {size / 2**20:.0f} MiB in {len(found)} files, more than the limit of "
            f"{max_bytes / 2**20:.0f} MiB; name a smaller folder, or let .gitignore leave data out"
        )
    return [name for name, _ in found]


def files(folder: Path) -> Iterator[tuple[str, int]]:
    """Relative paths and sizes of the files and links of a working tree that are there now.

    In a repository (worktrees and submodules included, and folders inside one): what is tracked,
    and what is untracked and not ignored. Elsewhere: everything. Never what is below a `.git`.
    """
    listed = _listed(folder)
    if not listed:  # no repository, or one that ignores this folder of it
        yield from _walked(folder)
        return
    top = f"{folder}{os.sep}"
    for name in sorted(listed):
        try:
            info = os.lstat(top + name)
        except (FileNotFoundError, NotADirectoryError):
            continue  # tracked, but deleted or replaced in the working tree
        if stat.S_ISDIR(info.st_mode):  # a submodule, or a repository that lies in this one
            inner = name.rstrip("/")
            yield from ((f"{inner}/{below}", size) for below, size in files(folder / name))
        elif stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
            yield name, info.st_size


def _listed(folder: Path) -> set[str] | None:
    """What git lists of a folder, relative to it; None if no repository holds the folder."""
    try:
        repo = git.Repo(folder, search_parent_directories=True)
    except (git.InvalidGitRepositoryError, git.NoSuchPathError):
        return None
    with repo:
        if repo.working_tree_dir is None:
            raise RepoError(f"{folder} is a bare repository; name a clone that has files")
        # named, so that a GIT_DIR of the caller's environment (in a hook) does not redirect it
        places = [f"--git-dir={repo.git_dir}", f"--work-tree={repo.working_tree_dir}"]
    command = ["git", *places, "-c", "core.fsmonitor=false", "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    try:
        output = git.Git(folder).execute(
            command, stdout_as_string=False, strip_newline_in_stdout=False
        )
    except git.GitCommandError as error:
        raise RepoError(f"git cannot list {folder}: {error.stderr.strip()}") from error
    return {os.fsdecode(name) for name in output.split(b"\0") if name}


def _walked(folder: Path) -> Iterator[tuple[str, int]]:
    top = f"{folder}{os.sep}"
    for here, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(f"{here}/{name}")]  # noqa: PTH114 (hot)
        folders[:] = [
            name for name in folders if name not in links and name not in _SKIPPED_FOLDERS
        ]
        for name in sorted([*names, *links]):
            path = f"{here}{os.sep}{name}"
            info = os.lstat(path)
            if name != ".git" and (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                yield path.removeprefix(top), info.st_size
