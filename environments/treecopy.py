"""What changed in a workspace whose image has no Python: the tree is copied out and compared here.

The same program as inside other sandboxes (`treescan.py`) reads the copy, which has no `.git`; its
git runs in a folder of its own with everything configurable set. The copy comes as a tar from a
sandbox, so it is hostile: every name is checked, and nothing is written through a link.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from environments.base import SandboxError
from environments.gitdiff import LARGEST_BUNDLE, SCAN_SECONDS, Place, parsed, treescan_source
from environments.treescan import LARGEST, NEVER

if TYPE_CHECKING:
    from environments.plain import PlainDockerSandbox

# $1: workspace, $2: largest size. Prints a tar (or several, joined) of files and links.
# What its owner closed to himself is opened first, and closed again at the end.
PACK = r"""
cd -- "$1" || exit 1
work=$(mktemp -d /var/tmp/nexus-XXXXXX) || exit 1
restore() {
  ls -r "$work" | while IFS= read -r n; do
    path=$(tail -n +2 "$work/$n"; printf x)
    chmod "$(head -n 1 "$work/$n")" "${path%x}"
  done
  rm -rf "$work"
}
trap restore EXIT
note='f=$2/$(printf %06d $(($(ls "$2" | wc -l))))
{ stat -c %a "$1"; printf %s "$1"; } > "$f"
if [ -d "$1" ]; then chmod u+rwx "$1"; else chmod u+r "$1"; fi'
find . PRUNED \( -type d ! -perm -0500 -o -type f ! -perm -0400 \) \
  -exec sh -c "$note" sh {} "$work" \;
# GNU tar would take a backslash in a name on its command line for an escape
if tar --version 2>/dev/null | grep -q GNU; then
  pack() { tar --null --no-recursion -T - -cf -; }
else
  pack() { xargs -0 -r tar -cf - --; }
fi
status=0
find . PRUNED \( -type l -o -type f ! -size +"$2"c \) -print0 | pack || status=$?
# 1: a file changed while it was read; what could not be read must not pass for deleted
[ $status -le 1 ] || exit $status
find . PRUNED -type f -size +"$2"c -print0 >&2
"""


class Beside:
    """A copy of the workspace on the host, and a folder for the files of the comparison."""

    def __init__(self, tree: str, folder: str) -> None:
        self._tree, self._folder = tree, folder

    def scan(self, what: str, stdin: IO[bytes]) -> dict[str, Any]:
        """See `Place.scan`."""
        argv = [sys.executable, "-ISc", treescan_source(), what, self._tree, self._folder]
        done = subprocess.run(argv, stdin=stdin, capture_output=True, timeout=SCAN_SECONDS, cwd="/")
        if done.returncode:
            reason = done.stderr.decode("utf-8", "replace").strip()[-2000:]
            raise SandboxError(f"the workspace could not be compared: {reason}")
        return parsed(done.stdout)

    def fetch(self, path: str, limit: int) -> bytes:
        """See `Place.fetch`."""
        return Path(path).read_bytes()


@contextmanager
def beside(sandbox: PlainDockerSandbox) -> Iterator[tuple[Place, tuple[str, ...]]]:
    """The place for a sandbox without Python, and the names of what could not be copied there."""
    with (
        _copy(sandbox) as (tree, left_out),
        tempfile.TemporaryDirectory(prefix="nexus-git-") as folder,
    ):
        yield Beside(tree, folder), tuple(left_out)


@contextmanager
def _copy(sandbox: PlainDockerSandbox) -> Iterator[tuple[str, list[str]]]:
    """A folder with the workspace's files, and the names of what could not be copied."""
    names = [os.fsdecode(name) for name in sorted(NEVER)]
    ors = " -o ".join(f"-name {name}" for name in names)
    script = PACK.replace("PRUNED", f"\\( {ors} \\) -prune -o")
    with (
        tempfile.TemporaryDirectory(prefix="nexus-tree-") as folder,
        tempfile.TemporaryFile() as archive,
    ):
        argv = ["sh", "-c", script, "sh", sandbox.workdir, str(LARGEST)]
        large = sandbox.copy_out(argv, archive, SCAN_SECONDS, LARGEST_BUNDLE)
        archive.seek(0)
        tree = Path(folder)
        left_out = _unpack(archive, tree)
        for name in large.split(b"\0")[:-1]:
            # named by an empty file of that size, so that it is judged where all others are
            if path := _place(tree, os.fsdecode(name)):
                with path.open("xb") as handle:
                    handle.truncate(LARGEST + 1)
        yield folder, left_out


def _unpack(archive: Any, tree: Path) -> list[str]:
    """Write regular files and links below `tree`; returns names that could not be written."""
    left_out = []
    try:
        # several archives may follow each other
        with tarfile.open(fileobj=archive, mode="r:", ignore_zeros=True) as members:
            for item in members:
                try:
                    done = _write(members, item, tree)
                except (OSError, KeyError):
                    done = False
                if not done:
                    left_out.append(item.name.removeprefix("./"))
    except tarfile.TarError as error:
        if archive.seek(0, os.SEEK_END):
            raise SandboxError(f"the workspace could not be copied: {error}") from error
    return left_out


def _write(members: tarfile.TarFile, item: tarfile.TarInfo, tree: Path) -> bool:
    path = _place(tree, item.name)
    if path is None:
        return False
    if item.issym():
        path.symlink_to(item.linkname)
        return True
    source = members.extractfile(item) if item.isreg() or item.islnk() else None
    if source is None:
        return False
    with source, path.open("xb") as sink:
        while data := source.read(1 << 20):
            sink.write(data)
    path.chmod(0o600 | (stat.S_IMODE(item.mode) & 0o111))
    return True


def _place(tree: Path, name: str) -> Path | None:
    """Where a file of that name goes, its folders made; None for a name that leads elsewhere."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or name.startswith("/"):
        return None
    if any(os.fsencode(part) in NEVER for part in parts):
        return None
    folder = tree
    for part in parts[:-1]:
        folder = folder / part
        if not folder.is_symlink() and not folder.exists():
            folder.mkdir()
        if folder.is_symlink() or not folder.is_dir():
            return None
    return folder / parts[-1]
