"""Runs inside a sandbox: lists the workspace with its contents, or compares it with such a list.

    treescan.py base WORKSPACE FOLDER     stdin: a line with two numbers of bytes, then so many of
        blob ids whose contents are held already (20 bytes each), so many of paths that are in no
        patch, then the files that were put there last (size, time, blob id, path; NUL between) ->
        {"manifest": path, "bundle": path}: every file by mode, blob id and a mark of its state,
        and the contents that are not held
    treescan.py changes WORKSPACE FOLDER  stdin: the manifest -> {"old": [...], "now": count,
        "skipped": [...], "nested": [...]}: files to get old contents of, and how many are there now
    treescan.py patch WORKSPACE FOLDER    stdin: of each a line of JSON, then what it held
        -> {"patch": path, "files": [...], "problem": text}

Sent as source, so standard library of Python >= 3.8 only. The workspace's own `.git`, configuration
and attributes take no part: files are read as bytes and handed to `git fast-import`, and two trees
of a bare repository are compared. So there is nothing (filter, line-end conversion, textconv,
fsmonitor, hook, nested repository) that could run or change a byte. Only files that may differ are
read, and only they go into the two trees: a file whose size, times and inode are those it had is
the same, since nobody without the right to set the clock can set the time of its last change.
"""
# ruff: noqa: PTH101, PTH103, PTH115, PTH118, PTH123
# (names of files are bytes here, which pathlib does not take)

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterable
from typing import IO

LARGEST = 50_000_000  # bytes; a larger new or changed file is left out and reported
TICK = 50_000_000  # nanoseconds; times of files are no finer than the kernel's tick
UNREAD = b"-" * 40  # in place of a blob id: the file is too large or cannot be read
MADE = b"+" * 40  # the same: the file is in no patch, whatever becomes of it
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
    cwd: str = "/",
    env: dict[str, str] | None = None,
    codes: tuple[int, ...] = (0,),
) -> bytes:
    """What git prints. Ends the program with git's words on any other status than `codes`."""
    try:
        process = subprocess.Popen(
            command(*args),
            stdin=subprocess.DEVNULL if data is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=dict(ISOLATED, GIT_DIR=gitdir, **(env or {})),
        )
    except FileNotFoundError:
        sys.exit("there is no git, by which changes are told")
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
                entries = self.listed(os.path.join(self.top, folder))
            except OSError:
                self.hidden.append(folder)
                continue
            before = folder + b"/" if folder else b""
            for entry in entries:
                name = entry.name
                if name in NEVER:
                    if folder and name == b".git":
                        self.nested.append(folder)
                    continue
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(info.st_mode):
                    mode = b"100755" if info.st_mode & 0o100 else b"100644"
                    self.files[before + name] = (mode, info)
                elif stat.S_ISDIR(info.st_mode):
                    todo.append(before + name)
                elif stat.S_ISLNK(info.st_mode):
                    self.files[before + name] = (b"120000", info)

    def listed(self, folder: bytes) -> list[os.DirEntry[bytes]]:
        """What is in a folder, even where its owner took the permission from himself."""
        mode = stat.S_IMODE(os.lstat(folder).st_mode)
        if mode & 0o500 != 0o500:
            os.chmod(folder, mode | 0o700)
            self.closed.append((folder, mode))
        with os.scandir(folder) as entries:
            return list(entries)

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
            if info.st_mode & 0o400:
                return read_whole(full, info.st_size)
            os.chmod(full, stat.S_IMODE(info.st_mode) | 0o400)
            try:
                return read_whole(full, info.st_size)
            finally:
                os.chmod(full, stat.S_IMODE(info.st_mode))
        except OSError:
            return None


def read_whole(full: bytes, size: int, largest: int = LARGEST) -> bytes | None:
    """What a file holds that had `size` bytes when it was looked at; None if it has too many."""
    fd = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        data = os.read(fd, min(size, largest) + 1)
        while size < len(data) <= largest and (more := os.read(fd, 1 << 20)):
            data += more  # it grew since
    finally:
        os.close(fd)
    return data if len(data) <= largest else None


