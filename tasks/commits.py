"""Trees and differences of commits, read from a repository that is not to be trusted.

A repository's configuration can name programs (filters, hooks, fsmonitor, ways to fetch what is
missing). So its objects alone are read, through a git folder made for this, which has no settings
but its own. Nothing is written to the repository, and no network is used.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import git

from tasks.instance import TaskError

_ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # a clone without all objects: what is missing stays missing
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
_ATTRIBUTES = b"* -text !eol !crlf !filter !ident !working-tree-encoding !diff !merge\n"
_FILE, _PROGRAM, _LINK, _MODULE = "100644", "100755", "120000", "160000"
_CREDIT = re.compile(r"^[A-Z][A-Za-z]*(?:-[A-Za-z]+)*-(?:[Bb]y|[Ii]d|[Tt]o): .*$", re.MULTILINE)
_NAME = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@dataclass(frozen=True, slots=True)
class Blob:
    """One file or link of a commit's tree."""

    path: str
    mode: str
    name: str  # of the object


class Commits:
    """The commits of one repository. A context manager: see `opened`."""

    def __init__(self, git_dir: Path) -> None:
        self._git_dir = git_dir

    def files(self, commit: str) -> tuple[list[Blob], list[str]]:
        """Files and links of a commit's tree, and the submodules, which are left out."""
        listing = self._git("ls-tree", "-r", "-z", "--full-tree", commit)
        blobs: list[Blob] = []
        modules: list[str] = []
        for line in listing.split(b"\0")[:-1]:
            facts, _, path = line.partition(b"\t")
            mode, _, name = facts.decode().split(" ")
            if mode == _MODULE:
                modules.append(os.fsdecode(path))
            else:
                blobs.append(Blob(os.fsdecode(path), mode, name))
        return blobs, modules

    def archive(self, commit: str, wanted: Callable[[str], bool]) -> tuple[bytes, list[str]]:
        """A `.tar.gz` of the wanted paths in a top folder, the same bytes every time; and what was
        left out: submodules, and links that lead out of the tree."""
        blobs, left_out = self.files(commit)
        blobs = [blob for blob in blobs if wanted(blob.path)]
        left_out = [f"{path} (a submodule)" for path in left_out if wanted(path)]
        packed = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as out,
            tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for blob, data in zip(blobs, self._contents(blobs), strict=True):
                member = tarfile.TarInfo(f"tree/{blob.path}")
                member.mode = 0o755 if blob.mode == _PROGRAM else 0o644
                if blob.mode != _LINK:
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                elif _stays_inside(blob.path, target := os.fsdecode(data)):
                    member.type, member.linkname = tarfile.SYMTYPE, target
                    tar.addfile(member)
                else:
                    left_out.append(f"{blob.path} (a link to {target})")
        return packed.getvalue(), left_out

    def changed(self, old: str, new: str) -> list[str]:
        """Paths that differ between two commits."""
        names = self._git("diff-tree", "-r", "-z", "--name-only", "--no-renames", old, new)
        return [os.fsdecode(name) for name in names.split(b"\0")[:-1]]

    def patch(self, old: str, new: str) -> bytes:
        """The difference as `git apply` takes it, submodules left out."""
        options = ["--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv"]
        return self._git("diff-tree", "-r", "-p", *options, "--ignore-submodules", old, new)

    def message(self, commit: str) -> str:
        """Subject and body of a commit, without the lines that sign or credit."""
        raw = self._git("cat-file", "commit", commit)
        head, _, text = raw.partition(b"\n\n")
        named = re.search(rb"^encoding (.+)$", head, re.MULTILINE)
        try:
            told = text.decode(named[1].decode() if named else "utf-8", "replace")
        except LookupError:
            told = text.decode("utf-8", "replace")
        return _CREDIT.sub("", told).strip()

    def _contents(self, blobs: Sequence[Blob]) -> Iterator[bytes]:
        asked = "".join(f"{blob.name}\n" for blob in blobs).encode()
        stream = io.BytesIO(self._git("cat-file", "--batch", stdin=asked))
        for blob in blobs:
            head = stream.readline().split()
            if len(head) != 3 or head[1] != b"blob":
                raise TaskError(
                    f"{blob.path} is not in this clone ({blob.name} {head[-1:]}); fetch it whole, "
                    "nothing is fetched here"
                )
            yield stream.read(int(head[2]))
            stream.read(1)

    def _git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        return _run([f"--git-dir={self._git_dir}", *arguments], stdin)


@contextmanager
def opened(repo: Path, *commits: str) -> Iterator[tuple[Commits, list[str]]]:
    """The objects of a repository, and the full names of the commits that were asked for.

    TaskError if the folder is no repository or has no such commit.
    """
    folder = Path(repo).expanduser()
    try:
        with git.Repo(folder, search_parent_directories=True) as found:
            own, common = Path(found.git_dir).resolve(), Path(found.common_dir).resolve()
    except (git.InvalidGitRepositoryError, git.NoSuchPathError) as error:
        raise TaskError(f"--repo {repo}: no git repository") from error
    names = [_full_name(own, commit, repo) for commit in commits]
    objects = str(common / "objects")
    if "\n" in objects:
        raise TaskError(f"--repo {repo!s}: git cannot read a path with a line break in it")
    with tempfile.TemporaryDirectory(prefix="commits-") as place:
        git_dir = Path(place) / "git"
        kind = "sha256" if any(len(name) == 64 for name in names) else "sha1"
        _run(["init", "-q", "--bare", "--template=", f"--object-format={kind}", str(git_dir)])
        for name, content in (
            ("info/attributes", _ATTRIBUTES),
            ("objects/info/alternates", os.fsencode(objects) + b"\n"),
        ):
            (git_dir / name).parent.mkdir(exist_ok=True)
            (git_dir / name).write_bytes(content)
        yield Commits(git_dir), names


def sha256(data: bytes) -> str:
    """The sum by which stored files are known."""
    return hashlib.sha256(data).hexdigest()


def _full_name(git_dir: Path, commit: str, repo: Path) -> str:
    """The commit that a name, branch, tag or shortened sum means."""
    ask = [f"--git-dir={git_dir}", "rev-parse", "--verify", "--quiet", "--end-of-options"]
    try:
        name = _run([*ask, f"{commit}^{{commit}}"]).decode().strip()
    except TaskError as error:
        raise TaskError(f"--repo {repo}: there is no commit {commit!r} in it") from error
    if not _NAME.fullmatch(name):
        raise TaskError(f"--repo {repo}: {commit!r} is not one commit")
    return name


def _stays_inside(path: str, target: str) -> bool:
    """Whether a link, followed by name alone, ends in the tree."""
    if target.startswith("/") or "\0" in target:
        return False
    depth = len(PurePosixPath(path).parts) - 1
    for part in PurePosixPath(target).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return False
    return True


def _run(arguments: Sequence[str], stdin: bytes = b"") -> bytes:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *arguments],
        env=kept | _ENV,
        cwd="/",
        input=stdin,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise TaskError(f"git {arguments[1]} failed: {said or 'it gave no reason'}")
    return done.stdout
