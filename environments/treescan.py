"""Runs inside a sandbox: writes the workspace into a git folder of its own, or compares with it.

    treescan.py base WORKSPACE GITDIR          -> {"commit": id, "pack": path}
    treescan.py diff WORKSPACE GITDIR COMMIT   -> {"patch": path, "files": [...], "skipped": [...],
                                                   "submodules": [...], "problem": text}

Sent as source, so standard library of Python >= 3.8 only. The workspace's own `.git`, configuration
and attributes take no part: files are read as bytes and handed to `git fast-import`, and two trees
of a bare repository are compared. So there is nothing (filter, line-end conversion, textconv,
fsmonitor, hook, nested repository) that could run or change a byte.
"""
# ruff: noqa: PTH101, PTH103, PTH108, PTH115, PTH118, PTH123, PTH208
# (names of files are bytes here, which pathlib does not take)

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from typing import IO

LARGEST = 50_000_000  # bytes; a larger new or changed file is left out and reported
NEVER = {b".git", b"__pycache__", b".pytest_cache", b".hypothesis", b".mypy_cache", b".ruff_cache"}
ISOLATED = {
    "PATH": os.environ.get("PATH", os.defpath),
    "LC_ALL": "C",
    "HOME": "/nonexistent",
    "XDG_CONFIG_HOME": "/nonexistent",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
}
OPTIONS = [
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.bare=false",
    "core.ignoreCase=false",
    "core.precomposeUnicode=false",
    "core.bigFileThreshold=512m",
    "core.compression=1",
    "pack.compression=1",
    "fastimport.unpackLimit=0",
    "gc.auto=0",
]


def command(*args: str) -> list[str]:
    """A git command line with everything configurable set."""
    return ["git", *(word for option in OPTIONS for word in ("-c", option)), *args]


def git(
    gitdir: str,
    *args: str,
    data: bytes | None = None,
    source: IO[bytes] | int = subprocess.DEVNULL,
    cwd: str = "/",
    env: dict[str, str] | None = None,
    codes: tuple[int, ...] = (0,),
) -> bytes:
    """What git prints. Ends the program with git's words on any other status than `codes`."""
    process = subprocess.Popen(
        command(*args),
        stdin=source if data is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=dict(ISOLATED, GIT_DIR=gitdir, **(env or {})),
    )
    out, err = process.communicate(data)
    if process.returncode not in codes:
        sys.exit(f"git {args[0]}: {err.decode('utf-8', 'replace').strip()[-2000:]}")
    return out


class Workspace:
    """The files and links of a tree, as bytes. Caches and `.git` are not entered.

    files: relative path -> (git's mode, stat). hidden: folders that could not be looked into.
    """

    def __init__(self, top: bytes) -> None:
        self.top = top
        self.files: dict[bytes, tuple[bytes, os.stat_result]] = {}
        self.hidden: list[bytes] = []
        self.nested: list[bytes] = []  # folders that are repositories of their own
        self.closed: list[tuple[bytes, int]] = []  # folders and the modes they had

    def scan(self) -> None:
        todo = [b""]
        while todo:
            folder = todo.pop()
            try:
                names = self.listed(os.path.join(self.top, folder))
            except OSError:
                self.hidden.append(folder)
                continue
            if folder and b".git" in names:
                self.nested.append(folder)
            for name in names:
                path = os.path.join(folder, name)
                try:
                    info = os.lstat(os.path.join(self.top, path))
                except FileNotFoundError:
                    continue
                if name in NEVER:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    todo.append(path)
                elif stat.S_ISLNK(info.st_mode):
                    self.files[path] = (b"120000", info)
                elif stat.S_ISREG(info.st_mode):
                    mode = b"100755" if info.st_mode & 0o100 else b"100644"
                    self.files[path] = (mode, info)

    def listed(self, folder: bytes) -> list[bytes]:
        """Names in a folder, even where its owner took the permission from himself."""
        mode = stat.S_IMODE(os.lstat(folder).st_mode)
        if mode & 0o500 != 0o500:
            os.chmod(folder, mode | 0o700)
            self.closed.append((folder, mode))
        return os.listdir(folder)

    def restore(self) -> None:
        """Give folders the modes back that they had."""
        for folder, mode in reversed(self.closed):
            os.chmod(folder, mode)

    def content(self, path: bytes) -> bytes | None:
        """Bytes of a file or link; None if it cannot be read or is too large."""
        full = os.path.join(self.top, path)
        mode, info = self.files[path]
        try:
            if mode == b"120000":
                return os.readlink(full)
            if info.st_size > LARGEST:
                return None
            if not info.st_mode & 0o400:
                os.chmod(full, stat.S_IMODE(info.st_mode) | 0o400)
            try:
                with open(full, "rb") as handle:
                    data = handle.read(LARGEST + 1)
            finally:
                if not info.st_mode & 0o400:
                    os.chmod(full, stat.S_IMODE(info.st_mode))
        except OSError:
            return None
        return data if len(data) <= LARGEST else None


def quoted(path: bytes) -> bytes:
    return b'"' + path.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'


