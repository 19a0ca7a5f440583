"""An issue in a project that an image holds: `--image NAME --issue FILE-or-text`.

Images of SWE-bench and R2E-Gym have the project in /testbed with an environment of its own; so has
any image that is laid out like them. The tree is the image's own and never leaves it.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from environments.base import Sandbox, SandboxSpec
from tasks.instance import Instance, Task, TaskError, Verdict


class ImageTask:
    """A `Task` without hidden tests whose tree is in an image. TaskError if the issue is empty."""

    def __init__(self, image: str, problem: str, *, test_command: str | None = None) -> None:
        if not problem.strip():
            raise TaskError("--issue is empty; give the text of the issue or a file that holds it")
        self.image = image
        name = "".join(c if c.isalnum() else "-" for c in image.rpartition("/")[2]).strip("-")
        self.instance = Instance(
            instance_id=f"image-{name}", problem=problem.strip(), test_command=test_command
        )

    def tree(self) -> None:
        """None: it is in the image."""
        return

    def spec(self) -> SandboxSpec:
        """A sandbox of the image; its workspace is where the image has its project."""
        return SandboxSpec.model_validate({"image": self.image})

    def grade(self, patch: bytes) -> Verdict | None:
        """None: there are no hidden tests, the user decides."""
        return None


@runtime_checkable
class NeedsPreparing(Protocol):
    """A task whose image has more in it than an agent may see."""

    def prepare(self, sandbox: Sandbox) -> None:
        """Take it away, before the base is marked. Raises TaskError."""
        ...


def place_tree(task: Task, sandbox: Sandbox) -> None:
    """Bring a task's tree into a sandbox and mark it as the base of the patch.

    TaskError if the image was to have it and does not; SandboxError if the sandbox fails.
    """
    tree = task.tree()
    if tree is not None:
        sandbox.put_tree(tree)
    elif not sandbox.run(["ls", "-A"]).output.strip():
        image = task.spec().image
        raise TaskError(
            f"image {image} has no project in {sandbox.workdir}; give one with --repo, or use an "
            "image that has it in /testbed"
        )
    if isinstance(task, NeedsPreparing):
        task.prepare(sandbox)
    sandbox.mark_base()
