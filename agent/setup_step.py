"""`--setup CMD`: a command of the user's that runs once, with network, before the agent starts.

What it leaves in the tree and in the home folder is kept under the content of everything it depends
on (the command, the whole tree, the image or this machine's programs, the mounted environment), so
the next run on the same tree begins with it. The base of the patch is marked after it: what it
wrote is there for the agent and is no part of the patch. The agent's own sandbox has no network.

In an image that was named, the whole container is kept, as an image of this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agent.trajectory import write_atomic
from environments import Sandbox, SandboxSpec, open_sandbox
from environments.client import ResidentSandbox
from environments.images import CA_VARIABLES, ca_bundle
from environments.paths import cache_dir, locked
from environments.treearchive import TreeArchive
from environments.workspace import DISK_HOME
from tasks.image import ImageTask, put_files
from tasks.instance import TaskError
from tasks.repo import Furnished, RepoTask

RECIPE = 1  # raise when what is kept changes its form
SECONDS = 1800.0
LAST_LINES = 20
LARGEST = 4 << 30  # bytes of a tree or home that are kept
KEPT = 8  # trees; the one used longest ago goes first
TREE, HOME, FACTS = "tree.tar", "home.tar", "made.json"
IMAGES = "nexus-agent/setup"
MEMORY_MB, PIDS = 4096, 2048
_CA_INSIDE = "/etc/nexus-ca.crt"
_CA_NAMES = (*CA_VARIABLES, "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "CARGO_HTTP_CAINFO")
# What a machine behind a proxy or with an index of its own needs; for the command, kept nowhere.
_PASSED = (
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "UV_INDEX_URL"),
    *("UV_DEFAULT_INDEX", "NPM_CONFIG_REGISTRY", "npm_config_registry", "GOPROXY", "GOSUMDB"),
)
# Folders of programs that package managers make in a tree, put first on PATH where they are there.
_PROGRAMS = (".venv/bin", "venv/bin", "node_modules/.bin")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SetUp:
    """What is reported of it."""

    command: str
    key: str
    cached: bool
    seconds: float
    kept: str  # "tree", or the image's name


def set_up(
    task: RepoTask | ImageTask,
    command: str,
    kind: str,
    *,
    log: Path,
    say: Say = lambda _: None,
    again: bool = False,
) -> SetUp:
    """Run the command, unless it was run on the same before (and not `again`); the task's sandboxes
    begin with what it made from then on.

    `log`: a file for all that the command wrote. Raises TaskError where it fails, SandboxError.
    """
    spec = task.spec()
    key = _key(task, spec, command, kind)
    image = None if spec.image is None else f"{IMAGES}:{key}"
    lock = cache_dir("locks") / f"setup-{key}"
    with locked(lock, lambda: say("another run does the same set-up; waiting")):
        kept = cache_dir("setups") / key
        there = (kept / FACTS).is_file() and (image is None or _image_is_there(image))
        cached, seconds = there and not again, 0.0
        if cached:
            say(f"set-up: `{command}` was run on this before; what it made is taken")
        else:
            say(f"set-up: `{command}`, once, with network")
            began = time.monotonic()
            with open_sandbox(_with_network(spec), kind, progress=say) as box:
                before = _run(task, box, command, log)
                if image is not None:
                    _commit(box, image)
                _keep(box, kept, before, trees=image is None)
            seconds = round(time.monotonic() - began, 1)
            say(f"set-up took {seconds:g} s")
    found = _opened(kept, image)
    if isinstance(task, RepoTask):
        task.furnish(found)
    elif image is not None:
        task.furnish(image, found.made)
    return SetUp(command, key, cached, seconds, image or "tree")


def _key(task: RepoTask | ImageTask, spec: SandboxSpec, command: str, kind: str) -> str:
    """What names the outcome of set-up: everything that it can depend on but the network."""
    archive = task.archive() if isinstance(task, RepoTask) else None
    facts = {
        "recipe": RECIPE,
        "command": command,
        "kind": kind,
        "programs": _image_id(spec.image) if spec.image else _machine(),
        "tree": archive.digest if archive is not None else None,
        "mounts": [[path, inside, _state(Path(path))] for path, inside in spec.mounts.items()],
        "env": dict(spec.env),
        "workdir": spec.workdir,
        "python_path": spec.python_path,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def _machine() -> list[str]:
    try:
        release = Path("/etc/os-release").read_text("utf-8")
    except OSError:
        release = platform.platform()
    return [release, platform.machine(), sys.version, sys.base_prefix]


def _state(folder: Path) -> list[int]:
    """When packages of an environment were last added or removed."""
    places = [folder, *sorted(folder.glob("lib/python*/site-packages")), folder / "conda-meta"]
    return [place.stat().st_mtime_ns for place in places if place.exists()]


def _with_network(spec: SandboxSpec) -> SandboxSpec:
    limits = spec.limits.model_copy(
        update={
            "network": True,
            "memory_mb": _memory(spec),
            "pids": max(PIDS, spec.limits.pids),
            "cpus": float(max(1, os.cpu_count() or 1)),
        }
    )
    mounts = dict(spec.mounts)
    if any(os.environ.get(name) for name in CA_VARIABLES) and (bundle := ca_bundle()):
        digest = hashlib.sha256(bundle).hexdigest()[:16]
        path = cache_dir("certificates") / f"{digest}.crt"
        if not path.exists():
            write_atomic(path, bundle)  # another set-up may mount it at any moment
        mounts[str(path)] = _CA_INSIDE
    env = {**spec.env, "HOME": DISK_HOME}
    return spec.model_copy(update={"limits": limits, "mounts": mounts, "env": env})


def _run(task: RepoTask | ImageTask, box: Sandbox, command: str, log: Path) -> set[str]:
    """The tree, then the command in it. Returns the files that were there before. Raises TaskError
    with its last lines where it fails."""
    if isinstance(task, RepoTask) and task.host_env is not None:
        task.host_env.check(box)
    if isinstance(task, RepoTask):
        put_files(task, box)
    box.run(["mkdir", "-p", DISK_HOME], cwd="/")
    before = _files(box)
    env = {name: value for name in _PASSED if (value := os.environ.get(name))}
    if box.run(["test", "-s", _CA_INSIDE]).exit_code == 0:
        env |= dict.fromkeys(_CA_NAMES, _CA_INSIDE)
    done = box.run(command, timeout=SECONDS, output_cap=4_000_000, env=env)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(done.output)
    if done.exit_code == 0:
        return before
    lines = done.text.strip().splitlines()
    last = "\n".join(f"  {line[:300]}" for line in lines[-LAST_LINES:]) or "  (it wrote nothing)"
    if done.timed_out:
        why = f"did not end within {SECONDS / 60:.0f} minutes"
        remedy = "give one that does, or an image that has the outcome (--image)"
    elif done.out_of_memory:
        why = f"needs more than {_memory(task.spec())} MiB of memory"
        remedy = "let it do less at a time, or give an image that has the outcome (--image)"
    else:
        why = f"ended with exit code {done.exit_code}"
        remedy = (
            f"a program it calls is not in the {box.kind} sandbox: give --image NAME with one that "
            "has it"
            if done.exit_code == 127
            else "mend the command, or leave --setup out"
        )
    raise TaskError(
        f"--setup `{command}` {why} (in {box.workdir}, in a {box.kind} sandbox with network). Its "
        f"last lines:\n{last}\nAll it wrote is in {log}. To do: {remedy}."
    )


def _files(box: Sandbox) -> set[str]:
    """Paths of the files and links in the workspace."""
    argv = ["find", ".", "(", "-type", "f", "-o", "-type", "l", ")", "-print0"]
    found = box.run(argv, timeout=300.0, output_cap=200_000_000).output.split(b"\0")[:-1]
    return {os.fsdecode(name.removeprefix(b"./")) for name in found}


def _memory(spec: SandboxSpec) -> int:
    """MiB that the command may use."""
    return max(MEMORY_MB, spec.limits.memory_mb)


def _keep(box: Sandbox, kept: Path, before: set[str], *, trees: bool) -> None:
    """Save what was made, whole or not at all; with `trees` tree and home, which no image has."""
    if trees and not isinstance(box, ResidentSandbox):
        raise TaskError(
            f"--setup cannot keep what it made in a {box.kind} sandbox; use docker or bubblewrap"
        )
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=kept.parent))
    try:
        if trees and isinstance(box, ResidentSandbox):
            for name, folder in ((TREE, box.workdir), (HOME, DISK_HOME)):
                with (made / name).open("xb") as sink:
                    box.save_folder(folder, sink, limit=LARGEST)
        programs = [
            f"{box.workdir}/{place}"
            for place in _PROGRAMS
            if box.run(["test", "-d", f"{box.workdir}/{place}"]).exit_code == 0
        ]
        facts = {"programs": programs, "made": sorted(_files(box) - before)}
        (made / FACTS).write_text(json.dumps(facts), "utf-8")
        shutil.rmtree(kept, ignore_errors=True)
        made.rename(kept)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    others = sorted(kept.parent.glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime)
    for old in others[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def _opened(kept: Path, image: str | None) -> Furnished:
    os.utime(kept)
    try:
        facts = json.loads((kept / FACTS).read_text("utf-8"))
        return Furnished(
            image=image,
            tree=None if image else TreeArchive.opened(kept / TREE),
            home=None if image else TreeArchive.opened(kept / HOME),
            programs=tuple(facts["programs"]),
            made=tuple(facts["made"]),
        )
    except (OSError, ValueError, KeyError, tarfile.TarError) as error:
        shutil.rmtree(kept, ignore_errors=True)
        raise TaskError(
            f"what set-up had left in {kept} cannot be read ({error}) and was removed; run again"
        ) from error


def _image_id(name: str) -> str:
    from environments.engine import connect, translated
    from environments.images import named_image

    with contextlib.closing(connect(60.0, patience=20.0)) as client:
        named_image(client, name)
        with translated(f"cannot look at image {name}"):
            return str(client.api.inspect_image(name)["Id"])


def _image_is_there(name: str) -> bool:
    from environments.engine import connect
    from environments.images import is_present

    with contextlib.closing(connect(60.0, patience=20.0)) as client:
        return is_present(client, name)


def _commit(box: Sandbox, name: str) -> None:
    from environments.docker import DockerSandbox, commit
    from environments.plain import PlainDockerSandbox

    if not isinstance(box, DockerSandbox | PlainDockerSandbox):
        raise TaskError(f"--setup cannot keep a {box.kind} sandbox of an image; use docker")
    box.run("rm -rf /var/tmp/nexus-*", cwd="/")
    commit(box, name)
