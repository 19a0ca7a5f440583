"""How sandboxes end: by themselves, by accident, and with the death of whoever opened them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from environments import (
    SandboxError,
    SandboxLost,
    SandboxSpec,
    StartTimeout,
    bubblewrap,
    clean,
    open_sandbox,
)
from environments.bubblewrap import why_unusable
from environments.owner import is_orphaned, owner_mark
from environments.paths import cache_dir
from tests.environments.plain_image import KIND


def containers(mark: str) -> list[str]:
    """Sandboxes in Docker that the owner of the mark made."""
    import docker

    client = docker.from_env()
    try:
        found = client.api.containers(all=True, filters={"label": f"nexus.owner={mark}"})
        return [item["Id"] for item in found]
    finally:
        client.close()


def ours(seconds: int) -> str:
    """An argument of `sleep` that no other suite on this machine gives."""
    return f"{seconds}.{os.getpid()}"


def processes_with(argument: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and argument.encode() in (
                folder / "cmdline"
            ).read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def folders(mark: str) -> list[Path]:
    return [path for path in cache_dir("sandboxes").iterdir() if path.name.startswith(mark)]


def groups(mark: str) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/nexus-agent/{mark}*"))


def traces(mark: str) -> set[Path]:
    """What bubblewrap sandboxes of one process have on the host."""
    return {*folders(mark), *groups(mark)}


def eventually(condition, seconds: float = 5.0) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())


CLIENT = """
import sys, time
from environments import open_sandbox, SandboxSpec
from environments.owner import owner_mark
box = open_sandbox(SandboxSpec(), sys.argv[1])
box.run(f"setsid sleep {sys.argv[3]} &")
print(owner_mark(), flush=True)
if sys.argv[2] == "idle":
    time.sleep(600)
box.run(f"sleep {sys.argv[3]}", timeout=600)
"""


@pytest.mark.parametrize("state", ["idle", "in a command"])
def test_nothing_is_left_after_the_client_is_killed(sandbox_kind, state, tmp_path, monkeypatch):
    if sandbox_kind == "bubblewrap":  # whoever opens one in the same place removes what is left
        monkeypatch.setenv("NEXUS_CACHE", str(tmp_path))
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, sandbox_kind, state, ours(98765)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        mark = client.stdout.readline().strip()
        assert eventually(lambda: len(processes_with(ours(98765))) >= (1 if state == "idle" else 2))
        if sandbox_kind != "bubblewrap":
            assert len(containers(mark)) == 1
    finally:
        client.kill()
        client.wait()
        client.stdout.close()
    assert eventually(lambda: not processes_with(ours(98765)))
    if sandbox_kind != "bubblewrap":
        assert eventually(lambda: not containers(mark))
    else:
        assert len(folders(mark)) == 1
        clean()
        assert not folders(mark)
        assert not groups(mark)


def test_close_leaves_nothing_and_may_be_repeated(sandbox_kind):
    mark = owner_mark()
    # The suite's own sandbox of this process may be open.
    before = traces(mark) if sandbox_kind == "bubblewrap" else None
    box = open_sandbox(SandboxSpec(), sandbox_kind)
    box.run(f"setsid sleep {ours(98764)} & mkdir locked; touch locked/f; chmod 000 locked")
    assert processes_with(ours(98764))
    box.close()
    box.close()
    assert not processes_with(ours(98764))
    if sandbox_kind != "bubblewrap":
        assert box.container_id not in containers(mark)
    else:
        assert traces(mark) == before
    with pytest.raises(SandboxLost, match="closed"):
        box.run("true")


def children() -> set[int]:
    """Processes that this one started, those included that ended and were not waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def test_what_takes_long_to_remove_goes_beside_and_leaves_no_process(tmp_path):
    before = children()
    (tmp_path / "left" / "below").mkdir(parents=True)
    bubblewrap._discard(tmp_path / "left", patience=0.0)
    assert eventually(lambda: not (tmp_path / "left").exists())
    assert eventually(lambda: children() == before)


def test_closing_from_another_thread_frees_a_command_that_waits(sandbox_kind):
    """The command's reader must see the end, not a socket that took the closed one's number."""
    for _ in range(3):
        box = open_sandbox(SandboxSpec(), sandbox_kind)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(box.run, "sleep 40", timeout=45)
            time.sleep(0.5)
            begun = time.monotonic()
            box.close()
            with pytest.raises(SandboxError):
                waiting.result(timeout=30)
            assert time.monotonic() - begun < 20


def test_an_error_in_the_with_block_closes(sandbox_kind):
    def work() -> None:
        with open_sandbox(SandboxSpec(), sandbox_kind) as box:
            box.run(f"sleep {ours(98763)} &")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert not processes_with(ours(98763))


def test_a_sandbox_opened_by_a_thread_outlives_it(sandbox_kind):
    opened = []
    thread = threading.Thread(
        target=lambda: opened.append(open_sandbox(SandboxSpec(), sandbox_kind))
    )
    thread.start()
    thread.join()
    time.sleep(0.7)
    with opened[0] as box:
        assert box.run("echo alive").text == "alive\n"


