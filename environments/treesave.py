"""A sandbox's files as an archive, so that another sandbox can go on with them.

What a command may have left behind is saved: the workspace with what git ignores and with its
`.git`, the temporary folder and the home. The archive holds what changed since a moment (by ctime,
which no program can set back) and the names of all there is; put into a fresh sandbox with the same
base, it gives the same files. Packed and unpacked inside sandboxes only: the host never writes a
file that an archive names.
"""

from __future__ import annotations

import io
import secrets
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from environments.base import Sandbox, SandboxError
from environments.workspace import DISK_HOME, HOME, TRANSFER_RATE

LARGEST = 2_000_000_000  # bytes of a saved tree
SECONDS = 600.0
SCRATCH = ("/tmp", HOME, DISK_HOME)  # where commands leave things beside the workspace

# $1: folder for what is written, $2: seconds since the epoch, then folders below /, without it.
# POSIX tools and those of busybox. Names are separated by NUL.
_LIST = r"""
set -eu
out=$1 since=$2
shift 2
cd /
mkdir -p "$out"
find "$@" -type d -print0 > "$out/folders" 2>/dev/null || true
find "$@" \( -type f -o -type l \) -print0 > "$out/files" 2>/dev/null || true
"""
_PACK = (
    _LIST
    + r"""
newer='stat -c %Z -- "$@" 2>/dev/null | { for f; do read -r z || exit 0
  [ "$z" -lt "$SINCE" ] || printf "%s\0" "$f"; done; }'
# what is below the folders, not they themselves, whose owner may be another
changed() { SINCE=$since find "$@" -exec sh -c "$newer" sh {} + 2>/dev/null || true; }
# GNU tar takes folders without what is in them, so that modes and empty ones are kept
if tar --version 2>/dev/null | grep -q GNU; then
  { changed "$@" -mindepth 1 -type d; changed "$@" \( -type f -o -type l \); } > "$out/changed"
  status=0
  tar --null --no-recursion --ignore-failed-read -T "$out/changed" -cf "$out/tree.tar" || status=$?
  [ $status -le 1 ] || exit $status
else
  changed "$@" \( -type f -o -type l \) > "$out/changed"
  : > "$out/tree.tar"
  if [ -s "$out/changed" ]; then xargs -0 tar -cf "$out/tree.tar" -- < "$out/changed"; fi
fi
"""
)
# $1: folder with tree.tar, and the names that are to go in `gone` and `gone-folders`.
_UNPACK = r"""
set -eu
cd /
xargs -0 -r rm -f -- < "$1/gone"
xargs -0 -r rmdir -- < "$1/gone-folders" 2>/dev/null || true
[ ! -s "$1/tree.tar" ] || tar -xpf "$1/tree.tar"
"""


def clock(sandbox: Sandbox) -> int:
    """Now, in whole seconds of the sandbox's clock. Raises SandboxError."""
    done = sandbox.run(["date", "+%s"], cwd="/")
    try:
        return int(done.text)
    except ValueError:
        raise SandboxError(f"the sandbox does not tell the time: {done.text[:200]!r}") from None


def save_tree(sandbox: Sandbox, since: int, *, scratch: Sequence[str] = SCRATCH) -> bytes:
    """What changed since `since` (see `clock`; 0 saves all) and which files there are.

    A file that its owner may not read is left out. Raises SandboxError when it cannot be packed,
    or is larger than 2 GB.
    """
    with _folder(sandbox) as folder:
        _do(sandbox, _PACK, folder, str(since), *_roots(sandbox, scratch))
        parts = {
            name: sandbox.read_file(f"{folder}/{name}", max_bytes=LARGEST)
            for name in ("folders", "files", "tree.tar")
        }
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return sink.getvalue()


def restore_tree(sandbox: Sandbox, saved: bytes, *, scratch: Sequence[str] = SCRATCH) -> None:
    """Make the files of `sandbox`, which holds the same base, those that were saved.

    Raises SandboxError when they cannot be written, ValueError for bytes that are no such archive.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(saved)) as archive:
            parts = {name: archive.read(name) for name in ("folders", "files", "tree.tar")}
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"this is no saved tree: {error}") from error
    with _folder(sandbox) as folder:
        _do(sandbox, _LIST, folder, "0", *_roots(sandbox, scratch))
        for kind, gone in (("files", "gone"), ("folders", "gone-folders")):
            here = _names(sandbox.read_file(f"{folder}/{kind}", max_bytes=LARGEST))
            over = set(here) - set(_names(parts[kind]))
            # deepest first, so that a folder is empty when its turn comes
            data = b"".join(name + b"\0" for name in sorted(over, reverse=True))
            sandbox.write_file(f"{folder}/{gone}", data)
        sandbox.write_file(f"{folder}/tree.tar", parts["tree.tar"])
        seconds = SECONDS + len(parts["tree.tar"]) / TRANSFER_RATE
        _do(sandbox, _UNPACK, folder, seconds=seconds)


def _roots(sandbox: Sandbox, scratch: Sequence[str]) -> list[str]:
    """Folders to be saved, relative to /; none lies in another."""
    roots: list[str] = []
    for path in sorted({sandbox.workdir, *scratch}):
        relative = path.strip("/")
        if not any(relative == root or relative.startswith(f"{root}/") for root in roots):
            roots.append(relative)
    return roots


def _do(sandbox: Sandbox, script: str, *argv: str, seconds: float = SECONDS) -> None:
    done = sandbox.run(["sh", "-c", script, "sh", *argv], timeout=seconds, cwd="/")
    if done.exit_code:
        reason = f"took more than {seconds:.0f} s" if done.timed_out else done.text.strip()[-1000:]
        raise SandboxError(f"the files in {sandbox.workdir} could not be moved: {reason}")


def _names(data: bytes) -> Iterable[bytes]:
    return data.split(b"\0")[:-1]


@contextmanager
def _folder(sandbox: Sandbox) -> Iterator[str]:
    """A fresh folder outside what is saved."""
    folder = f"/var/tmp/nexus-{secrets.token_hex(8)}"
    try:
        yield folder
    finally:
        sandbox.run(["rm", "-rf", folder], cwd="/")
