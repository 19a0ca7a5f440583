"""One exec of the engine: its input and output over a raw connection, and how it ended."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import docker

from environments.base import SandboxLost
from environments.engine import translated

CHUNK = 1 << 18
END_SECONDS = 5.0  # how long the engine may take to tell an exit code after the output's end
FAILED = b"OCI runtime exec failed"


class ExecStream:
    """Starts a command in a container. `stdin` is read to its end; None gives it nothing to read.

    The client's own time limit does not hold for such a stream, so nothing here blocks.
    Raises SandboxLost, EngineUnreachable, SandboxError.
    """

    def __init__(
        self,
        client: docker.DockerClient,
        container_id: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: IO[bytes] | None,
    ) -> None:
        self._api: Any = client.api
        self._stdin = stdin
        self._pending = memoryview(b"")
        self._raw = bytearray()
        self._begun = False
        self.failure = b""  # what may be the engine's words, if it could not start the command
        with translated("cannot run a command"):
            made = self._api.exec_create(
                container_id, list(argv), stdin=stdin is not None, environment=dict(env)
            )
            self._id = made["Id"]
            self._response = self._api.exec_start(self._id, socket=True)
        self._socket: Any = getattr(self._response, "_sock", self._response)
        self._socket.setblocking(False)

    def exchange(
        self,
        seconds: float,
        on_output: Callable[[bytes], None],
        on_error: Callable[[bytes], None],
    ) -> bool:
        """Wait at most `seconds` for something to read or write. True at the end of output."""
        if self._stdin is not None and not self._pending:
            self._pending = memoryview(self._stdin.read(CHUNK))
            if not self._pending:
                self._stdin = None
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
        writes = [self._socket] if self._pending else []
        readable, writable, _ = select.select([self._socket], writes, [], max(0.0, seconds))
        try:
            if writable:
                self._pending = self._pending[self._socket.send(self._pending) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:  # the command reads no more
            self._stdin, self._pending = None, memoryview(b"")
        if not readable:
            return False
        try:
            data = self._socket.recv(CHUNK)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            data = b""
        if not data:
            return True
        first, self._begun = not self._begun, True
        self._raw += data
        at = 0
        while len(self._raw) - at >= 8:  # frames: stream, three zeros, size, body
            size = int.from_bytes(self._raw[at + 4 : at + 8], "big")
            if len(self._raw) - at < 8 + size:
                break
            body = bytes(self._raw[at + 8 : at + 8 + size])
            if first and body.startswith(FAILED):
                self.failure = body
            elif self._raw[at] == 2:
                on_error(body)
            else:
                on_output(body)
            at += 8 + size
        del self._raw[:at]
        return False

    def _look(self) -> dict[str, Any]:
        with translated("cannot ask after a command"):
            found: dict[str, Any] = self._api.exec_inspect(self._id)
        return found

    def running(self) -> bool:
        """Whether the command itself still runs (its children may)."""
        return bool(self._look()["Running"])

    def exit_code(self, seconds: float) -> int:
        """Its exit code, once the output has ended. SandboxLost if it never comes."""
        ends = time.monotonic() + END_SECONDS + seconds
        while time.monotonic() < ends:
            found = self._look()
            if not found["Running"] and found["ExitCode"] is not None:
                return int(found["ExitCode"])
            time.sleep(0.005)
        raise SandboxLost("the connection to a command broke while it ran")

    def close(self) -> None:
        """Leave the stream; a command that still runs goes on. Never raises."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for item in (self._socket, self._response):
            with contextlib.suppress(OSError):
                item.close()
