"""The client's side of the resident program: one `Sandbox` whatever carries its bytes."""

from __future__ import annotations

import base64
import io
import json
import secrets
import select
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import IO, Any

from environments.base import (
    Patch,
    SandboxError,
    SandboxFileError,
    SandboxLost,
    SandboxSpec,
    StartTimeout,
)
from environments.gitdiff import BaseTree, commit_base, inside, take_diff
from environments.workspace import TRANSFER_RATE, WorkspaceSandbox

ANSWER_GRACE = 20.0  # seconds on top of a command's own limit before the sandbox counts as lost
CHUNK = 1 << 20

# Reads the program from stdin: as an argument it would fill every listing of processes.
BOOTSTRAP = """import os,sys,types
def take(size):
    data=b""
    while len(data)<size:
        part=os.read(0,size-len(data))
        part or os._exit(0)
        data+=part
    return data
for item in sys.argv[1].split(","):
    name,size=item.split(":")
    module=types.ModuleType(name)
    sys.modules[name]=module
    exec(compile(take(int(size)),name,"exec"),module.__dict__)
module.main()"""
PROGRAM = ("environments", "environments.resident_parts", "environments.resident")


def _program() -> list[tuple[str, bytes]]:
    """Modules of the resident program in the order of their import; the package itself is empty."""
    folder = resources.files("environments")
    sources = [folder.joinpath(name.partition(".")[2] + ".py") for name in PROGRAM[1:]]
    return [(PROGRAM[0], b""), *zip(PROGRAM[1:], (s.read_bytes() for s in sources), strict=True)]


def resident_source() -> bytes:
    """The resident program, to be sent as the first bytes."""
    return b"".join(source for _, source in _program())


def resident_argv(
    python: str,
    spec: SandboxSpec,
    rlimits: Mapping[str, int] | None = None,
    cpus: int | None = None,
) -> list[str]:
    """Command line that reads the resident program from stdin and starts it."""
    settings = {"ttl": spec.ttl, "rlimits": dict(rlimits or {}), "cpus": cpus}
    sizes = ",".join(f"{name}:{len(source)}" for name, source in _program())
    return [python, "-ISc", BOOTSTRAP, sizes, json.dumps(settings)]


