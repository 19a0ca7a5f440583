"""Sandboxes in Docker containers, and which way commands are run in them."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
import docker.errors
import requests
from docker.types import LogConfig, Mount

from environments.base import (
    EngineUnreachable,
    SandboxError,
    SandboxLost,
    SandboxSpec,
    StartTimeout,
)
from environments.client import ResidentSandbox, Transport, resident_argv
from environments.engine import ENGINE_ERRORS, connect, translated
from environments.image_facts import ImageFacts, image_facts
from environments.images import LABEL as IMAGE_LABEL
from environments.images import BaseImage, Progress, base_image, named_image, quiet
from environments.keeper import BOOT
from environments.owner import is_orphaned, owner_mark
from environments.workspace import HOME, PATH, check_spec, sandbox_env

if TYPE_CHECKING:
    from environments.plain import PlainDockerSandbox

LABEL = "nexus.sandbox"
OWNER = "nexus.owner"
EXPIRES = "nexus.expires"
TESTBED = "/testbed"
ORDINARY = "1000:1000"
OWN_IMAGE = ImageFacts(python="python3", programs=("bash", "git", "tar", "find", "xargs"))
COMMIT_SECONDS = 900.0
GONE_SECONDS = 10.0  # how long a container may take to be removed
LIVES_SECONDS = 3.0  # how long the engine may take to say what became of a container


class DockerSandbox(ResidentSandbox):
    """A container without network, capabilities or a way to gain any.

    The client holds the container's stdin: when the client dies, however it dies, stdin ends, the
    resident program leaves, and the engine removes the container (auto-remove). `reap` is a second
    line. Opened by `open_docker`.
    """

    kind = "docker"
    way = "resident"

    def __init__(
        self,
        transport: ContainerTransport,
        spec: SandboxSpec,
        workdir: str,
        image: str,
        facts: ImageFacts,
        deadline: float,
    ) -> None:
        super().__init__(transport, spec, workdir)
        self.image = image
        self.facts = facts
        self.container_id = transport.container_id
        try:
            transport.start()
        except SandboxLost as error:
            self.close()
            raise SandboxError(
                f"image {image} cannot run the resident program, which needs python3: {error}"
            ) from error
        except BaseException:
            self.close()
            raise
        self._greet(deadline)


def open_docker(
    spec: SandboxSpec, *, progress: Progress = quiet
) -> DockerSandbox | PlainDockerSandbox:
    """Open a sandbox in a container: by the resident program where the image has a Python for it,
    by the engine's execs otherwise.

    In an image of SWE-bench or R2E-Gym the workspace is /testbed (unless the spec says otherwise)
    and `python` is the project's own, which is checked. Raises EngineUnreachable, ImageMissing,
    StartTimeout, SandboxError.
    """
    check_spec(spec)
    client = connect(timeout=max(5.0, spec.start_timeout), patience=spec.start_timeout)
    try:
        reap(client)
        # Building or pulling an image has limits of its own; the start is timed after it.
        if spec.image is None:
            image, facts = base_image(client, progress, spec.pull), OWN_IMAGE
        else:
            image = named_image(client, spec.image, progress, spec.pull)
            facts = image_facts(client, image.name, spec.start_timeout)
        deadline = time.monotonic() + spec.start_timeout
        workdir = spec.workdir
        if facts.testbed and "workdir" not in spec.model_fields_set:
            workdir = TESTBED
        with _as_start_timeout(spec):
            made = _create(client, spec, image, facts, workdir)
            transport = ContainerTransport(client, made)
    except BaseException:
        client.close()
        raise
    box: DockerSandbox | PlainDockerSandbox
    with _as_start_timeout(spec):
        if facts.python:
            box = DockerSandbox(transport, spec, workdir, image.name, facts, deadline)
        else:
            from environments.plain import PlainDockerSandbox

            box = PlainDockerSandbox(client, transport, spec, workdir, image.name, facts, deadline)
    try:
        if facts.project and not spec.python_path:
            check_project_python(box, facts.project)
    except BaseException:
        box.close()
        raise
    return box


def check_project_python(box: DockerSandbox | PlainDockerSandbox, project: str) -> None:
    """Raises SandboxError unless `python` is that of `project` and runs."""
    expected = f"{project}/bin/python"
    found = box.run(["sh", "-c", "command -v python"]).text.strip()
    if found != expected:
        raise SandboxError(
            f"in image {box.image} `python` is {found or 'missing'}, not the project's own "
            f"{expected}"
        )
    tried = box.run(["python", "-c", "print('works')"])
    if tried.text.strip() != "works":
        raise SandboxError(f"in image {box.image} {expected} does not run: {tried.text[-500:]}")


class ContainerTransport(Transport):
    """The attached stdin and stdout of a container."""

    def __init__(self, client: docker.DockerClient, container_id: str) -> None:
        super().__init__()
        self.container_id = container_id
        self._client = client
        self._response: Any = None  # keeps the connection open
        self._raw = bytearray()
        self._messages = bytearray()  # the end of what the resident program wrote to stderr
        self._closed = False

    def start(self) -> None:
        """Attach, so that not a byte is missed, then start."""
        with translated("cannot start the container"):
            self._response = self._client.api.attach_socket(
                self.container_id, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            )
            # Over unix and tcp this is a SocketIO around the socket, over TLS the socket itself.
            self._socket = getattr(self._response, "_sock", self._response)
            self._client.api.start(self.container_id)

    def receive(self, deadline: float) -> bytes:
        """Bytes of stdout out of the multiplexed stream: frames of an 8-byte head and a body."""
        while True:
            while len(self._raw) >= 8:
                size = int.from_bytes(self._raw[4:8], "big")
                if len(self._raw) < 8 + size:
                    break
                stream, body = self._raw[0], bytes(self._raw[8 : 8 + size])
                del self._raw[: 8 + size]
                if stream == 1 and body:
                    return body
                self._messages += body
                del self._messages[:-4000]
            data = super().receive(deadline)
            if not data:
                return b""
            self._raw += data

    def why_lost(self) -> SandboxError:
        """Ask the engine: it may be the engine that is gone, or only the container."""
        name = self.container_id[:12]
        said = bytes(self._messages).decode("utf-8", "replace").strip()
        reason = f": {said}" if said else ""
        ends = time.monotonic() + LIVES_SECONDS
        while True:
            try:
                with translated("the sandbox was lost"):
                    state = self._client.api.inspect_container(self.container_id)["State"]
            except EngineUnreachable as error:
                return error
            except SandboxError:
                return SandboxLost(f"container {name} was removed while in use{reason}")
            if state.get("OOMKilled"):
                reason = f": it ran out of memory{reason}"
            if not state.get("Running"):
                return SandboxLost(f"container {name} ended with {state['ExitCode']}{reason}")
            if time.monotonic() > ends:
                return SandboxLost(f"the connection to container {name} broke{reason}")
            time.sleep(0.05)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(*ENGINE_ERRORS):
            _end_container(self._client, self.container_id)
        # Only now: a reader in another thread may still wait on its number, which a socket opened
        # meanwhile would get.
        for item in (self._socket, self._response):
            with contextlib.suppress(OSError):
                if item is not None:
                    item.close()
        with contextlib.suppress(*ENGINE_ERRORS):
            self._client.close()


@contextlib.contextmanager
def _as_start_timeout(spec: SandboxSpec) -> Any:
    try:
        yield
    except EngineUnreachable as error:
        if isinstance(error.__cause__, requests.exceptions.Timeout):
            raise StartTimeout(
                f"the engine did not start a container within {spec.start_timeout:g} s"
            ) from error
        raise


def _create(
    client: docker.DockerClient,
    spec: SandboxSpec,
    image: BaseImage,
    facts: ImageFacts,
    workdir: str,
) -> str:
    api, limits = client.api, spec.limits
    memory = limits.memory_mb * 1024 * 1024
    host = api.create_host_config(
        auto_remove=True,
        mounts=[
            Mount(target=inside, source=path, type="bind", read_only=True)
            for path, inside in {**image.mounts, **spec.mounts}.items()
        ],
        cap_drop=["ALL"],
        cpu_period=100_000,
        cpu_quota=max(1000, int(limits.cpus * 100_000)),
        log_config=LogConfig(type="none"),
        mem_limit=memory,
        memswap_limit=memory,
        network_mode="bridge" if limits.network else "none",
        pids_limit=limits.pids,
        security_opt=["no-new-privileges"],
        shm_size=memory // 8,
        tmpfs={
            "/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={memory // 2}",
            HOME: f"rw,exec,nosuid,nodev,mode=777,size={memory // 8}",
        },
    )
    argv = resident_argv(facts.python, spec) if facts.python else ["sh", "-c", BOOT]
    user = _user(spec, facts)
    with translated("cannot create a container"):
        created = api.create_container(
            image.name,
            command=argv[1:],
            entrypoint=argv[:1],
            environment=_environment(client, spec, image, facts),
            host_config=host,
            hostname="sandbox",
            labels=labels(spec.ttl + 60),
            stdin_open=True,  # with the client's connection gone, stdin ends
            user=user,
            working_dir=workdir,
            healthcheck={"test": ["NONE"]},
        )
        if user and not facts.testbed:
            # else the engine makes the folder root's, and git trusts no folder of another
            api.put_archive(created["Id"], "/", _folder(workdir, user))
    return str(created["Id"])


def _folder(path: str, user: str) -> bytes:
    """A tar with one folder that belongs to `uid:gid`."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        item = tarfile.TarInfo(path.strip("/"))
        item.type, item.mode = tarfile.DIRTYPE, 0o755
        item.uid, item.gid = map(int, user.split(":"))
        archive.addfile(item)
    return sink.getvalue()


