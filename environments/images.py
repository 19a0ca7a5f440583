"""Images for Docker sandboxes: the project's own base, had from wherever it can be had."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING

from docker.errors import BuildError

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
BACKOFF = (2.0, 10.0, 30.0)  # seconds between tries of a pull
CA_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
CA_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
REGISTRY_SECONDS = 10.0  # how long a registry may take to answer before it counts as out of reach


@dataclass(frozen=True, slots=True)
class BaseImage:
    """An image that is present, and what must be mounted for it to work."""

    name: str
    mounts: dict[str, str] = field(default_factory=dict)  # host path -> path inside, read-only
    path: str | None = None  # PATH, where it differs from the usual one


def quiet(_: str) -> None:
    """A progress callback that says nothing."""


def base_image(
    client: docker.DockerClient, progress: Progress = quiet, pull: str = "missing"
) -> BaseImage:
    """The project's own image: there already, else from a registry, else from the host's files.

    It holds bash, git, python3 (also as `python`), grep, sed, find, make, patch and tzdata. Its tag
    names its content, so a changed recipe makes a new image. With `pull` "never" no registry is
    asked. Raises ImageMissing with the reasons.
    """
    official, local = current_names()
    names = [name for name in (official, local) if name]
    if found := _first_present(client, names):
        return BaseImage(found)
    lock = cache_dir("locks") / "base-image"
    with locked(lock, lambda: progress("another process is making the base image; waiting")):
        if found := _first_present(client, names):
            return BaseImage(found)
        return _make_base(client, official, local, progress, pull)


def current_names() -> tuple[str, str | None]:
    """Names that our image has by its present recipe: from the registry, and from host files."""
    official = f"{REPOSITORY}:python-{hashlib.sha256(dockerfile().encode()).hexdigest()[:12]}"
    lacking = hostfiles.missing_packages()
    return official, None if lacking else f"{REPOSITORY}:host-{hostfiles.fingerprint()}"


def _first_present(client: docker.DockerClient, names: Sequence[str]) -> str | None:
    return next((name for name in names if is_present(client, name)), None)


def _make_base(
    client: docker.DockerClient,
    official: str,
    local: str | None,
    progress: Progress,
    pull: str,
) -> BaseImage:
    reasons = []
    ways: list[tuple[str, Callable[[], BaseImage]]] = []
    if pull != "never" or is_present(client, PYTHON_IMAGE):
        ways.append(
            (
                f"fetching {PYTHON_IMAGE}",
                lambda: build_from(client, PYTHON_IMAGE, official, progress, pull),
            )
        )
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


def named_image(
    client: docker.DockerClient, name: str, progress: Progress = quiet, pull: str = "missing"
) -> BaseImage:
    """An image by name, pulled when it is not there and `pull` allows. Raises ImageMissing."""
    if not is_present(client, name):
        if pull == "never":
            raise ImageMissing(
                f"image {name} is not here and may not be pulled; `agent images pull {name}`"
            )
        pull_image(client, name, progress)
    return BaseImage(name)


def pull_image(client: docker.DockerClient, name: str, progress: Progress = quiet) -> None:
    """Pull by name, one pull at a time on this machine, again after what may pass. ImageMissing.

    A registry that does not answer is noticed before the pull starts.
    """
    lock = cache_dir("locks") / "pull"
    with locked(lock, lambda: progress("another process is pulling an image; waiting")):
        for wait in (*BACKOFF, None):
            progress(f"pulling {name}")
            try:
                _pull(client, name)
            except ImageMissing as error:
                if wait is None or not _may_pass(str(error)):
                    raise
                progress(f"{error}; trying again in {wait:g} s")
                time.sleep(wait)
            else:
                return


def _may_pass(reason: str) -> bool:
    """Whether a registry's refusal is one that waiting can cure: too many requests, its own fault,
    a connection that broke."""
    words = ("toomanyrequests", "too many requests", "rate limit", "500 ", "502 ", "503 ", "504 ")
    broken = ("connection reset", "unexpected eof", "tls handshake timeout", "i/o timeout")
    return any(word in reason.lower() for word in words + broken)


def _pull(client: docker.DockerClient, name: str) -> None:
    try:
        with translated(f"image {name} cannot be pulled"):
            with contextlib.closing(connect(REGISTRY_SECONDS)) as probe:
                probe.api.inspect_distribution(name)
            last = name.rpartition("/")[2]
            client.api.pull(name if ":" in last or "@" in last else f"{name}:latest")
    except SandboxError as error:
        raise ImageMissing(str(error)) from error
    if not is_present(client, name):
        raise ImageMissing(f"image {name} cannot be pulled: the engine does not say why")


def build_from(
    client: docker.DockerClient,
    base: str,
    name: str,
    progress: Progress = quiet,
    pull: str = "missing",
) -> BaseImage:
    """Build our image on another one by the Dockerfile. Raises ImageMissing.

    The certificates that this machine trusts go with it, so that package managers work behind a
    proxy that has a certificate of its own.
    """
    named_image(client, base, progress, pull)
    try:
        with translated(f"image {name} cannot be built"):
            try:
                client.images.build(
                    fileobj=_context(),
                    custom_context=True,
                    tag=name,
                    buildargs={"BASE": base},
                    labels={LABEL: "base"},
                    rm=True,
                    forcerm=True,
                )
            except BuildError as error:
                log = "".join(str(item.get("stream", "")) for item in error.build_log)
                raise ImageMissing(
                    f"image {name} cannot be built on {base}: {log.strip()[-800:]}"
                ) from error
    except SandboxError as error:
        raise ImageMissing(str(error)) from error
    return BaseImage(name)


def _context() -> IO[bytes]:
    """The Dockerfile and the bundle of certificates (empty where the host has none), as a tar."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in (("Dockerfile", dockerfile().encode()), ("ca.crt", ca_bundle())):
            item = tarfile.TarInfo(name)
            item.size, item.mode = len(data), 0o644
            archive.addfile(item, io.BytesIO(data))
    sink.seek(0)
    return sink


def dockerfile() -> str:
    """The text of the one Dockerfile."""
    return resources.files("environments").joinpath("Dockerfile").read_text("utf-8")


def ca_bundle() -> bytes:
    """The certificates that this machine's programs trust, in PEM; empty if there are none."""
    named = (os.environ.get(name) for name in CA_VARIABLES)
    for path in (*named, *CA_FILES):
        with contextlib.suppress(OSError):
            if path and (data := Path(path).read_bytes()):
                return data
    return b""


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
