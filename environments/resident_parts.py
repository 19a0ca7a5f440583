"""Parts of the resident program (see `resident.py`): its link, what it keeps of output, counters.

Sent as source, so the standard library of Python >= 3.8 only.
"""
# ruff: noqa: PTH118, PTH123, PTH208
# (plain strings and bytes for paths: pathlib would be a third of this program's start)

from __future__ import annotations

import contextlib
import json
import os

CHUNK = 1 << 16
CGROUP = "/sys/fs/cgroup"


class Link:
    """The client's end: framed requests in, framed answers out."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink, self.buffer = source, sink, bytearray()
        self.number = 0  # of the request being worked on; its answer carries the same

    def pull(self) -> None:
        data = os.read(self.source, CHUNK)
        if not data:
            os._exit(0)  # the client is gone, and everything in this pid namespace with it
        self.buffer += data

    def line(self) -> bytes | None:
        end = self.buffer.find(b"\n")
        if end < 0:
            return None
        text = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        return text

    def take(self, limit: int) -> bytes:
        data = bytes(self.buffer[:limit])
        del self.buffer[: len(data)]
        return data

    def exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            self.pull()
        return self.take(size)

    def answer(self, head: dict[str, object], body: bytes = b"") -> None:
        head.update(id=self.number, size=len(body))
        for part in (json.dumps(head).encode() + b"\n", body):
            view = memoryview(part)
            while view:
                view = view[os.write(self.sink, view) :]


class Clip:
    """The first and the last bytes of a stream, in bounded memory."""

    def __init__(self, cap: int) -> None:
        self.first, self.last = cap - cap // 2, cap // 2
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.first - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data
            if len(self.tail) > 4 * self.last + CHUNK:
                del self.tail[: len(self.tail) - self.last]

    def kept(self) -> tuple[bytes, bytes]:
        extra = len(self.tail) - self.last
        return bytes(self.head), bytes(self.tail[extra:] if extra > 0 else self.tail)


def counter(name: str, *files: str) -> int | None:
    """The value after `name` in the first of the cgroup files that can be read, else None."""
    for path in files:
        with contextlib.suppress(OSError), open(os.path.join(CGROUP, path)) as handle:
            for line in handle:
                words = line.split()
                if len(words) == 2 and words[0] == name and words[1].isdigit():
                    return int(words[1])
    return None


def oom_kills() -> int:
    return counter("oom_kill", "memory/memory.oom_control", "memory.events") or 0


def pid_refusals() -> int:
    return counter("max", "pids/pids.events", "pids.events") or 0


def processes() -> dict[int, tuple[int, bytes]]:
    """pid -> (parent, start time) of every process but this one."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError), open("/proc/" + name + "/stat", "rb") as handle:
                fields = handle.read().rsplit(b")", 1)[1].split()
                if fields[0] not in (b"Z", b"X"):
                    found[int(name)] = (int(fields[1]), fields[19])
    return found
