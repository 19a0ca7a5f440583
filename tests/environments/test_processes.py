"""What becomes of processes: after a time limit, after a normal end, and when they multiply."""

from __future__ import annotations

import time

import pytest

from environments import Limits


def running(box, mark: str) -> int:
    """How many processes have the mark as an argument."""
    script = (
        "for p in /proc/[0-9]*; do tr '\\0' '\\n' < $p/cmdline | grep -qx -- $MARK && echo; "
        "done 2>/dev/null | wc -l"
    )
    return int(box.run(script, env={"MARK": mark}).text)


def has_python(box) -> bool:
    return getattr(box, "way", "resident") == "resident"


FEW = {"2", "3", "4", "5", "6"}  # process 1, its spare, a shell, ls, wc, an earlier server

HOLDOUTS = {
    "ignores TERM": "bash -c 'trap \"\" TERM INT HUP; sleep 321' & sleep 321",
    "own session": "setsid sleep 321 & sleep 321",
    "double fork": "(setsid bash -c 'sleep 321 & sleep 321 &' &) ; sleep 321",
    "no environment": "env -i setsid sleep 321 & sleep 321",
    "output closed": "setsid sleep 321 >/dev/null 2>&1 </dev/null & sleep 321",
}


@pytest.mark.parametrize("name", HOLDOUTS)
def test_nothing_of_a_timed_out_command_is_left(shared_sandbox, name):
    result = shared_sandbox.run(HOLDOUTS[name], timeout=0.7)
    assert result.timed_out
    assert result.duration < 3
    assert running(shared_sandbox, "321") == 0


def test_an_earlier_server_survives_the_time_limit_of_a_later_command(sandbox):
    sandbox.run("sleep 555 & setsid sleep 556 &")
    assert sandbox.run("setsid sleep 321 & sleep 321", timeout=0.7).timed_out
    assert running(sandbox, "321") == 0
    assert running(sandbox, "555") == 1
    assert running(sandbox, "556") == 1


def test_a_background_server_lives_on_and_may_go_on_writing(sandbox):
    if not has_python(sandbox):
        result = sandbox.run("while sleep 0.05; do echo tick; echo >> log; done & echo started")
        assert result.text.startswith("started")
        assert result.duration < 3
        before = len(sandbox.read_file("log"))
        time.sleep(0.5)
        assert len(sandbox.read_file("log")) > before
        return
    sandbox.write_file("page.txt", b"hello")
    # stdout and stderr stay connected to the command's: the server logs every request there
    result = sandbox.run("python3 -m http.server 8123 --bind 127.0.0.1 & echo started")
    assert result.text.startswith("started")
    assert result.duration < 3
    fetch = (
        "import time, urllib.request\n"
        "for i in range(50):\n"
        "  try: print(urllib.request.urlopen('http://127.0.0.1:8123/page.txt').read()); break\n"
        "  except OSError: time.sleep(0.1)"
    )
    for _ in range(3):
        assert sandbox.run(["python3", "-c", fetch]).text == "b'hello'\n"


def test_state_persists_between_commands(shared_sandbox):
    shared_sandbox.run("echo 1 > /tmp/a; echo 2 > ~/b; echo 3 > /var/tmp/c; echo 4 > d")
    assert shared_sandbox.run("cat /tmp/a ~/b /var/tmp/c d").text == "1\n2\n3\n4\n"


def test_orphans_are_reaped(shared_sandbox):
    shared_sandbox.run("for i in $(seq 20); do (sleep 0.05 &) ; done")
    time.sleep(0.3)
    zombies = shared_sandbox.run("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l")
    assert zombies.text.strip() == "0"


def test_out_of_memory_is_reported_and_survived(open_box):
    box = open_box(limits=Limits(memory_mb=128))
    result = box.run("head -c 400000000 /dev/zero | tail -c 399000000 | wc -c")
    assert result.text.strip() != "399000000"
    assert result.out_of_memory
    again = box.run("echo alive")
    assert (again.text, again.out_of_memory) == ("alive\n", False)


def test_memory_of_all_processes_together_is_limited(open_box):
    box = open_box(limits=Limits(memory_mb=128))
    if any("memory" in text for text in getattr(box, "unenforced", ())):
        pytest.skip("no control group here")
    hog = "head -c 60000000 /dev/zero | tail -c 60000000 | (sleep 2; cat >/dev/null)"
    result = box.run(f"for i in 1 2 3; do {hog} & done; wait")
    assert result.out_of_memory


BOMBS = {
    "shell": ":(){ :|:& };:",
    "python": """if command -v python3 >/dev/null; then exec python3 -c "import os
while True:
  try: os.fork()
  except OSError: pass"; else exec perl -e 'fork while 1'; fi""",
}


@pytest.mark.parametrize("name", BOMBS)
def test_fork_bomb_is_contained(open_box, name):
    box = open_box(limits=Limits(pids=64))
    if any("processes" in text for text in getattr(box, "unenforced", ())):
        pytest.skip("no control group here")
    first = box.run(BOMBS[name], timeout=2)
    second = box.run("echo usable")
    third = box.run("echo usable")
    assert first.pids_exhausted or second.pids_exhausted
    assert third.text == "usable\n"
    assert box.run("ls -d /proc/[0-9]* | wc -l").text.strip() in FEW


def test_fork_bomb_beside_an_earlier_server(open_box):
    box = open_box(limits=Limits(pids=64))
    if any("processes" in text for text in getattr(box, "unenforced", ())):
        pytest.skip("no control group here")
    box.run("sleep 555 &")
    result = box.run(BOMBS["python"], timeout=1)
    assert result.timed_out
    assert result.pids_exhausted
    assert box.run("ls -d /proc/[0-9]* | wc -l").text.strip() in FEW


def test_cpu_is_limited(open_box):
    box = open_box(limits=Limits(cpus=0.25))
    if any("CPU" in text for text in getattr(box, "unenforced", ())):
        pytest.skip("no control group here")
    spin = "i=0; while ((i < 100000)); do ((i += 1)); done; times | head -1"
    result = box.run(spin)
    user, system = (float(t.split("m")[1].rstrip("s")) for t in result.text.split()[:2])
    assert result.duration > 2 * (user + system)  # 4 times, but the first slice is free


def test_killing_everything_from_inside_leaves_the_sandbox_usable(shared_sandbox):
    shared_sandbox.run("sleep 555 & kill -9 -1")
    assert running(shared_sandbox, "555") == 0
    shared_sandbox.run(
        "kill -9 1; kill -STOP 1; kill -TERM 1; kill -INT 1; kill -HUP 1; kill -USR1 1"
    )
    assert shared_sandbox.run("echo alive").text == "alive\n"


def test_a_command_cannot_reach_into_the_resident_program(shared_sandbox):
    attack = (
        "for f in /proc/1/fd/* /proc/1/mem; do (echo '{\"size\":0}' > $f) 2>/dev/null && echo $f; "
        "done; cat /proc/1/environ"
    )
    result = shared_sandbox.run(attack)
    if not has_python(shared_sandbox):
        # a shell cannot close itself to its user's processes; what they write there gains nothing
        shared_sandbox.run("for i in 1 2 3; do echo all $i; echo 1 0 0 0; done > /proc/1/fd/1")
        assert shared_sandbox.run("echo in order").text == "in order\n"
        return
    assert "/proc/1/fd/" not in result.text.replace("/proc/1/fd/*", "")
    assert "Permission denied" in result.text
    assert shared_sandbox.run("echo in order").text == "in order\n"