def blob_id(data: bytes) -> bytes:
    """The id git gives to a content, in 20 bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).digest()


def mark(info: os.stat_result) -> bytes:
    """What is another one after any change of a file."""
    return b"%d %d %d %d" % (info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)


def quoted(path: bytes) -> bytes:
    return b'"' + path.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'


class Importer:
    """A `git fast-import` that makes one commit."""

    def __init__(self, gitdir: str, ref: str) -> None:
        self.process = subprocess.Popen(
            command("fast-import", "--quiet", "--done", "--date-format=raw"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            env=dict(ISOLATED, GIT_DIR=gitdir),
        )
        self.write(f"commit refs/heads/{ref}\ncommitter nexus <> 0 +0000\ndata 0\n".encode())

    def write(self, data: bytes) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(data)

    def put(self, path: bytes, mode: bytes, data: bytes) -> None:
        head = b"M " + mode + b" inline " + quoted(path)
        self.write(head + b"\ndata %d\n" % len(data))
        self.write(data + b"\n")

    def finish(self) -> None:
        self.write(b"done\n")
        self.process.communicate()
        if self.process.returncode:
            sys.exit(f"git fast-import failed with status {self.process.returncode}")


def base(tree: Workspace, folder: str, began: int, source: IO[bytes]) -> dict[str, object]:
    """List the workspace; contents whose ids are not among those on stdin go into the bundle."""
    git(folder, "init", "--quiet", "--bare", "--template=", folder)  # it will be needed: is it here
    sizes = source.readline().split()
    known = source.read(int(sizes[0]))
    made = set(source.read(int(sizes[1])).split(b"\0"))
    held = {known[at : at + 20] for at in range(0, len(known), 20)}
    placed = {}
    for record in source.read().split(b"\0"):
        if record:
            length, seconds, blob, path = record.split(b" ", 3)
            placed[path] = (int(length), int(seconds) * 1_000_000_000, blob)
    manifest, bundle = os.path.join(folder, "manifest"), os.path.join(folder, "bundle")
    with open(manifest, "wb") as listing, open(bundle, "wb") as contents:
        for path, (mode, info) in tree.files.items():
            size, mtime, blob = placed.get(path, (-1, 0, b""))
            if path in made:
                listing.write(b"%b %b ?\t%b\0" % (mode, MADE, path))
                continue
            # a program that wrote to it since would have left a time with a fraction
            if size != info.st_size or mtime != info.st_mtime_ns or mode == b"120000":
                data = tree.content(path)
                raw = b"" if data is None else blob_id(data)
                blob = raw.hex().encode() or UNREAD
                if data is not None and raw not in held:
                    held.add(raw)
                    packed = zlib.compress(data, 1)
                    contents.write(raw + len(packed).to_bytes(8, "big") + packed)
            # changed just now: another change in the same tick would not be seen by its time
            state = mark(info) if info.st_ctime_ns < began - TICK else b"?"
            listing.write(b"%b %b %b\t%b\0" % (mode, blob, state, path))
    return {"manifest": manifest, "bundle": bundle}


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


def changes(tree: Workspace, folder: str, source: IO[bytes]) -> dict[str, object]:
    """Import what is new or may differ, and name the files whose old contents are needed."""
    old: dict[bytes, bytes] = {}
    for record in source.read().split(b"\0"):
        if record:
            about, path = record.split(b"\t", 1)
            old[path] = about
    made = {path for path, about in old.items() if about[7:47] == MADE}
    own = [path for path in old if path not in made]
    tops = {path.split(b"/", 1)[0] for path in own if b"/" in path}
    made_folders = folders_of(made) - folders_of(own) if made else set()
    changed, new, skipped = [], [], list(tree.hidden)
    for path, (mode, info) in tree.files.items():
        about = old.get(path, b"")
        if not about:
            if not is_artefact(path, tops) and not (made and folders_of([path]) & made_folders):
                new.append(path)
        elif path in made:
            continue
        elif about[:6] != mode or about[48:] != mark(info):
            changed.append(path)
    gone = [
        path
        for path in sorted(set(own) - set(tree.files))
        if not any(path.startswith(hidden + b"/") for hidden in tree.hidden)
    ]
    if not changed and not new and not gone:
        return {"old": [], "now": 0, "skipped": names_of(skipped), "nested": []}
    git(folder, "init", "--quiet", "--bare", "--template=", folder)
    dropped = ignored(tree.top, folder, new)
    importer = Importer(folder, "now")
    wanted, count = [], 0
    for path in sorted([*changed, *(path for path in new if path not in dropped)]):
        mode, data = tree.files[path][0], tree.content(path)
        about = old.get(path, b"")
        before = about[7:47]
        if data is None or before == UNREAD:
            skipped.append(path)
        elif about[:6] != mode or before != blob_id(data).hex().encode():
            importer.put(path, mode, data)
            count += 1
            if about:
                wanted.append(path)
    importer.finish()
    for path in gone:
        (skipped if old[path][7:47] == UNREAD else wanted).append(path)
    return {
        "old": names_of(wanted),
        "now": count,
        "skipped": names_of(skipped),
        "nested": names_of(tree.nested),
    }


def folders_of(paths: Iterable[bytes]) -> set[bytes]:
    """Folders that hold any of the paths, at any depth; the top itself is none."""
    found: set[bytes] = set()
    for path in paths:
        folder = path.rpartition(b"/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition(b"/")[0]
    return found


def names_of(paths: list[bytes]) -> list[str]:
    return [os.fsdecode(path) for path in paths]


def patch_of(folder: str, source: IO[bytes]) -> dict[str, object]:
    """Import the old contents, and compare with what `changes` imported."""
    importer = Importer(folder, "base")
    while line := source.readline():
        mode, name, size = json.loads(line)
        data = source.read(size)
        if len(data) != size:
            sys.exit("the old contents came in part")
        importer.put(os.fsencode(name), mode.encode(), data)
    importer.finish()
    common = ["diff-tree", "-r", "--no-renames", "refs/heads/base", "refs/heads/now"]
    names = [name for name in git(folder, *common, "--name-only", "-z").split(b"\0") if name]
    patch = os.path.join(folder, "patch")
    options = ["-p", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"]
    options += ["--src-prefix=a/", "--dst-prefix=b/", "--unified=3", "--diff-algorithm=myers"]
    git(folder, *common, *options, "--output=" + patch)
    return {
        "patch": patch,
        "files": names_of(names),
        "problem": problem_of(folder, "refs/heads/base", patch) if names else "",
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
    what, workspace, folder = sys.argv[1:4]
    os.umask(0o077)
    os.makedirs(folder, exist_ok=True)
    if what == "patch":
        json.dump(patch_of(folder, sys.stdin.buffer), sys.stdout)
        return
    with open(os.path.join(folder, "began"), "wb") as handle:
        began = os.fstat(handle.fileno()).st_ctime_ns  # by the clock that files get their times of
    tree = Workspace(os.fsencode(workspace))
    try:
        tree.scan()
        if what == "base":
            found = base(tree, folder, began, sys.stdin.buffer)
        else:
            found = changes(tree, folder, sys.stdin.buffer)
    finally:
        tree.restore()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