class Transport(ABC):
    """Carries bytes to and from a resident program over a socket."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._early = bytearray()  # came in while something was sent

    def send(self, data: bytes, deadline: float) -> None:
        """Send all of it before `deadline` (monotonic). Raises OSError, TimeoutError.

        Also looks whether the other end is still there: what nobody reads would wait for ever.
        """
        link = self._connected()
        link.setblocking(False)
        view = memoryview(data)
        while view:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            readable, writable, _ = select.select([link], [link], [], left)
            try:
                if readable:
                    received = link.recv(CHUNK)
                    if not received:
                        raise ConnectionResetError("the other end is gone")
                    self._early += received
                if writable:
                    view = view[link.send(view) :]
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue

    def receive(self, deadline: float) -> bytes:
        """Some bytes, or none at the end. Raises OSError, TimeoutError."""
        if self._early:
            data = bytes(self._early)
            self._early.clear()
            return data
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        link = self._connected()
        link.settimeout(left)
        return link.recv(CHUNK)

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("not connected")
        return self._socket

    @abstractmethod
    def why_lost(self) -> SandboxError:
        """The error that says why the connection ended."""

    @abstractmethod
    def close(self) -> None:
        """End the sandbox and remove all traces; harmless when repeated, never raises."""


class ResidentSandbox(WorkspaceSandbox):
    """A sandbox that is served by the resident program. Used from one thread at a time."""

    kind = "resident"

    def __init__(self, transport: Transport, spec: SandboxSpec, workdir: str) -> None:
        super().__init__(spec, workdir)
        self.python_version: tuple[int, int] = (0, 0)  # of the resident program's interpreter
        self.python = "python3"  # its path inside
        self._transport = transport
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._closed = False
        self._lost: SandboxError | None = None
        self._number = 0  # of the last request

    def _greet(self, deadline: float) -> None:
        """Wait for the resident program. Closes the sandbox when it does not come."""
        try:
            self._send(resident_source(), deadline)
            head, _ = self._receive_answer(deadline, 0)
        except TimeoutError:
            self.close()
            raise StartTimeout(
                f"the sandbox did not answer within {self.spec.start_timeout:g} s; "
                "raise start_timeout or look at the engine's load"
            ) from None
        except BaseException:
            self.close()
            raise
        self.python_version = (head["python"][0], head["python"][1])
        self.python = head["executable"]

    # exchange of messages

    def _fill(self, deadline: float) -> None:
        try:
            data = self._transport.receive(deadline)
        except TimeoutError:
            raise
        except OSError:
            data = b""
        if not data:
            raise self._transport.why_lost()
        self._buffer += data

    def _receive_answer(
        self, deadline: float, number: int, sink: IO[bytes] | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """The answer to request `number`; those to interrupted requests are dropped. With `sink`
        its bytes go there as they come."""
        body = bytearray()
        while True:
            searched = 0
            while (end := self._buffer.find(b"\n", searched)) < 0:
                searched = len(self._buffer)
                self._fill(deadline)
            try:
                head = json.loads(bytes(self._buffer[:end]))
                size, found = head["size"], head["id"]
            except (ValueError, KeyError, TypeError):
                raise SandboxLost("the sandbox sent something that is no answer") from None
            del self._buffer[: end + 1]
            while len(self._buffer) < size:
                self._fill(deadline)
            if found == number:
                if sink is None:
                    body += self._buffer[:size]
                else:
                    sink.write(self._buffer[:size])
            del self._buffer[:size]
            if found == number and not head.get("more"):
                return head, bytes(body)

    def _call(
        self,
        request: dict[str, Any],
        payload: bytes | IO[bytes] | None = None,
        *,
        seconds: float = 0.0,
        answer_size: int = 0,
        sink: IO[bytes] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """One request and its answer. `seconds` is what the work itself may take.

        When the wait is interrupted (Ctrl-C), the sandbox stays usable: the next request ends the
        command that was waited for.
        """
        with self._lock:
            if self._closed:
                raise SandboxLost("the sandbox is closed")
            if self._lost is not None:
                raise type(self._lost)(str(self._lost))
            stream = io.BytesIO(payload or b"") if isinstance(payload, bytes | None) else payload
            size = stream.seek(0, io.SEEK_END)
            stream.seek(0)
            self._number += 1
            line = json.dumps({**request, "size": size, "id": self._number}).encode() + b"\n"
            allowed = seconds + ANSWER_GRACE + (size + answer_size) / TRANSFER_RATE
            deadline = time.monotonic() + allowed
            sent = False
            try:
                self._send(line, deadline)
                while chunk := stream.read(CHUNK):
                    self._send(chunk, deadline)
                sent = True
                return self._receive_answer(deadline, self._number, sink)
            except TimeoutError:
                self._lost = SandboxLost(
                    f"the sandbox did not answer within {allowed:.0f} s and was ended"
                )
            except SandboxError as error:
                self._lost = error
            except BaseException as error:
                if not sent:
                    # Half a request is out: what follows could not be understood.
                    self._lost = SandboxLost(f"interrupted by {type(error).__name__}")
                    self._transport.close()
                raise
            self._transport.close()
            raise self._lost

    def _send(self, data: bytes, deadline: float) -> None:
        try:
            self._transport.send(data, deadline)
        except TimeoutError:
            raise
        except OSError:
            raise self._transport.why_lost() from None

    # commands

    def _run(
        self,
        command: str | Sequence[str],
        timeout: float,
        output_cap: int,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | IO[bytes] | None = None,
        *,
        split: bool = False,
    ) -> tuple[dict[str, Any], bytes]:
        if timeout <= 0 or output_cap < 2:
            raise ValueError(
                f"timeout must be above 0 and output_cap at least 2, not {timeout} and {output_cap}"
            )
        request: dict[str, Any] = {
            "op": "run",
            "timeout": timeout,
            "cap": output_cap,
            "cwd": self._path(cwd or ""),
            "env": dict(env or {}),
            "split": split,
        }
        if isinstance(command, str):
            request["shell"] = base64.b64encode(command.encode("utf-8", "surrogateescape")).decode()
        else:
            request["argv"] = list(command)
            if not request["argv"]:
                raise ValueError("the command is empty")
        return self._call(request, stdin, seconds=timeout, answer_size=output_cap)

    # files

    def _file_call(
        self, action: str, path: str, request: dict[str, Any], payload: bytes | None, size: int
    ) -> bytes:
        full = self._path(path)
        if "\0" in full:
            raise SandboxFileError(f"cannot {action} {path!r}: the name holds a NUL character")
        head, body = self._call({**request, "path": full}, payload, answer_size=size)
        if "error" in head:
            raise SandboxFileError(f"cannot {action} {path}: {head['error']}")
        return body

    def read_file(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        """See `Sandbox.read_file`."""
        request = {"op": "read", "max_bytes": max_bytes}
        return self._file_call("read", path, request, None, max_bytes)

    def write_file(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `Sandbox.write_file`. An existing file keeps its mode; a full disk its content."""
        self._placed = None
        self._file_call("write", path, {"op": "write", "executable": executable}, data, 0)

    def save_folder(self, folder: str, sink: IO[bytes], *, limit: int) -> None:
        """Write a folder of the sandbox (its content, with all that git would leave out) as a tar.

        Raises SandboxFileError when it cannot be read or is larger than `limit` bytes.
        """
        file = f"/var/tmp/nexus-{secrets.token_hex(8)}"
        seconds = 120.0 + limit / TRANSFER_RATE
        try:
            packed = self.run(["tar", "-cf", file, "-C", folder, "."], timeout=seconds, cwd="/")
            if packed.exit_code > 1 or packed.timed_out:  # 1: a file changed meanwhile
                raise SandboxFileError(f"cannot pack {folder}: {packed.text.strip()[-500:]}")
            request = {"op": "read", "max_bytes": limit, "path": file}
            head, _ = self._call(request, answer_size=limit, sink=sink)
            if "error" in head:
                raise SandboxFileError(f"cannot save {folder}: {head['error']}")
        finally:
            self.run(["rm", "-f", file], cwd="/")

    # what changed

    def _commit_base(self) -> BaseTree:
        with inside(self) as place:
            return commit_base(place, self._held, self._placed, self._left_out)

    def _take_diff(self, base: BaseTree) -> Patch:
        with inside(self) as place:
            return take_diff(place, base)

    # end

    def close(self) -> None:
        """See `Sandbox.close`."""
        self._closed = True
        self._transport.close()
        self._drop_tree()