def labels(seconds: float) -> dict[str, str]:
    """Labels by which `reap` knows a container, whose time is over after `seconds`."""
    return {LABEL: "1", OWNER: owner_mark(), EXPIRES: str(int(time.time() + seconds))}


def _user(spec: SandboxSpec, facts: ImageFacts) -> str | None:
    """An ordinary user wherever the tree's owner allows it; None for the image's own."""
    if facts.testbed:
        return None if facts.owner.startswith(("0:", "?")) or not facts.owner else facts.owner
    if spec.image is not None:
        return None
    if os.getuid():
        return f"{os.getuid()}:{os.getgid()}"
    readable = all(
        Path(path).stat().st_mode & 0o005 == 0o005 and not inside.startswith("/root/")
        for path, inside in spec.mounts.items()
    )
    return ORDINARY if readable else "0:0"


def _environment(
    client: docker.DockerClient, spec: SandboxSpec, image: BaseImage, facts: ImageFacts
) -> dict[str, str]:
    """The image's PATH, before it the project's own programs."""
    path = image.path or _path_of(client, image.name)
    named: dict[str, str] = {}
    if facts.project:
        path = f"{facts.project}/bin:{path}"
        if "/envs/" in facts.project:
            named = {"CONDA_PREFIX": facts.project, "CONDA_DEFAULT_ENV": Path(facts.project).name}
        else:
            named = {"VIRTUAL_ENV": facts.project}
    return {**named, **sandbox_env(spec, path)}


