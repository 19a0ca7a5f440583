"""Images for Docker sandboxes: the project's own base, had from wherever it can be had."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING

from environments import hostfiles
from environments.base import ImageMissing, SandboxError
from environments.engine import connect, translated
from environments.paths import cache_dir, locked
from environments.python_env import python_env as python_env

if TYPE_CHECKING:
    import docker

Progress = Callable[[str], None]
REPOSITORY = "nexus-agent/base"
LABEL = "nexus.image"
PYTHON_IMAGE = "python:3.11-slim"
REGISTRY_SECONDS = 10.0  # how long a registry may take to answer before it counts as out of reach


@dataclass(frozen=True, slots=True)
class BaseImage:
    """An image that is present, and what must be mounted for it to work."""

    name: str
    mounts: dict[str, str] = field(default_factory=dict)  # host path -> path inside, read-only
    path: str | None = None  # PATH, where it differs from the usual one


def quiet(_: str) -> None:
    """A progress callback that says nothing."""


def base_image(client: docker.DockerClient, progress: Progress = quiet) -> BaseImage:
    """The project's own image: there already, else from a registry, else from the host's files.

    It holds bash, git, python3 (also as `python`), grep, sed, find, make, patch and tzdata. Its tag
    names its content, so a changed recipe makes a new image. Raises ImageMissing with the reasons.
    """
    dockerfile = resources.files("environments").joinpath("Dockerfile").read_text("utf-8")
    official = f"{REPOSITORY}:python-{hashlib.sha256(dockerfile.encode()).hexdigest()[:12]}"
    lacking = hostfiles.missing_packages()
    local = None if lacking else f"{REPOSITORY}:host-{hostfiles.fingerprint()}"
    names = [name for name in (official, local) if name]
    if found := _first_present(client, names):
        return BaseImage(found)
    lock = cache_dir("locks") / "base-image"
    with locked(lock, lambda: progress("another process is making the base image; waiting")):
        if found := _first_present(client, names):
            return BaseImage(found)
        return _make_base(client, official, local, dockerfile, progress)


def _first_present(client: docker.DockerClient, names: Sequence[str]) -> str | None:
    return next((name for name in names if is_present(client, name)), None)


def _make_base(
    client: docker.DockerClient,
    official: str,
    local: str | None,
    dockerfile: str,
    progress: Progress,
) -> BaseImage:
    reasons = []
    ways: list[tuple[str, Callable[[], BaseImage]]] = [
        (f"fetching {PYTHON_IMAGE}", lambda: _from_registry(client, official, dockerfile)),
    ]
    if local:
        ways.append((f"building {local} from this machine's files", lambda: _debian(client, local)))
    else:
        reasons.append(f"dpkg lacks {', '.join(hostfiles.missing_packages())}")
    if Path("/bin").is_symlink() and hostfiles.usr_python():
        ways.append(("building an image that mounts this machine's /usr", lambda: _usr(client)))
    for what, way in ways:
        progress(what)
        try:
            return way()
        except ImageMissing as error:
            progress(str(error))
            reasons.append(str(error))
    raise ImageMissing("no base image can be had here: " + "; ".join(reasons))


def is_present(client: docker.DockerClient, name: str) -> bool:
    """Whether the engine has the image. Raises EngineUnreachable."""
    try:
        with translated(f"cannot look for image {name}"):
            client.images.get(name)
    except ImageMissing:
        return False
    return True


def named_image(client: docker.DockerClient, name: str, progress: Progress = quiet) -> BaseImage:
    """An image by name, pulled when it is not there. Raises ImageMissing."""
    if not is_present(client, name):
        progress(f"pulling {name}")
        _pull(client, name)
    return BaseImage(name)


def _pull(client: docker.DockerClient, name: str) -> None:
    """Raises ImageMissing. A registry that does not answer is noticed before the pull starts."""
    try:
        with translated(f"image {name} cannot be pulled"):
            with contextlib.closing(connect(REGISTRY_SECONDS)) as probe:
                probe.api.inspect_distribution(name)
            client.api.pull(name if ":" in name else f"{name}:latest")
    except SandboxError as error:
        raise ImageMissing(str(error)) from error
    if not is_present(client, name):
        raise ImageMissing(f"image {name} cannot be pulled: the engine does not say why")


def _from_registry(client: docker.DockerClient, name: str, dockerfile: str) -> BaseImage:
    if not is_present(client, PYTHON_IMAGE):
        _pull(client, PYTHON_IMAGE)
    try:
        with translated(f"image {name} cannot be built"):
            client.images.build(
                fileobj=_bytes_file(dockerfile), tag=name, labels={LABEL: "base"}, rm=True
            )
    except SandboxError as error:
        raise ImageMissing(str(error)) from error
    return BaseImage(name)


def _debian(client: docker.DockerClient, name: str) -> BaseImage:
    _import(client, name, hostfiles.write_debian_rootfs)
    return BaseImage(name)


def _usr(client: docker.DockerClient) -> BaseImage:
    name = f"{REPOSITORY}:usr-{hostfiles.RECIPE}"
    if not is_present(client, name):
        _import(client, name, hostfiles.write_empty_rootfs)
    mounts = {host: inside for host, inside in hostfiles.USR_MOUNTS.items() if Path(host).exists()}
    return BaseImage(name, mounts, "/usr/local/bin:/usr/bin:/bin:/opt/bin")


def _import(client: docker.DockerClient, name: str, write: Callable[[IO[bytes]], None]) -> None:
    """Stream a root file system into the engine as it is written. Raises ImageMissing."""
    reader, writer = os.pipe()
    failure: list[BaseException] = []

    def produce() -> None:
        try:
            with os.fdopen(writer, "wb") as sink:
                write(sink)
        except BaseException as error:  # handed to the caller below
            failure.append(error)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    repository, tag = name.rsplit(":", 1)
    try:
        with translated(f"image {name} cannot be imported"), os.fdopen(reader, "rb") as source:
            client.api.import_image_from_data(
                iter(lambda: source.read(1 << 20), b""),
                repository=repository,
                tag=tag,
                changes=["ENV LANG=C.UTF-8", 'CMD ["bash"]', f"LABEL {LABEL}=base"],
            )
    except SandboxError as error:
        raise ImageMissing(str(error)) from error
    finally:
        thread.join()
    if failure:
        client.images.remove(name, force=True)
        raise ImageMissing(f"image {name} cannot be written: {failure[0]}")


def _bytes_file(text: str) -> IO[bytes]:
    return io.BytesIO(text.encode())
