"""Limits for a process tree by control groups, where this process may make one (v1 and v2)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from environments.base import Limits
from environments.owner import is_orphaned

ROOT = Path("/sys/fs/cgroup")
PARENT = "nexus-agent"
PERIOD = 100_000  # microseconds
CONTROLLERS = ("memory", "pids", "cpu")


@dataclass
class ControlGroup:
    """What could be made. `folders` maps a controller to its folder (v2: all to the same)."""

    version: int
    folders: dict[str, Path] = field(default_factory=dict)

    def joins(self) -> list[Path]:
        """Files into which a process writes "0" to enter."""
        return sorted({folder / "cgroup.procs" for folder in self.folders.values()})

    def views(self) -> dict[str, str]:
        """host folder -> path inside at which a sandbox may see its own counters."""
        if self.version == 2:
            return {str(folder): str(ROOT) for folder in self.folders.values()}
        return {
            str(folder): str(ROOT / name)
            for name, folder in self.folders.items()
            if name in ("memory", "pids")
        }

    def remove(self) -> None:
        """End what is still inside and remove the folders; never raises."""
        for folder in set(self.folders.values()):
            _remove(folder)


def version() -> int:
    """2 for the unified hierarchy, 1 for one with a memory controller of its own, 0 for none."""
    if (ROOT / "cgroup.controllers").is_file():
        return 2
    return 1 if (ROOT / "memory").is_dir() else 0


def make_group(name: str, limits: Limits) -> ControlGroup:
    """A group with as many of the limits as can be set here; see its `folders`."""
    number = version()
    group = ControlGroup(number)
    if number == 2:
        _make_unified(group, name, limits)
    elif number == 1:
        for controller in CONTROLLERS:
            for top in _candidates(controller):
                folder = top / PARENT / name
                if _try_make(folder, _settings_v1(controller, limits)):
                    group.folders[controller] = folder
                    break
    return group


def reap_groups() -> None:
    """Remove groups whose maker is dead."""
    for controller in CONTROLLERS if version() == 1 else ("",):
        for top in _candidates(controller):
            with contextlib.suppress(OSError):
                for folder in (top / PARENT).iterdir():
                    if folder.is_dir() and is_orphaned(folder.name):
                        _remove(folder)


def _candidates(controller: str) -> list[Path]:
    """Folders below which a group may be made: the hierarchy's top, then our own group's."""
    top = ROOT / controller if controller else ROOT
    found = [top]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(",") if controller else names == "":
                own = top / path.lstrip("/")
                while own != top and top in own.parents:
                    found.append(own)
                    own = own.parent
    return found


def _settings_v1(controller: str, limits: Limits) -> dict[str, str]:
    memory = str(limits.memory_mb * 1024 * 1024)
    return {
        "memory": {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes?": memory},
        "pids": {"pids.max": str(limits.pids)},
        "cpu": {
            "cpu.cfs_period_us": str(PERIOD),
            "cpu.cfs_quota_us": str(max(1000, int(limits.cpus * PERIOD))),
        },
    }[controller]


def _make_unified(group: ControlGroup, name: str, limits: Limits) -> None:
    settings = {
        "memory": {
            "memory.max": str(limits.memory_mb * 1024 * 1024),
            "memory.swap.max?": "0",
        },
        "pids": {"pids.max": str(limits.pids)},
        "cpu": {"cpu.max": f"{max(1000, int(limits.cpus * PERIOD))} {PERIOD}"},
    }
    for top in _candidates(""):
        parent = top / PARENT
        folder = parent / name
        try:
            parent.mkdir(exist_ok=True)
            for where in (top, parent):
                for controller in CONTROLLERS:
                    with contextlib.suppress(OSError):
                        (where / "cgroup.subtree_control").write_text(f"+{controller}")
            folder.mkdir()
        except OSError:
            continue
        for controller, values in settings.items():
            if _try_set(folder, values):
                group.folders[controller] = folder
        if group.folders and _may_enter(folder):
            return
        group.folders.clear()
        _remove(folder)


def _may_enter(folder: Path) -> bool:
    """Whether a child of ours may enter: delegation can allow making a group and not this."""
    child = os.posix_spawn(
        "/bin/sh", ["sh", "-c", f"echo 0 > {folder}/cgroup.procs"], {"PATH": os.defpath}
    )
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _try_make(folder: Path, values: dict[str, str]) -> bool:
    try:
        folder.mkdir(parents=True)
    except OSError:
        return False
    if _try_set(folder, values) and _may_enter(folder):
        return True
    _remove(folder)
    return False


def _try_set(folder: Path, values: dict[str, str]) -> bool:
    """Set the values; those that end in "?" may be missing on a kernel."""
    for name, value in values.items():
        path = folder / name.rstrip("?")
        try:
            # never create: in a folder that is no control group this must fail
            with os.fdopen(os.open(path, os.O_WRONLY), "w") as handle:
                handle.write(value)
        except OSError:
            if not name.endswith("?"):
                return False
    return True


def _remove(folder: Path) -> None:
    for _ in range(100):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        else:
            return
