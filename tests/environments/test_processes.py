"""What becomes of processes: after a time limit, after a normal end, and when they multiply."""

from __future__ import annotations

import time

import pytest

from environments import Limits


def running(box, mark: str) -> int:
    program = (
        "import os\nn=0\n"
        "for p in os.listdir('/proc'):\n"
        "  try: n+=p.isdigit() and int(p)!=os.getpid() and "
        f"b'{mark}' in open(f'/proc/{{p}}/cmdline','rb').read().split(b'\\0')\n"
        "  except OSError: pass\nprint(n)"
    )
    return int(box.run(["python3", "-c", program]).text)


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
    result = box.run(["python3", "-c", "x = b'x' * 400_000_000; print(len(x))"])
    assert result.exit_code != 0
    assert result.out_of_memory
    again = box.run("echo alive")
    assert (again.text, again.out_of_memory) == ("alive\n", False)


def test_memory_of_all_processes_together_is_limited(open_box):
    box = open_box(limits=Limits(memory_mb=128))
    if any("memory" in text for text in getattr(box, "unenforced", ())):
        pytest.skip("no control group here")
    hog = "import time; x = b'x' * 60_000_000; time.sleep(2)"
    result = box.run(f'for i in 1 2 3; do python3 -c "{hog}" & done; wait')
    assert result.out_of_memory


BOMBS = {
    "shell": ":(){ :|:& };:",
    "python": 'python3 -c "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"',
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
    assert box.run("ls -d /proc/[0-9]* | wc -l").text.strip() in {"2", "3", "4"}


def test_fork_bomb_beside_an_earlier_server(open_box):
    box = open_box(limits=Limits(pids=64))
    if any("processes" in text for text in getattr(box, "unenforced", ())):
        pytest.skip("no control group here")
    box.run("sleep 555 &")
    result = box.run(BOMBS["python"], timeout=1)
    assert result.timed_out
    assert result.pids_exhausted
    assert box.run("ls -d /proc/[0-9]* | wc -l").text.strip() in {"2", "3", "4", "5"}


def test_cpu_is_limited(open_box):
    box = open_box(limits=Limits(cpus=0.25))
    if any("CPU" in text for text in getattr(box, "unenforced", ())):
        pytest.skip("no control group here")
    spin = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.5: pass"
    assert box.run(["python3", "-c", spin]).duration > 1.2


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
    assert "/proc/1/fd/" not in result.text.replace("/proc/1/fd/*", "")
    assert "Permission denied" in result.text
    assert shared_sandbox.run("echo in order").text == "in order\n"
