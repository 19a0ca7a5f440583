"""What changed in a workspace, taken inside the sandbox against a base that it cannot touch.

`commit_base` lists the workspace as it is, and keeps the list and all contents on the host: those
that came from there already stay where they are, the others are fetched. `take_diff` sends the list
back each time, and the old contents of the files that changed, so whatever a command did to files
it found, the base is the same. The work inside is done by `treescan.py`; no git runs on the host.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import IO, TYPE_CHECKING, Any, Protocol

from environments.base import Patch, SandboxError
from environments.treearchive import Contents, TreeArchive

if TYPE_CHECKING:
    from environments.client import ResidentSandbox

SCAN_SECONDS = 600.0
LARGEST_BUNDLE = 2_000_000_000
LARGEST_PATCH = 200_000_000


class Place(Protocol):
    """Where `treescan.py` runs: beside the workspace, with a fresh folder for its files."""

    def scan(self, what: str, stdin: IO[bytes]) -> dict[str, Any]:
        """What it prints. Raises SandboxError."""
        ...

    def fetch(self, path: str, limit: int) -> bytes:
        """A file that it wrote. Raises SandboxError."""
        ...


class BaseTree:
    """The state to compare with: the list of its files, and where their contents are held."""

    def __init__(self, manifest: bytes, held: Iterable[Contents], own: Contents) -> None:
        self.manifest = manifest
        self._own = own
        self._contents = (*held, own)

    @functools.cached_property
    def _files(self) -> dict[str, tuple[str, bytes]]:
        """path -> mode and blob id."""
        found = {}
        for record in self.manifest.split(b"\0")[:-1]:
            about, path = record.split(b"\t", 1)
            mode, blob = about.split(b" ", 2)[:2]
            found[os.fsdecode(path)] = (mode.decode(), blob)
        return found

    def old_contents(self, paths: Iterable[str], sink: IO[bytes]) -> None:
        """Write of each a line of JSON with mode, path and size, then what it held."""
        try:
            for path in paths:
                mode, blob = self._files[path]
                data = self._content(blob)
                sink.write(json.dumps([mode, path, len(data)]).encode() + b"\n" + data)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise SandboxError(f"the base lacks what the sandbox asks for: {error}") from None

    def _content(self, blob: bytes) -> bytes:
        raw = bytes.fromhex(blob.decode())
        for contents in self._contents:
            if raw in contents.ids:
                return contents.read(raw)
        raise KeyError(blob)

    def close(self) -> None:
        """Free what was fetched."""
        self._own.close()


def commit_base(
    place: Place,
    held: Iterable[Contents],
    placed: TreeArchive | None = None,
    left_out: Iterable[str] = (),
) -> BaseTree:
    """The workspace as it is now. `held`: contents that came from the host. `placed`: what was put
    there last, if nothing else was done since. `left_out`: paths that are to be in no patch.
    Raises SandboxError."""
    held = tuple(contents for contents in held if not contents.file.closed)
    with tempfile.TemporaryFile() as known:
        files = b"\0".join(placed.placed) if placed else b""
        ids = b"".join(b"".join(contents.ids) for contents in held)
        made = b"\0".join(os.fsencode(path) for path in left_out)
        known.write(b"%d %d\n%b%b%b" % (len(ids), len(made), ids, made, files))
        known.seek(0)
        found = place.scan("base", known)
    manifest = place.fetch(found["manifest"], LARGEST_BUNDLE)
    bundle = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the base)
    bundle.write(place.fetch(found["bundle"], LARGEST_BUNDLE))
    return BaseTree(manifest, held, Contents.bundled(bundle))


def take_diff(place: Place, base: BaseTree) -> Patch:
    """The patch from the base to the workspace as it is now. Raises SandboxError."""
    with tempfile.TemporaryFile() as manifest:
        manifest.write(base.manifest)
        manifest.seek(0)
        seen = place.scan("changes", manifest)
    skipped = tuple(seen["skipped"])
    if not seen["old"] and not seen["now"]:
        return Patch(b"", skipped=skipped)
    with tempfile.TemporaryFile() as old:
        base.old_contents(seen["old"], old)
        old.seek(0)
        found = place.scan("patch", old)
    data = place.fetch(found["patch"], LARGEST_PATCH)
    files = tuple(found["files"])
    edited = [
        folder for folder in seen["nested"] if any(name.startswith(f"{folder}/") for name in files)
    ]
    return Patch(data, files, skipped, tuple(sorted(edited)), found["problem"])


def treescan_source() -> str:
    """The program that lists trees and compares them."""
    return resources.files("environments").joinpath("treescan.py").read_text("utf-8")


class Inside:
    """In the sandbox, in a fresh folder outside the workspace; on disk rather than in a tmpfs."""

    def __init__(self, sandbox: ResidentSandbox) -> None:
        self._sandbox = sandbox
        self._folder = f"/var/tmp/nexus-{secrets.token_hex(8)}"

    def scan(self, what: str, stdin: IO[bytes]) -> dict[str, Any]:
        """See `Place.scan`."""
        box = self._sandbox
        head, body = box._run(
            [box.python, "-ISc", treescan_source(), what, box.workdir, self._folder],
            SCAN_SECONDS,
            50_000_000,
            "/",
            None,
            stdin,
            split=True,
        )
        if head["code"] or head["total"] > len(body):
            reason = "time limit" if head["timed_out"] else head.get("stderr", "").strip()
            if head["oom"]:
                reason = f"out of memory; {reason}"
            raise SandboxError(f"the workspace could not be compared: {reason or body!r}")
        return parsed(body)

    def fetch(self, path: str, limit: int) -> bytes:
        """See `Place.fetch`."""
        return self._sandbox.read_file(path, max_bytes=limit)

    def remove(self) -> None:
        """Remove the folder."""
        self._sandbox.run(["rm", "-rf", self._folder], cwd="/")


def parsed(said: bytes) -> dict[str, Any]:
    """What `treescan.py` printed. Raises SandboxError."""
    try:
        found: dict[str, Any] = json.loads(said)
    except ValueError:
        raise SandboxError("the workspace could not be compared: no answer came") from None
    return found


@contextmanager
def inside(sandbox: ResidentSandbox) -> Iterator[Place]:
    """The place in a sandbox that has Python."""
    place = Inside(sandbox)
    try:
        yield place
    finally:
        place.remove()