class Importer:
    """A `git fast-import` that makes one commit."""

    def __init__(self, gitdir: str, ref: str, parent: str | None = None) -> None:
        self.process = subprocess.Popen(
            command("fast-import", "--quiet", "--done", "--date-format=raw"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            env=dict(ISOLATED, GIT_DIR=gitdir),
        )
        self.write(f"commit refs/heads/{ref}\ncommitter nexus <> 0 +0000\ndata 0\n".encode())
        if parent is not None:
            self.write(f"from {parent}\n".encode())

    def write(self, data: bytes) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(data)

    def delete(self, path: bytes) -> None:
        self.write(b"D " + quoted(path) + b"\n")

    def put(self, path: bytes, mode: bytes, data: bytes) -> None:
        head = b"M " + mode + b" inline " + quoted(path)
        self.write(head + b"\ndata %d\n" % len(data))
        self.write(data + b"\n")

    def finish(self) -> None:
        self.write(b"done\n")
        self.process.communicate()
        if self.process.returncode:
            sys.exit(f"git fast-import failed with status {self.process.returncode}")


def base(tree: Workspace, gitdir: str) -> dict[str, object]:
    git(gitdir, "init", "--quiet", "--bare", "--template=", gitdir)
    importer = Importer(gitdir, "base")
    for path in sorted(tree.files):
        data = tree.content(path)
        if data is not None:
            importer.put(path, tree.files[path][0], data)
    importer.finish()
    commit = git(gitdir, "rev-parse", "refs/heads/base").decode().strip()
    packs = os.path.join(gitdir, "objects", "pack")
    pack = [name for name in os.listdir(packs) if name.endswith(".pack")]
    if len(pack) != 1:
        sys.exit(f"git fast-import made {len(pack)} packs, not one")
    return {"commit": commit, "pack": os.path.join(packs, pack[0])}


def is_artefact(path: bytes, known_tops: set[bytes]) -> bool:
    """Whether a file that is new is a by-product rather than work."""
    parts = path.split(b"/")
    if path.endswith((b".pyc", b".pyo")) or any(part.endswith(b".egg-info") for part in parts):
        return True
    return len(parts) > 1 and parts[0] in (b"build", b"dist") and parts[0] not in known_tops


def ignored(top: bytes, gitdir: str, paths: list[bytes]) -> set[bytes]:
    """Those of the paths that the workspace's .gitignore files name."""
    if not paths:
        return set()
    data = b"\0".join(paths) + b"\0"
    out = git(
        gitdir,
        "check-ignore",
        "--no-index",
        "--stdin",
        "-z",
        data=data,
        cwd=os.fsdecode(top),
        env={"GIT_WORK_TREE": os.fsdecode(top)},
        codes=(0, 1),
    )
    return set(out.split(b"\0"))


def diff(tree: Workspace, gitdir: str, commit: str) -> dict[str, object]:
    git(gitdir, "init", "--quiet", "--bare", "--template=", gitdir)
    pack = os.path.join(gitdir, "base.pack")
    with open(pack, "rb") as handle:
        git(gitdir, "index-pack", "--stdin", source=handle)
    os.unlink(pack)
    old: dict[bytes, tuple[bytes, bytes]] = {}
    for record in git(gitdir, "ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0"):
        if record:
            about, path = record.split(b"\t", 1)
            mode, _, blob = about.split(b" ")
            old[path] = (mode, blob)
    now = tree.files
    tops = {path.split(b"/")[0] for path in old if b"/" in path}
    new = [path for path in now if path not in old and not is_artefact(path, tops)]
    dropped = ignored(tree.top, gitdir, new)
    chosen = {path for path in now if path in old} | {path for path in new if path not in dropped}

    importer = Importer(gitdir, "now", commit)
    skipped = list(tree.hidden)
    for path in sorted(set(old) - set(now)):
        if not any(path.startswith(folder + b"/") for folder in tree.hidden):
            importer.delete(path)
    for path in sorted(chosen):
        mode, data = now[path][0], tree.content(path)
        if data is None:
            skipped.append(path)
            continue
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest().encode()
        if old.get(path) != (mode, blob):
            importer.put(path, mode, data)
    importer.finish()
    common = ["diff-tree", "-r", "--no-renames", commit, "refs/heads/now"]
    names = [name for name in git(gitdir, *common, "--name-only", "-z").split(b"\0") if name]
    patch = os.path.join(gitdir, "patch")
    options = ["-p", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"]
    options += ["--src-prefix=a/", "--dst-prefix=b/", "--unified=3", "--diff-algorithm=myers"]
    git(gitdir, *common, *options, "--output=" + patch)
    edited = [
        folder for folder in tree.nested if any(name.startswith(folder + b"/") for name in names)
    ]
    return {
        "patch": patch,
        "files": [os.fsdecode(name) for name in names],
        "skipped": [os.fsdecode(name) for name in skipped],
        "submodules": [os.fsdecode(name) for name in sorted(edited)],
        "problem": problem_of(gitdir, commit, patch) if names else "",
    }


def problem_of(gitdir: str, commit: str, patch: str) -> str:
    """Why `git apply` does not make the new tree out of the base by the patch; "" when it does."""
    index = {"GIT_INDEX_FILE": os.path.join(gitdir, "check-index")}
    git(gitdir, "read-tree", commit, env=index)
    process = subprocess.run(
        command("apply", "--cached", "--whitespace=nowarn", patch),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=dict(ISOLATED, GIT_DIR=gitdir, **index),
    )
    if process.returncode:
        return process.stdout.decode("utf-8", "replace").strip()[-1000:]
    made = git(gitdir, "write-tree", env=index).strip()
    wanted = git(gitdir, "rev-parse", "refs/heads/now^{tree}").strip()
    return "" if made == wanted else "the patch applies but gives another tree"


def main() -> None:
    what, workspace, gitdir = sys.argv[1:4]
    os.umask(0o077)
    os.makedirs(gitdir, exist_ok=True)
    tree = Workspace(os.fsencode(workspace))
    try:
        tree.scan()
        found = base(tree, gitdir) if what == "base" else diff(tree, gitdir, sys.argv[4])
    finally:
        tree.restore()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
