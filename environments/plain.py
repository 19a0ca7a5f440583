"""Sandboxes in Docker containers whose image has no Python: each command is an exec of the engine.

Slower than the resident way (some 80 ms a command), and the same in what it promises. The engine
streams all output here, where it is capped; process 1 is a shell that ends processes (`keeper.py`).
"""

from __future__ import annotations

import contextlib
import io
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

import docker

from environments.base import (
    Patch,
    SandboxError,
    SandboxFileError,
    SandboxLost,
    SandboxSpec,
    StartTimeout,
)
from environments.docker import ContainerTransport
from environments.exec_stream import ExecStream
from environments.gitdiff import BaseTree, commit_base, take_diff
from environments.image_facts import ImageFacts
from environments.keeper import KEEPER
from environments.resident_parts import Clip
from environments.treecopy import beside
from environments.workspace import TRANSFER_RATE, WorkspaceSandbox

GRACE = 0.2  # seconds to wait for output that a background child still holds open
LOOK = 0.2  # seconds of silence after which the engine is asked whether the command has ended
KEEPER_SECONDS = 20.0  # for any answer of process 1
SHELL_ARGUMENT = 100_000  # Linux refuses one argument of 128 KiB; longer text goes through a file

# $1: folder, $2: 1 to keep stderr apart; then the command
START = r"""
{ echo 1000 > /proc/self/oom_score_adj; } 2>/dev/null
cd -- "$1" || exit 126
if [ "$2" = 1 ]; then shift 2; exec "$@"; fi
shift 2; exec "$@" 2>&1
"""
# $1: path, $2: largest size
READ = r"""
if [ -d "$1" ]; then echo "it is a folder" >&2; exit 1; fi
if [ -e "$1" ] && [ ! -f "$1" ]; then echo "it is not a regular file" >&2; exit 1; fi
exec head -c "$2" < "$1"
"""
# $1: path, $2: size, $3: 1 for executable, $4: a random name. Whole or not at all.
WRITE = r"""
fail() { rm -f -- "$tmp"; echo "$1" >&2; exit 1; }
path=$1; tmp=
if [ -L "$path" ]; then path=$(readlink -f -- "$path") || fail "it is a link to nowhere"; fi
if [ -e "$path" ] && [ ! -f "$path" ]; then fail "it is not a regular file"; fi
mode=$(stat -c %a -- "$path" 2>/dev/null) || mode=644
mkdir -p -- "${path%/*}/" || exit 1
tmp=$path.$4~
cat > "$tmp" || fail "it cannot be written"
[ "$(wc -c < "$tmp")" -eq "$2" ] || fail "not all of it arrived"
chmod "$mode" "$tmp" && { [ "$3" = 0 ] || chmod a+x "$tmp"; } || fail "its mode cannot be set"
mv -f -- "$tmp" "$path" || fail "it cannot be put in place"
"""


