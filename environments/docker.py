"""Sandboxes in Docker containers, served by the resident program as process 1."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any

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
from environments.images import BaseImage, Progress, base_image, named_image, quiet
from environments.owner import is_orphaned, owner_mark
from environments.workspace import HOME, PATH, check_spec, sandbox_env

LABEL = "nexus.sandbox"
OWNER = "nexus.owner"
EXPIRES = "nexus.expires"
GONE_SECONDS = 10.0  # how long a container may take to be removed
LIVES_SECONDS = 3.0  # how long the engine may take to say what became of a container


class DockerSandbox(ResidentSandbox):
    """A container without network, capabilities or a way to gain any.

    The client holds the container's stdin: when the client dies, however it dies, stdin ends, the
    resident program leaves, and the engine removes the container (auto-remove). `reap` is a second
    line. Opening raises EngineUnreachable, ImageMissing, StartTimeout, SandboxError.
    """

    kind = "docker"

    def __init__(self, spec: SandboxSpec, *, progress: Progress = quiet) -> None:
        check_spec(spec)
        client = connect(timeout=max(5.0, spec.start_timeout))
        try:
            reap(client)
            # Building or pulling an image has limits of its own; the start is timed after it.
            if spec.image is None:
                image = base_image(client, progress)
            else:
                image = named_image(client, spec.image, progress)
            deadline = time.monotonic() + spec.start_timeout
            with _as_start_timeout(spec):
                transport = ContainerTransport(client, _create(client, spec, image))
        except BaseException:
            client.close()
            raise
        self.image = image.name
        self.container_id = transport.container_id
        super().__init__(transport, spec, spec.workdir)
        try:
            with _as_start_timeout(spec):
                transport.start()
        except SandboxLost as error:
            self.close()
            raise SandboxError(
                f"image {image.name} cannot run the resident program, which needs python3: {error}"
            ) from error
        except BaseException:
            self.close()
            raise
        self._greet(deadline)


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
        for item in (self._socket, self._response):
            with contextlib.suppress(OSError):
                if item is not None:
                    item.close()
        with contextlib.suppress(*ENGINE_ERRORS):
            _remove(self._client, self.container_id)
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


def _create(client: docker.DockerClient, spec: SandboxSpec, image: BaseImage) -> str:
    api, limits = client.api, spec.limits
    memory = limits.memory_mb * 1024 * 1024
    own = spec.image is None
    user = f"{os.getuid()}:{os.getgid()}" if own else None  # files as the client would own them
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
    argv = resident_argv("python3", spec)
    with translated("cannot create a container"):
        created = api.create_container(
            image.name,
            command=argv[1:],
            entrypoint=argv[:1],
            environment=sandbox_env(spec, image.path or _path_of(client, image.name)),
            host_config=host,
            hostname="sandbox",
            labels={
                LABEL: "1",
                OWNER: owner_mark(),
                EXPIRES: str(int(time.time() + spec.ttl + 60)),
            },
            stdin_open=True,  # with the client's connection gone, stdin ends
            user=user,
            working_dir=spec.workdir,
            healthcheck={"test": ["NONE"]},
        )
    return str(created["Id"])


def _path_of(client: docker.DockerClient, image: str) -> str:
    """PATH as the image sets it: the project's own python may be found by it alone."""
    config = client.api.inspect_image(image).get("Config") or {}
    for entry in config.get("Env") or ():
        if entry.startswith("PATH="):
            return str(entry[5:])
    return PATH


def _remove(client: docker.DockerClient, container_id: str) -> None:
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
                _remove(client, item["Id"])
                removed += 1
    return removed
