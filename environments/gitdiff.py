"""What changed in a workspace, taken inside the sandbox against a base that it cannot touch.

`commit_base` packs the workspace as it is and keeps the pack on the host. `take_diff` sends it back
into a fresh folder each time, so whatever a command did to files it found, the base is the same.
The work inside is done by `treescan.py`; no git runs on the host.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import IO, TYPE_CHECKING, Any

from environments.base import Patch, SandboxError

if TYPE_CHECKING:
    from environments.client import ResidentSandbox

SCAN_SECONDS = 600.0
LARGEST_PACK = 2_000_000_000
LARGEST_PATCH = 200_000_000


@dataclass(frozen=True, slots=True)
class BaseTree:
    """The state to compare with: a commit and the pack that holds it."""

    commit: str
    pack: IO[bytes]

    def close(self) -> None:
        """Free the pack."""
        self.pack.close()


def commit_base(sandbox: ResidentSandbox) -> BaseTree:
    """Pack the workspace as it is now. Raises SandboxError."""
    with _git_folder(sandbox) as folder:
        found = _scan(sandbox, "base", folder)
        data = sandbox.read_file(found["pack"], max_bytes=LARGEST_PACK)
    pack = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the base)
    pack.write(data)
    return BaseTree(found["commit"], pack)


def take_diff(sandbox: ResidentSandbox, base: BaseTree) -> Patch:
    """The patch from the base to the workspace as it is now. Raises SandboxError."""
    with _git_folder(sandbox) as folder:
        base.pack.seek(0)
        sandbox.write_file(f"{folder}/base.pack", base.pack.read())
        found = _scan(sandbox, "diff", folder, base.commit)
        data = sandbox.read_file(found["patch"], max_bytes=LARGEST_PATCH)
    return as_patch(data, found)


def as_patch(data: bytes, found: dict[str, Any]) -> Patch:
    """The bytes of a patch and what `treescan.py` says of it."""
    return Patch(
        data,
        tuple(found["files"]),
        tuple(found["skipped"]),
        tuple(found["submodules"]),
        found["problem"],
    )


def treescan_source() -> str:
    """The program that writes trees and compares them."""
    return resources.files("environments").joinpath("treescan.py").read_text("utf-8")


@contextmanager
def _git_folder(sandbox: ResidentSandbox) -> Iterator[str]:
    """A fresh folder outside the workspace; on disk rather than in the memory of a tmpfs."""
    folder = f"/var/tmp/nexus-{secrets.token_hex(8)}"
    try:
        yield folder
    finally:
        sandbox.run(["rm", "-rf", folder], cwd="/")


def _scan(sandbox: ResidentSandbox, what: str, folder: str, *more: str) -> dict[str, Any]:
    head, body = sandbox._run(
        [sandbox.python, "-ISc", treescan_source(), what, sandbox.workdir, folder, *more],
        SCAN_SECONDS,
        50_000_000,
        "/",
        split=True,
    )
    if head["code"] or head["total"] > len(body):
        reason = "time limit" if head["timed_out"] else head.get("stderr", "").strip()
        if head["oom"]:
            reason = f"out of memory; {reason}"
        raise SandboxError(f"the workspace could not be compared: {reason or body!r}")
    found: dict[str, Any] = json.loads(body)
    return found