class PlainDockerSandbox(WorkspaceSandbox):
    """A container without Python. Opened by `environments.docker.open_docker`.

    A command could hold the keeper's stdin open, so that the container outlives a client that is
    killed; it is then removed by the next start of any client, `agent clean`, or never before its
    time is over: by label.
    """

    kind = "docker"
    way = "plain"

    def __init__(
        self,
        client: docker.DockerClient,
        transport: ContainerTransport,
        spec: SandboxSpec,
        workdir: str,
        image: str,
        facts: ImageFacts,
        deadline: float,
    ) -> None:
        super().__init__(spec, workdir)
        self.image = image
        self.container_id = transport.container_id
        self.facts = facts
        self._client = client
        self._transport = transport
        self._lines = bytearray()
        self._number = 0
        self._closed = False
        self._lost: SandboxError | None = None
        self._unfinished = False  # a command was interrupted here and may still run there
        self._lock = threading.RLock()
        try:
            transport.start()
            transport.send(KEEPER.encode(), deadline)
            while self._line(deadline) != ["ready"]:
                pass
        except TimeoutError:
            self.close()
            raise StartTimeout(
                f"the sandbox did not answer within {spec.start_timeout:g} s; "
                "raise start_timeout or look at the engine's load"
            ) from None
        except SandboxLost as error:
            self.close()
            raise SandboxError(f"image {image} cannot run a shell as process 1: {error}") from error
        except BaseException:
            self.close()
            raise
        self._timer = threading.Timer(spec.ttl, self._expire)
        self._timer.daemon = True
        self._timer.start()

    # process 1

    def _line(self, deadline: float) -> list[str]:
        """The words of its next line. Raises TimeoutError, SandboxLost, EngineUnreachable."""
        while b"\n" not in self._lines:
            try:
                data = self._transport.receive(deadline)
            except TimeoutError:
                raise
            except OSError:
                data = b""
            if not data:
                raise self._transport.why_lost()
            self._lines += data
            del self._lines[:-65536]  # a command that writes to it gains nothing
        line, _, rest = bytes(self._lines).partition(b"\n")
        self._lines = bytearray(rest)
        return line.decode("utf-8", "replace").split()

    def _ask(self, word: str) -> tuple[int, int, int]:
        """Kills for lack of memory, refused forks, living processes."""
        self._number += 1
        # drawn afresh: a command that could write to process 1's output cannot guess it
        tag = f"{self._number}.{secrets.token_hex(8)}"
        deadline = time.monotonic() + KEEPER_SECONDS
        try:
            self._transport.send(f"{word} {tag}\n".encode(), deadline)
            while True:
                words = self._line(deadline)
                if len(words) == 4 and words[0] == tag and all(w.isdigit() for w in words[1:]):
                    return int(words[1]), int(words[2]), int(words[3])
        except TimeoutError:
            error: SandboxError = SandboxLost(
                f"the sandbox did not answer within {KEEPER_SECONDS:g} s and was ended"
            )
        except OSError:
            error = self._transport.why_lost()
        except SandboxError as lost:
            error = lost
        raise self._gone(error)

    def _gone(self, error: SandboxError) -> SandboxError:
        """Note that the sandbox is lost, remove what is left of it, and give the error back."""
        self._lost = self._lost or error
        self._transport.close()
        return self._lost

    def _expire(self) -> None:
        if self._lost is None and not self._closed:
            self._lost = SandboxLost(f"the sandbox's time of {self.spec.ttl:g} s is over")
            self._transport.close()

    def _check_alive(self) -> None:
        if self._closed:
            raise SandboxLost("the sandbox is closed")
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))

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
        if not command and not isinstance(command, str):
            raise ValueError("the command is empty")
        out, err = Clip(output_cap), Clip(8000)
        with self._lock:
            argv = self._argv(command)
            head = self._exec(
                argv, timeout, cwd or "", env, stdin, out.add, err.add if split else None
            )
        first, last = out.kept()
        head |= {"head": len(first), "total": out.total}
        if split:
            head["stderr"] = b"".join(err.kept()).decode("utf-8", "replace")
        return head, first + last

    def _argv(self, command: str | Sequence[str]) -> list[str]:
        if not isinstance(command, str):
            return list(command)
        shell = "bash" if "bash" in self.facts.programs else "sh"
        text = command.encode("utf-8", "surrogateescape")
        if len(text) <= SHELL_ARGUMENT:
            return [shell, "-c", command]
        path = f"/var/tmp/nexus-{secrets.token_hex(8)}"
        self.write_file(path, text)
        start = 'exec 9< "$1" && rm -f -- "$1" && exec "$2" /proc/self/fd/9'
        return ["sh", "-c", start, "sh", path, shell]

    def _exec(
        self,
        argv: Sequence[str],
        timeout: float,
        cwd: str,
        env: Mapping[str, str] | None,
        stdin: bytes | IO[bytes] | None,
        on_output: Callable[[bytes], None],
        on_error: Callable[[bytes], None] | None,
    ) -> dict[str, Any]:
        """Run an argv to its end or its limit; what it writes goes to the callbacks."""
        self._check_alive()
        if self._unfinished:
            self._ask("end")
            self._unfinished = False
        ooms, refusals, _ = self._ask("mark")
        started = time.monotonic()
        source = io.BytesIO(stdin or b"") if isinstance(stdin, bytes | None) else stdin
        source.seek(0)
        prefix = ["sh", "-c", START, "sh", self._path(cwd), "1" if on_error else "0"]
        try:
            stream = ExecStream(
                self._client,
                self.container_id,
                [*prefix, *argv],
                env or {},
                None if stdin is None or stdin == b"" else source,
            )
            self._unfinished = True
            timed_out = False
            with contextlib.closing(stream):
                timed_out = not self._stream(stream, started + timeout, on_output, on_error)
                code = 124 if timed_out else stream.exit_code(GRACE)
        except SandboxError as error:
            raise self._gone(self._lost_or(error)) from error
        self._unfinished = False
        # only now: an exec that is killed while nobody reads its output blocks the engine
        if timed_out:
            self._ask("end")
        ooms_now, refusals_now, living = self._ask("count")
        refused = refusals_now > refusals
        if stream.failure and code != 126:  # the command's own words after all
            on_output(stream.failure)
        elif stream.failure:
            text = stream.failure.decode("utf-8", "replace").strip()
            if refused or "temporarily unavailable" in text:
                self._ask("all")
                refused = True
                text = (
                    "the limit on processes was reached: all processes left by earlier commands "
                    "were ended; run the command again"
                )
            on_output(f"cannot start the command: {text}\n".encode())
            code = 126
        elif refused and living > 8 and not timed_out:
            self._ask("end")
        return {
            "code": code,
            "timed_out": timed_out,
            "oom": ooms_now > ooms,
            "pids": refused,
            "seconds": time.monotonic() - started,
        }

    def _stream(
        self,
        stream: ExecStream,
        ends: float,
        on_output: Callable[[bytes], None],
        on_error: Callable[[bytes], None] | None,
    ) -> bool:
        """Whether the command ended by itself before `ends`."""
        look, died = time.monotonic() + LOOK, None
        while (now := time.monotonic()) < ends:
            if died is not None and now >= died + GRACE:
                return True
            if stream.exchange(min(ends - now, 0.05), on_output, on_error or on_output):
                return True
            if died is None and time.monotonic() >= look:
                look = time.monotonic() + LOOK
                died = None if stream.running() else time.monotonic()
        return died is not None

    def _lost_or(self, error: SandboxError) -> SandboxError:
        """The reason behind an engine's error in the middle of a command."""
        if isinstance(error, SandboxLost):
            return self._transport.why_lost()
        if "is not running" in str(error) or "is paused" in str(error):
            return SandboxLost(str(error))
        return error

    # files

    def _file(
        self, action: str, path: str, script: list[str], data: bytes | None, cap: int
    ) -> bytes:
        if "\0" in path:
            raise SandboxFileError(f"cannot {action} {path!r}: the name holds a NUL character")
        head, body = self._run(
            ["sh", "-c", *script],
            KEEPER_SECONDS + (len(data or b"") + cap) / TRANSFER_RATE,
            max(2, 2 * cap),
            "/",
            None,
            data,
            split=True,
        )
        if head["code"]:
            reason = head["stderr"].strip() or f"status {head['code']}"
            raise SandboxFileError(f"cannot {action} {path}: {reason}")
        return body

    def read_file(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        """See `Sandbox.read_file`."""
        script = [READ, "sh", self._path(path), str(max_bytes + 1)]
        body = self._file("read", path, script, None, max_bytes + 1)
        if len(body) > max_bytes:
            raise SandboxFileError(f"cannot read {path}: it is larger than {max_bytes} bytes")
        return body

    def write_file(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `Sandbox.write_file`. An existing file keeps its mode; a full disk its content."""
        self._placed = None
        size, mode = str(len(data)), str(int(executable))
        self._file(
            "write",
            path,
            [WRITE, "sh", self._path(path), size, mode, secrets.token_hex(8)],
            data,
            2,
        )

    # what changed

    def copy_out(self, argv: Sequence[str], sink: IO[bytes], seconds: float, limit: int) -> bytes:
        """Run an argv whose stdout goes to a file; returns its stderr. SandboxError beyond
        `limit` bytes, or when it fails."""
        missing = {"tar", "find", "xargs"} - set(self.facts.programs)
        if missing:
            raise SandboxError(
                f"image {self.image} has neither Python nor {', '.join(sorted(missing))}: "
                "its workspace cannot be compared"
            )
        said = bytearray()

        def keep(data: bytes) -> None:
            if sink.tell() + len(data) > limit:
                raise SandboxError(f"the workspace is larger than {limit} bytes")
            sink.write(data)

        with self._lock:
            head = self._exec(argv, seconds, "/", None, None, keep, said.extend)
        if head["code"]:
            raise SandboxError(f"the workspace could not be copied: {bytes(said[-1000:])!r}")
        return bytes(said)

    def _commit_base(self) -> BaseTree:
        with beside(self) as (place, _):
            return commit_base(place, self._held, self._placed, self._left_out)

    def _take_diff(self, base: BaseTree) -> Patch:
        with beside(self) as (place, left_out):
            patch = take_diff(place, base)
        return replace(patch, skipped=(*patch.skipped, *left_out))

    # end

    def close(self) -> None:
        """See `Sandbox.close`."""
        self._closed = True
        if hasattr(self, "_timer"):
            self._timer.cancel()
        self._transport.close()
        self._drop_tree()
