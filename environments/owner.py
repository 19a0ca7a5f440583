"""Who made a sandbox, so that what a dead process left behind can be told from what is in use."""

from __future__ import annotations

import os
from pathlib import Path


def _start_time(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if stat[0] in "ZX" else stat[19]


def _machine() -> str:
    """The running kernel and the pid namespace: where a process number means something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown"
    return f"{boot}-{''.join(c for c in space if c.isdigit())}"


def owner_mark() -> str:
    """This process as `pid.starttime.machine`; safe in file names and labels."""
    return f"{os.getpid()}.{_start_time(os.getpid()) or 0}.{_machine()}"


def is_orphaned(mark: str) -> bool | None:
    """Whether the process of the mark is gone. None when it cannot be known from here."""
    try:
        pid, start, machine = mark.split(".")[:3]
        number = int(pid)
    except ValueError:
        return None
    if machine != _machine() or machine == "unknown":
        return None
    return _start_time(number) != start
