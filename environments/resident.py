"""The program that lives in a sandbox as process 1 and does what the client asks.

It is sent as source on stdin, so it uses the standard library of Python >= 3.8 only.
Requests come on stdin, answers go to stdout; each is one JSON line whose `size` counts the raw
bytes that follow it. Requests: `run` (the bytes are the command's stdin), `read`, `write`.
A request that comes while a command runs ends that command: its client waits no longer.

Being process 1 is what makes its promises hold: nothing inside can kill it, every orphan becomes
its child, and when it leaves, the kernel ends all other processes. It leaves when stdin ends, that
is when the client is gone, and when its time to live is over.
"""
# ruff: noqa: PTH103, PTH105, PTH108, PTH116, PTH120
# (plain strings and bytes for paths: pathlib would be a third of this program's start)

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import random
import resource
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

from environments.resident_parts import CHUNK, Clip, Link, oom_kills, pid_refusals, processes

GRACE = 0.2  # seconds to wait for output that a background child still holds open
INPUT_AHEAD = 1 << 20  # bytes of stdin taken from the client before the command asks for them
SHELL_ARGUMENT = 100_000  # Linux refuses one argument of 128 KiB; longer text goes through a file


class Resident:
    def __init__(self, link: Link, ends_at: float) -> None:
        self.link, self.ends_at = link, ends_at
        self.drains: list[int] = []  # output pipes that background processes still hold
        self.statuses: dict[int, int] = {}  # pid -> wait status of children already reaped
        self.wake, wake_end = os.pipe()
        for end in (self.wake, wake_end):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        # Children are to be the out-of-memory killer's first choice. The file is opened before
        # this process closes itself to the others: afterwards it may not be allowed to.
        self.oom: int | None = None
        with contextlib.suppress(OSError):
            self.oom = os.open("/proc/self/oom_score_adj", os.O_RDWR)
            self.oom_own = os.read(self.oom, 16)
        # Same user, so without this a command could write into our memory or descriptors.
        with contextlib.suppress(ImportError, OSError):
            import ctypes

            ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE

    # waiting

    def reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake, 512):
                pass
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self.statuses[pid] = status

    def wait(
        self, seconds: float, reads: Iterable[int] = (), writes: Iterable[int] = ()
    ) -> set[int]:
        """Wait for descriptors; keeps draining what background processes write."""
        left = self.ends_at - time.monotonic()
        if left <= 0:
            os._exit(0)
        poll = select.poll()
        for fd in (self.wake, *reads, *self.drains):
            poll.register(fd, select.POLLIN)
        for fd in writes:
            poll.register(fd, select.POLLOUT)
        ready = {fd for fd, _ in poll.poll(1000 * max(0.0, min(seconds, left, 3600.0)))}
        for fd in [fd for fd in self.drains if fd in ready]:
            with contextlib.suppress(BlockingIOError):
                if not os.read(fd, CHUNK):
                    self.drains.remove(fd)
                    os.close(fd)
        if self.wake in ready:
            self.reap()
        return ready

    # ending processes

    def kill_everything(self) -> None:
        """One kill(-1) reaches all at once, so not even a fork bomb outruns it."""
        for attempt in range(500):
            try:
                os.kill(-1, signal.SIGKILL)
            except OSError:
                return
            self.reap()
            if attempt > 5:
                time.sleep(0.01)

    def kill_command(self, before: dict[int, tuple[int, bytes]]) -> None:
        """End what was started since `before`, whatever session or parent it moved to.

        A process belongs to an earlier command if a process of `before` is among its ancestors.
        If that does not come to an end (a fork bomb beside an earlier server), all are ended.
        """
        for attempt in range(30 if before else 0):
            self.reap()
            now = processes()
            doomed = []
            for pid in now:
                seen, at = set(), pid
                while at in now and at not in seen:
                    if at in before and before[at][1] == now[at][1]:
                        break
                    seen.add(at)
                    at = now[at][0]
                else:
                    doomed.append(pid)
            if not doomed:
                return
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001 * attempt)
        self.kill_everything()

    # running

    def spawn(self, request: dict[str, Any], stdin: int, stdout: int, stderr: int) -> int:
        argv, script = request.get("argv"), None
        if argv is None:
            text = base64.b64decode(request["shell"])
            argv = ["bash", "-c", text]
            if len(text) > SHELL_ARGUMENT:
                script = os.memfd_create("command", 0)
                with os.fdopen(os.dup(script), "wb") as handle:
                    handle.write(text)
                argv = ["bash", f"/proc/self/fd/{script}"]
        env = dict(os.environ)
        env.update(request.get("env") or {})
        try:
            if self.oom is not None:
                os.pwrite(self.oom, b"1000", 0)
            child = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=request["cwd"],
                env=env,
                start_new_session=True,
                pass_fds=() if script is None else (script,),
            )
        finally:
            if self.oom is not None:
                os.pwrite(self.oom, self.oom_own, 0)
            if script is not None:
                os.close(script)
        child.returncode = 0  # `reap` takes its status; Popen must not wait for it
        return child.pid

    def start(
        self, request: dict[str, Any], fds: tuple[int, int, int]
    ) -> tuple[int, tuple[int, str] | None]:
        """pid and None, or 0 and why the command could not be started: exit code and text."""
        try:
            return self.spawn(request, *fds), None
        except BlockingIOError:
            # Every process is taken, by something an earlier command left. Only ending it helps.
            self.kill_everything()
            return 0, (
                126,
                "the limit on processes was reached: all processes left by earlier commands "
                "were ended; run the command again",
            )
        except (OSError, ValueError) as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return 0, (code, str(error))

    def run(self, request: dict[str, Any]) -> None:
        started = time.monotonic()
        ends = started + request["timeout"]
        left = request["size"]  # bytes of stdin that are still to come from the client
        self.reap()
        self.statuses.clear()
        before, ooms, refusals = processes(), oom_kills(), pid_refusals()

        out_read, out_write = os.pipe()
        clips = {out_read: Clip(request["cap"])}
        err_write = out_write
        if request.get("split"):
            err_read, err_write = os.pipe()
            clips[err_read] = Clip(8000)
        feed: int | None = None
        stdin = os.open(os.devnull, os.O_RDONLY)
        if left:
            os.close(stdin)
            stdin, feed = os.pipe()
            os.set_blocking(feed, False)
        pid, failure = self.start(request, (stdin, out_write, err_write))
        for fd in {stdin, out_write, err_write}:
            os.close(fd)
        for fd in clips:
            os.set_blocking(fd, False)
        open_reads = set(clips)
        pending = memoryview(b"")
        timed_out = cancelled = False
        died: float | None = None

        while failure is None:
            now = time.monotonic()
            if died is None and pid in self.statuses:
                died = now
            if died is not None and (not open_reads or now - died > GRACE):
                break
            if now >= ends:
                timed_out = died is None
                break
            if len(self.link.buffer) > left:
                cancelled = died is None  # the client waits no longer and asks for something else
                break
            if feed is None and left:
                left -= len(self.link.take(left))  # the command reads no more
            if feed is not None and not pending:
                pending = memoryview(self.link.take(min(left, INPUT_AHEAD)))
                left -= len(pending)
                if not pending and not left:
                    os.close(feed)
                    feed = None
            reads = set(open_reads)
            if left == 0 or len(self.link.buffer) < INPUT_AHEAD:
                reads.add(self.link.source)
            writes = (feed,) if feed is not None and pending else ()
            ready = self.wait(min(ends, (died or ends) + GRACE + 0.001) - now, reads, writes)
            if self.link.source in ready:
                self.link.pull()
            for fd in open_reads & ready:
                try:
                    data = os.read(fd, CHUNK)
                except BlockingIOError:
                    continue
                if data:
                    clips[fd].add(data)
                else:
                    open_reads.discard(fd)
            if feed is not None and feed in ready and pending:
                try:
                    pending = pending[os.write(feed, pending) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    os.close(feed)
                    feed, pending = None, memoryview(b"")

        refused = pid_refusals() - refusals
        if timed_out or cancelled or (refused and len(processes()) > 8):
            self.kill_command(before)
        status = self.statuses.get(pid)
        for fd in clips:
            if fd in open_reads and not timed_out and not cancelled:
                self.drains.append(fd)  # closing it would break the server that writes to it
            else:
                os.close(fd)
        if feed is not None:
            os.close(feed)
        while left:
            left -= len(self.link.exactly(min(left, CHUNK)))

        code = 124 if timed_out or status is None else os.WEXITSTATUS(status)
        if not timed_out and status is not None and os.WIFSIGNALED(status):
            code = 128 + os.WTERMSIG(status)
        if failure is not None:
            code, text = failure
            clips[out_read].add(f"cannot start the command: {text}\n".encode())
            refused = refused or text.startswith("the limit on processes")
        head, tail = clips[out_read].kept()
        reply: dict[str, object] = {
            "code": code,
            "head": len(head),
            "total": clips[out_read].total,
            "timed_out": timed_out,
            "oom": oom_kills() > ooms,
            "pids": bool(refused),
            "seconds": time.monotonic() - started,
        }
        if request.get("split"):
            reply["stderr"] = b"".join(clips[err_read].kept()).decode("utf-8", "replace")
        self.link.answer(reply, head + tail)

    # files

    def read(self, request: dict[str, Any]) -> None:
        # O_NONBLOCK: opening a pipe that nobody writes to must not hang process 1
        fd = os.open(os.fsencode(request["path"]), os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as handle:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
                raise OSError(errno.EINVAL, f"it is {kind}")
            total = 0
            while data := handle.read(INPUT_AHEAD):
                total += len(data)
                if total > request["max_bytes"]:
                    raise OSError(errno.EFBIG, f"it is larger than {request['max_bytes']} bytes")
                self.link.answer({"more": True}, data)
        self.link.answer({"ok": True})

    def write(self, request: dict[str, Any]) -> None:
        """Whole or not at all: a full disk leaves the old content."""
        size = request["size"]
        path = os.path.realpath(os.fsencode(request["path"]))
        temporary, mode = path + b".%d~" % time.monotonic_ns(), 0o644
        failure: OSError | None = None
        try:
            with contextlib.suppress(FileNotFoundError):
                mode = os.stat(path).st_mode
                if not stat.S_ISREG(mode):
                    raise OSError(errno.EINVAL, "it is not a regular file")
            if request["executable"]:
                mode |= 0o111
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                while size:
                    if not self.link.buffer:
                        self.link.pull()
                    data = self.link.take(min(size, INPUT_AHEAD))
                    size -= len(data)
                    view = memoryview(data)
                    while view:
                        view = view[os.write(fd, view) :]
                os.fchmod(fd, stat.S_IMODE(mode))
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except OSError as error:
            failure = error
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        while size:  # what the client still sends is not the next request
            size -= len(self.link.exactly(min(size, CHUNK)))
        if failure is not None:
            raise failure
        self.link.answer({"ok": True})

    def serve(self) -> None:
        version = list(sys.version_info[:2])
        self.link.answer({"ready": True, "python": version, "executable": sys.executable})
        handlers = {"run": self.run, "read": self.read, "write": self.write}
        while True:
            line = self.link.line()
            if line is None:
                if self.link.source in self.wait(3600.0, (self.link.source,)):
                    self.link.pull()
                continue
            request = json.loads(line)
            self.link.number = request["id"]
            try:
                handlers[request["op"]](request)
            except (OSError, ValueError, MemoryError) as error:
                text = getattr(error, "strerror", None) or str(error) or type(error).__name__
                self.link.answer({"error": text, "errno": getattr(error, "errno", None)})


def main() -> None:
    settings = json.loads(sys.argv[2])
    # Process 1 gets no signal for which it has no handler, so a command cannot end it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    source, sink = os.dup(0), os.dup(1)  # not inherited by commands
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for name, value in (settings.get("rlimits") or {}).items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if settings.get("cpus"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, random.sample(allowed, min(settings["cpus"], len(allowed))))
    os.umask(0o022)
    Resident(Link(source, sink), time.monotonic() + settings["ttl"]).serve()