def end_from_outside(box) -> None:
    if box.kind == "docker":
        import docker

        client = docker.from_env()
        client.api.kill(box.container_id)
        client.close()
    else:
        os.kill(box._transport.pid, signal.SIGKILL)


def test_ended_from_outside_in_a_command(sandbox):
    timer = threading.Timer(0.5, end_from_outside, (sandbox,))
    timer.start()
    started = time.monotonic()
    with pytest.raises(SandboxLost):
        sandbox.run("sleep 60", timeout=60)
    assert time.monotonic() - started < 8
    for use in (lambda: sandbox.run("true"), lambda: sandbox.read_file("x"), sandbox.mark_base):
        with pytest.raises(SandboxLost):
            use()
    timer.join()


def test_ended_from_outside_while_idle(sandbox):
    end_from_outside(sandbox)
    time.sleep(0.3)
    started = time.monotonic()
    with pytest.raises(SandboxLost):
        sandbox.write_file("f", b"x" * 5_000_000)
    assert time.monotonic() - started < 8


@pytest.mark.docker
def test_removed_from_outside():
    import docker

    with open_sandbox(SandboxSpec(), "docker") as box:
        client = docker.from_env()
        client.api.remove_container(box.container_id, force=True)
        client.close()
        with pytest.raises(SandboxLost):
            box.run("true")


def test_time_to_live(open_box):
    box = open_box(ttl=1.0)
    with pytest.raises(SandboxLost):
        box.run("sleep 60")
    box = open_box(ttl=0.5)
    time.sleep(0.8)
    with pytest.raises(SandboxLost):
        box.run("true")


def test_start_timeout(sandbox_kind):
    mark = owner_mark()
    before = containers(mark) if sandbox_kind != "bubblewrap" else folders(mark)
    with pytest.raises(StartTimeout, match="start"):
        open_sandbox(SandboxSpec(start_timeout=0.001), sandbox_kind)
    after = containers(mark) if sandbox_kind != "bubblewrap" else folders(mark)
    assert sorted(after) == sorted(before)


def test_interrupt_leaves_the_sandbox_usable(sandbox):
    sandbox.mark_base()
    sandbox.write_file("work.txt", b"so far\n")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.run(f"sleep {ours(98762)}", timeout=60)
    started = time.monotonic()
    assert sandbox.run("echo now").text == "now\n"  # ends the command that was waited for
    assert not processes_with(ours(98762))
    assert sandbox.diff().files == ("work.txt",)
    assert time.monotonic() - started < 8
    assert sandbox.run("echo next").text == "next\n"


@pytest.mark.docker
def test_reaping_takes_orphans_and_leaves_the_living():
    import docker

    from environments.docker import EXPIRES, LABEL, OWNER

    client = docker.from_env()
    machine = owner_mark().split(".", 2)[2]

    def container(owner: str, expires: float) -> str:
        with open_sandbox(SandboxSpec(), "docker") as box:
            image = box.image
        labels = {LABEL: "1", OWNER: owner, EXPIRES: str(expires)}
        return client.api.create_container(image, ["sleep", "60"], labels=labels)["Id"]

    later = time.time() + 1000
    orphan = container(f"999999.1.{machine}", later)
    expired = container("1.1.another-machine", time.time() - 1)
    foreign = container("1.1.another-machine", later)
    try:
        with open_sandbox(SandboxSpec(), "docker") as box:
            assert box.run("echo alive").text == "alive\n"
            clean()
            there = {c["Id"] for c in client.api.containers(all=True)}
            assert foreign in there
            assert not {orphan, expired} & there
            assert box.run("echo alive").text == "alive\n"
    finally:
        client.api.remove_container(foreign, force=True)
        client.close()


def test_owner_marks():
    assert is_orphaned(owner_mark()) is False
    pid, start, machine = owner_mark().split(".", 2)
    assert is_orphaned(f"{pid}.{int(start) + 1}.{machine}") is True  # a reused number
    assert is_orphaned(f"{pid}.{start}.elsewhere") is None
    assert is_orphaned("nonsense") is None


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param("docker", 8, marks=pytest.mark.docker),
        pytest.param("docker", 64, marks=[pytest.mark.docker, pytest.mark.slow]),  # 30 s
        pytest.param(KIND, 64, marks=[pytest.mark.docker, pytest.mark.slow], id="plain-64"),
        ("bubblewrap", 64),
    ],
)
def test_sandboxes_by_four_threads_leave_nothing(kind, count):
    if kind == "bubblewrap" and why_unusable():
        pytest.skip("bubblewrap does not work here")
    mark, unique = owner_mark(), ours(98760)
    keepers = threading.active_count()
    before = containers(mark) if kind != "bubblewrap" else [*folders(mark), *groups(mark)]

    def work(number: int) -> bytes:
        with open_sandbox(SandboxSpec(), kind) as box:
            box.write_file("n", str(number).encode())
            box.run(f"setsid sleep {unique} >/dev/null 2>&1 &")
            return box.run("cat n").output

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(count))) == [str(n).encode() for n in range(count)]
    assert not processes_with(unique)
    after = containers(mark) if kind != "bubblewrap" else [*folders(mark), *groups(mark)]
    assert sorted(after) == sorted(before)  # those that other tests hold open
    assert threading.active_count() == keepers
