"""An engine that is not there, goes away in mid-run, or stays away."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from environments import (
    EngineUnreachable,
    SandboxError,
    SandboxLost,
    SandboxSpec,
    engine,
    open_sandbox,
)
from environments.owner import owner_mark
from tests.environments.plain_image import KIND
from tests.environments.test_lifetime import containers, eventually


def test_no_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(EngineUnreachable, match="bubblewrap"):
        open_sandbox(SandboxSpec(), "docker")


class Forwarder:
    """Stands between client and engine; can be cut, and then refuses until it is opened again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.links: list[socket.socket] = []
        self.refusing = threading.Event()
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen()
        threading.Thread(target=self.accept, args=(self.server,), daemon=True).start()

    def accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = server.accept()
                if self.refusing.is_set():
                    near.close()
                    continue
                far = socket.socket(socket.AF_UNIX)
                far.connect("/var/run/docker.sock")
                self.links += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self.pump, args=pair, daemon=True).start()

    def pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Drop every connection; new ones are dropped as they come."""
        self.refusing.set()
        for item in self.links:
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()
        self.links = []

    def close(self) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


@pytest.fixture
def forwarder(monkeypatch, tmp_path):
    if not Path("/var/run/docker.sock").exists():
        pytest.skip("no local engine")
    between = Forwarder(tmp_path / "engine.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine.sock")
    yield between
    between.close()


@pytest.mark.docker
@pytest.mark.parametrize("kind", ["docker", KIND], ids=["docker", "plain"])
def test_engine_lost_in_a_command_and_back_after_three_seconds(forwarder, monkeypatch, kind):
    box = open_sandbox(SandboxSpec(), kind)
    threading.Timer(0.5, forwarder.cut).start()
    threading.Timer(3.5, forwarder.refusing.clear).start()
    started = time.monotonic()
    with pytest.raises((EngineUnreachable, SandboxLost)):
        box.run("sleep 60", timeout=60)
    assert time.monotonic() - started < 12
    with pytest.raises(SandboxError):
        box.run("true")
    # whoever opens the next one while the engine is away waits for it instead of failing
    with open_sandbox(SandboxSpec(), kind) as again:
        assert time.monotonic() - started > 3
        assert again.run("echo back").text == "back\n"
    box.close()
    # the container's stdin ended with the connection, so it went away on its own
    assert eventually(lambda: box.container_id not in containers(owner_mark()))


@pytest.mark.docker
def test_an_engine_that_stays_away_is_given_up(forwarder, monkeypatch):
    monkeypatch.setattr(engine, "RESTART_SECONDS", 1.0)
    forwarder.cut()
    started = time.monotonic()
    with pytest.raises(EngineUnreachable, match="does not answer"):
        open_sandbox(SandboxSpec(), "docker")
    assert 0.9 < time.monotonic() - started < 5
