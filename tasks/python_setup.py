"""How a Python project is set up in a sandbox: its own modules first, then a folder of packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from environments.base import SandboxSpec

PACKAGES = "/opt/task-env"  # where the packages are mounted
WORKDIR = "/workspace"  # where the tree lies; fixed, so that module paths hold from any folder

PythonEnv = Callable[[Sequence[str]], Path]  # requirements -> host folder that holds them


def environment(roots: Sequence[str]) -> dict[str, str]:
    """Variables for a tree whose modules lie in the folders `roots` (relative; `.` is the tree)."""
    places = [WORKDIR if root == "." else f"{WORKDIR}/{root}" for root in roots]
    # no __pycache__ folders: they would be in the agent's way and hide what changed
    return {"PYTHONPATH": ":".join([*places, PACKAGES]), "PYTHONDONTWRITEBYTECODE": "1"}


def sandbox_spec(env: Mapping[str, str], packages: Path | None) -> SandboxSpec:
    """The sandbox for such a tree, with the packages mounted read-only if there are any."""
    fields: dict[str, object] = {"env": dict(env), "workdir": WORKDIR}
    if packages is not None:
        fields |= {"mounts": {str(packages): PACKAGES}, "python_path": f"{PACKAGES}/bin"}
    return SandboxSpec.model_validate(fields)


def default_python_env() -> PythonEnv:
    """pip, cached. Raises SandboxError when it fails."""
    from environments.python_env import python_env

    return python_env
