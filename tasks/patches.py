"""Applying a patch exactly, in a sandbox or in a user's folder.

Both use a git folder of their own that is not the tree's: no `.git/config`, hook, filter or line-
end rule of the tree has a say, so what is applied is the bytes of the patch. `git apply` checks
the whole patch before it writes, and refuses `.git/`, `..`, absolute paths and paths behind links.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from environments.base import ExecResult, Sandbox, SandboxError
from tasks.instance import TaskError

# The user's and the machine's git settings are out as well: apply.whitespace, core.autocrlf, ...
_ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "LC_ALL": "C",
}
_OPTIONS = ("-c", "core.protectHFS=true", "-c", "core.protectNTFS=true", "-c", "core.quotePath=off")
_ATTRIBUTES = b"* -text !eol !crlf !filter !ident !working-tree-encoding\n"  # bytes stay bytes
_APPLY = ("apply", "--whitespace=nowarn")
_FORBIDDEN = ("invalid path", "beyond a symbolic link")  # git's words; `patch` is less strict


class PatchRefused(TaskError):
    """The patch does not apply, or names a path it must not touch. Nothing was changed."""


def whole(patch: bytes) -> bytes:
    """The patch with the last newline that models and editors like to lose."""
    return patch if patch.endswith(b"\n") else patch + b"\n"


def apply_to_folder(patch: bytes, folder: Path) -> None:
    """Apply to a folder on the host that no agent could write to, in a repository or not.

    PatchRefused if any part does not fit; the folder is then untouched.
    """
    patch = whole(patch)
    with tempfile.TemporaryDirectory(prefix="apply-") as own:
        git_dir = Path(own) / "git"
        _host(["git", "init", "-q", "--bare", "--template=", str(git_dir)], folder, b"")
        (git_dir / "info").mkdir()
        (git_dir / "info" / "attributes").write_bytes(_ATTRIBUTES)
        for option in ("--check", "--verbose"):
            argv = [*_git(str(git_dir), str(folder)), *_APPLY, option]
            done = _host(argv, folder, patch)
            if done.returncode != 0:
                why = _why(done.stdout.decode(errors="replace"))
                kept = "; nothing was changed" if option == "--check" else ""
                raise PatchRefused(f"the patch does not apply to {folder}: {why}{kept}")


def apply_in_sandbox(
    box: Sandbox, patch: bytes, scratch: str, *, three_way: bool = False
) -> tuple[str, ...]:
    """Apply to the workspace of a sandbox; return the paths that are different now.

    `scratch` is a path inside, outside the workspace, that does not exist yet; it is removed again.
    Where the context does not fit `git apply`, `patch -p1` is tried as the official harness does;
    before it, with `three_way`, a merge with the blobs that the patch names, by the workspace's own
    repository. Raises PatchRefused, or SandboxError if git cannot be used there.
    """
    patch = whole(patch)
    git = _git(scratch, box.workdir)
    new = shlex.quote(scratch)
    _must(box, f"git init -q --bare --template= {new} && mkdir -p {new}/info")
    _must(box, f"cat > {new}/info/attributes", stdin=_ATTRIBUTES)
    before = _snapshot(box, git)
    done = box.run([*git, *_APPLY, "-"], env=_ENV, stdin=patch)
    if done.exit_code != 0:
        why = _why(done.text)
        if any(reason in why for reason in _FORBIDDEN):
            raise PatchRefused(f"the patch does not apply: {why}")
        merged = _merged(box, patch, f"{scratch}/merged") if three_way else b""
        fits = merged and box.run([*git, *_APPLY, "-"], env=_ENV, stdin=merged).exit_code == 0
        if not fits and not _apply_loosely(box, patch):
            raise PatchRefused(f"the patch does not apply: {why}")
    after = _snapshot(box, git)
    changed = [*git, "diff-tree", "-r", "--name-only", "--no-renames", "-z", before, after]
    names = _must(box, changed).output.decode("utf-8", "surrogateescape")
    _must(box, ["rm", "-rf", scratch])
    return tuple(name for name in names.split("\0") if name)


def _merged(box: Sandbox, patch: bytes, index: str) -> bytes:
    """The patch as `git apply --3way` would have it on HEAD, without conflicts; empty otherwise.

    It is made in an index of its own, so that a failure leaves nothing in the workspace.
    """
    script = (
        "git read-tree HEAD && git apply --whitespace=nowarn --3way --cached - >&2 && "
        "git diff-index --cached -p --binary --full-index --no-ext-diff --no-color HEAD"
    )
    done = box.run(
        f"({script}) 2>/dev/null",
        env={**_ENV, "GIT_INDEX_FILE": index},
        stdin=patch,
        output_cap=50_000_000,
    )
    return done.output if done.exit_code == 0 and not done.omitted else b""


def _apply_loosely(box: Sandbox, patch: bytes) -> bool:
    """`patch -p1`, tried dry first so that a failure leaves no half."""
    loose = ["patch", "-p1", "--batch", "--forward", "--fuzz=5", "--no-backup-if-mismatch"]
    if box.run([*loose, "--dry-run"], stdin=patch).exit_code != 0:
        return False
    return box.run(loose, stdin=patch).exit_code == 0


def _snapshot(box: Sandbox, git: list[str]) -> str:
    """The workspace as a tree object, ignored files included."""
    _must(box, [*git, "add", "--all", "--force", "."])
    return _must(box, [*git, "write-tree"]).text.strip()


def _git(git_dir: str, work_tree: str) -> list[str]:
    return ["git", f"--git-dir={git_dir}", f"--work-tree={work_tree}", *_OPTIONS]


def _host(argv: list[str], folder: Path, stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        argv,
        cwd=folder,
        env=kept | _ENV,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def _must(box: Sandbox, command: str | list[str], stdin: bytes | None = None) -> ExecResult:
    done = box.run(command, env=_ENV, stdin=stdin, timeout=300.0, output_cap=10_000_000)
    if done.exit_code != 0:
        shown = command if isinstance(command, str) else shlex.join(command)
        raise SandboxError(
            f"{shown!r} failed in the sandbox ({done.exit_code}): {done.text[-500:]}"
        )
    return done


def _why(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("error:", "fatal:"))]
    return "; ".join(lines[:5]) or output.strip()[-300:] or "git apply gave no reason"
