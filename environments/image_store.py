"""The images that sandboxes use: what is here, what an image is good for, what can go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import docker.errors

from environments.base import SandboxError, SandboxSpec
from environments.engine import translated
from environments.images import LABEL, REPOSITORY, Progress, current_names, quiet

if TYPE_CHECKING:
    import docker

OWN = REPOSITORY.split("/")[0] + "/"  # begins every name that this project gives


@dataclass(frozen=True, slots=True)
class Listed:
    """One name of one image."""

    name: str
    identity: str  # content id, short
    size: int  # bytes
    kind: str  # "base" (in use), "old base", "other"


@dataclass(frozen=True, slots=True)
class Checked:
    """What a sandbox of an image turned out to be."""

    image: str
    way: str  # "resident" or "plain"
    workdir: str
    user: str  # uid inside
    python: str | None  # path of `python` in a command
    python_version: str | None
    project: str | None  # the environment `python` was required to come from, and does
    missing: tuple[str, ...]  # programs that an agent would miss


def list_images(client: docker.DockerClient, *, everything: bool = False) -> list[Listed]:
    """Images that this project made; with `everything` all that have a name.

    Raises EngineUnreachable.
    """
    with translated("cannot list images"):
        found: list[dict[str, Any]] = client.api.images()
    current = set(current_names())
    listed = []
    for item in found:
        own = LABEL in (item.get("Labels") or {})
        for name in item.get("RepoTags") or ():
            if name == "<none>:<none>" or not (own or everything):
                continue
            kind = "other"
            if own and name.startswith(REPOSITORY):
                kind = "base" if name in current else "old base"
            short = str(item["Id"]).removeprefix("sha256:")[:12]
            listed.append(Listed(name, short, int(item["Size"]), kind))
    return sorted(listed, key=lambda item: item.name)


def check_image(name: str | None, *, pull: str = "missing", progress: Progress = quiet) -> Checked:
    """Open a sandbox of the image and look around. None is the project's own base.

    Where the image holds a project (/testbed), opening it verifies that `python` is the project's
    own. Raises ImageMissing, StartTimeout, EngineUnreachable, SandboxError.
    """
    from environments.docker import open_docker

    spec = SandboxSpec.model_validate({"image": name, "pull": pull})
    with open_docker(spec, progress=progress) as box:
        tools = "bash git grep sed find make patch tar diff awk"
        missing = box.run(
            ["sh", "-c", f"for t in {tools}; do command -v $t >/dev/null || echo $t; done"]
        )
        where = box.run(["sh", "-c", "command -v python || command -v python3"]).text.strip()
        version = None
        if where:
            code = "import sys; sys.stdout.write('%d.%d.%d' % sys.version_info[:3])"
            version = box.run([where, "-c", code]).text
        return Checked(
            image=box.image,
            way=box.way,
            workdir=box.workdir,
            user=box.run(["id", "-u"]).text.strip(),
            python=where or None,
            python_version=version,
            project=box.facts.project,
            missing=tuple(missing.text.split()),
        )


def prune_images(client: docker.DockerClient, *, everything: bool = False) -> dict[str, str]:
    """Remove base images of earlier recipes (with `everything` the present ones too).

    Returns name -> "removed", or why it is still there. Names that others gave stay.
    Raises EngineUnreachable.
    """
    done: dict[str, str] = {}
    for item in list_images(client):
        if item.kind == "other" or (item.kind == "base" and not everything):
            continue
        try:
            with translated(f"cannot remove {item.name}"):
                client.api.remove_image(item.name)
        except SandboxError as error:
            if not isinstance(error.__cause__, docker.errors.APIError):
                raise
            done[item.name] = str(error)
        else:
            done[item.name] = "removed"
    return done