def _path_of(client: docker.DockerClient, image: str) -> str:
    """PATH as the image sets it: the project's own python may be found by it alone."""
    config = client.api.inspect_image(image).get("Config") or {}
    for entry in config.get("Env") or ():
        if entry.startswith("PATH="):
            return str(entry[5:])
    return PATH


def commit(box: DockerSandbox | PlainDockerSandbox, name: str) -> None:
    """Keep what a sandbox's disk holds now as the image `name`. Raises SandboxError.

    /tmp and the home folder are in memory, so they are not in it.
    """
    repository, tag = name.rsplit(":", 1)
    with contextlib.closing(connect(timeout=COMMIT_SECONDS)) as client:
        with translated(f"cannot keep the container as image {name}"):
            client.api.commit(
                box.container_id,
                repository,
                tag,
                changes=[f"LABEL {IMAGE_LABEL}=setup {LABEL}=0"],  # else `reap` would know it
            )


def _end_container(client: docker.DockerClient, container_id: str) -> None:
    """End a container that removes itself, and wait until it is gone: not longer than is usual,
    since the engine goes on with a tree of many files by itself."""
    ends = time.monotonic() + GONE_SECONDS
    while time.monotonic() < ends:
        try:
            client.api.kill(container_id)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError:
            time.sleep(0.02)  # it has ended, and is being removed


def remove_container(client: docker.DockerClient, container_id: str) -> None:
    """Remove a container and wait until it is gone."""
    ends = time.monotonic() + GONE_SECONDS
    while time.monotonic() < ends:
        try:
            client.api.remove_container(container_id, force=True, v=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError:
            time.sleep(0.02)  # its removal is in progress already
        else:
            return


def reap(client: docker.DockerClient, *, everything: bool = False) -> int:
    """Remove sandboxes whose client is dead or whose time is over; returns how many.

    A client on another machine or in another pid namespace is left to its time. With `everything`
    all sandboxes go. Raises EngineUnreachable.
    """
    removed = 0
    with translated("cannot look for orphaned sandboxes"):
        found = client.api.containers(all=True, filters={"label": f"{LABEL}=1"})
        for item in found:
            labels = item.get("Labels") or {}
            expired = float(labels.get(EXPIRES, "inf")) < time.time()
            if everything or expired or is_orphaned(labels.get(OWNER, "")):
                remove_container(client, item["Id"])
                removed += 1
    return removed
