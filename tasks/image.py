"""An issue in a project that an image holds: `--image NAME --issue FILE-or-text`.

Images of SWE-bench and R2E-Gym have the project in /testbed with an environment of its own; so has
any image that is laid out like them. The tree is the image's own and never leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from environments.base import Sandbox, SandboxSpec
from environments.treearchive import TreeArchive
from environments.workspace import DISK_HOME
from tasks.instance import Instance, Task, TaskError, Verdict


class ImageTask:
    """A `Task` without hidden tests whose tree is in an image. TaskError if the issue is empty."""

    def __init__(self, image: str, problem: str, *, test_command: str | None = None) -> None:
        if not problem.strip():
            raise TaskError("--issue is empty; give the text of the issue or a file that holds it")
        self.image = image
        self._set_up: str | None = None
        self._made: tuple[str, ...] = ()
        name = "".join(c if c.isalnum() else "-" for c in image.rpartition("/")[2]).strip("-")
        self.instance = Instance(
            instance_id=f"image-{name}", problem=problem.strip(), test_command=test_command
        )

    def tree(self) -> None:
        """None: it is in the image."""
        return

    def furnish(self, image: str, made: Sequence[str]) -> None:
        """Take an image that set-up made of this one in its place, with the files it made."""
        self._set_up, self._made = image, tuple(made)

    def made(self) -> Sequence[str]:
        """Paths of the files that set-up made in the tree."""
        return self._made

    def spec(self) -> SandboxSpec:
        """A sandbox of the image; its workspace is where the image has its project."""
        if self._set_up is None:
            return SandboxSpec.model_validate({"image": self.image})
        home = {"HOME": DISK_HOME}
        return SandboxSpec.model_validate({"image": self._set_up, "env": home})

    def grade(self, patch: bytes) -> Verdict | None:
        """None: there are no hidden tests, the user decides."""
        return None


@runtime_checkable
class NeedsPreparing(Protocol):
    """A task whose image has more in it than an agent may see, or that must look what is there."""

    def prepare(self, sandbox: Sandbox) -> None:
        """Take it away, or look, before the base is marked. Raises TaskError."""
        ...


@runtime_checkable
class HoldsArchive(Protocol):
    """A task that has its tree as an archive: None where the image has it."""

    def archive(self) -> TreeArchive | None: ...

    def extras(self) -> Mapping[str, TreeArchive]:
        """What else is to be put there: folder inside -> content."""
        ...


@runtime_checkable
class WasSetUp(Protocol):
    """A task whose tree has files that a command of the user's made."""

    def made(self) -> Sequence[str]:
        """Their paths: they are in no patch."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A sandbox that can keep files out of patches."""

    def leave_out(self, paths: Iterable[str]) -> None: ...


@runtime_checkable
class TakesArchives(Protocol):
    """A sandbox into which an archive goes as it is."""

    def put_archive(self, archive: TreeArchive, dest: str | None = None) -> None: ...


def place_tree(task: Task, sandbox: Sandbox) -> None:
    """Bring a task's tree into a sandbox and mark it as the base of the patch.

    TaskError if the image was to have it and does not; SandboxError if the sandbox fails.
    """
    if isinstance(task, HoldsArchive):
        _put_extras(task, sandbox)
        if isinstance(task, NeedsPreparing):
            task.prepare(sandbox)  # it only looks: what is put there afterwards stays as it is
        put_files(task, sandbox)
    else:
        put_files(task, sandbox)
        if isinstance(task, NeedsPreparing):
            task.prepare(sandbox)
    leave_out_made(task, sandbox)
    sandbox.mark_base()


def leave_out_made(task: object, sandbox: Sandbox) -> None:
    """Keep what set-up made out of the patch; before the base is marked."""
    if isinstance(task, WasSetUp) and isinstance(sandbox, LeavesOut) and (made := task.made()):
        sandbox.leave_out(made)


def put_files(task: Task, sandbox: Sandbox) -> None:
    """Bring the tree there, no more. Raises what `place_tree` does."""
    if isinstance(task, HoldsArchive) and isinstance(sandbox, TakesArchives):
        if (archive := task.archive()) is not None:
            sandbox.put_archive(archive)
            return
    elif (tree := task.tree()) is not None:
        sandbox.put_tree(tree)
        return
    if not sandbox.run(["ls", "-A"]).output.strip():
        image = task.spec().image
        raise TaskError(
            f"image {image} has no project in {sandbox.workdir}; give one with --repo, or use an "
            "image that has it in /testbed"
        )


def _put_extras(task: HoldsArchive, sandbox: Sandbox) -> None:
    for folder, archive in task.extras().items():
        if isinstance(sandbox, TakesArchives):
            sandbox.put_archive(archive, folder)
