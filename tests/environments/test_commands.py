"""What a command gives back, on both kinds of sandbox."""

from __future__ import annotations

import hashlib
import resource
import time

import pytest

from environments import SandboxError
from tests.environments.plain_image import KIND


@pytest.fixture
def sandbox(shared_sandbox):
    return shared_sandbox


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_exit_code(sandbox, code):
    assert sandbox.run(f"exit {code}").exit_code == code


def test_death_by_signal_is_128_plus_the_signal(sandbox):
    assert sandbox.run("kill -SEGV $$").exit_code == 128 + 11


def test_command_that_does_not_exist(sandbox):
    assert sandbox.run("no-such-program").exit_code == 127
    result = sandbox.run(["no-such-program"])
    assert result.exit_code == 127
    assert "no-such-program" in result.text
    result = sandbox.run("true", cwd="no-such-folder")
    assert result.exit_code != 0
    assert "no-such-folder" in result.text


def test_argv_is_not_parsed_by_a_shell(sandbox):
    assert sandbox.run(["echo", "$HOME; 'x'", "two  spaces"]).text == "$HOME; 'x' two  spaces\n"


def test_shell_lines_are_bash(sandbox):
    assert sandbox.run("a=(1 2 3); [[ ${#a[@]} == 3 ]] && echo yes").text == "yes\n"


def test_stdout_and_stderr_come_in_the_order_written(sandbox):
    result = sandbox.run("echo 1; echo 2 >&2; echo 3; echo 4 >&2")
    assert result.text == "1\n2\n3\n4\n"


def test_folder_and_environment(sandbox):
    sandbox.run("mkdir -p sub/deep")
    assert sandbox.run("pwd").text.strip() == sandbox.workdir
    assert sandbox.run("pwd", cwd="sub/deep").text.strip() == f"{sandbox.workdir}/sub/deep"
    assert sandbox.run("pwd", cwd="/tmp").text.strip() == "/tmp"
    assert sandbox.run("echo $X-$LANG", env={"X": "ä b"}).text == "ä b-C.UTF-8\n"
    assert sandbox.run("echo [$X]").text == "[]\n"  # of that one command only


def test_environment_of_the_spec_holds_for_every_command(open_box):
    box = open_box(env={"COLOUR": "blue"}, python_path="/workspace/bin")
    assert box.run("echo $COLOUR ${PATH%%:*}").text == "blue /workspace/bin\n"
    assert box.run("echo $COLOUR", env={"COLOUR": "red"}).text == "red\n"


def test_tools_that_tasks_need_are_there(sandbox):
    tools = "bash git grep sed find make patch tar diff awk"
    if sandbox.kind == "bubblewrap" or sandbox.way == "resident":
        tools += " python python3"
    missing = sandbox.run(f"for t in {tools}; do command -v $t >/dev/null || echo $t; done")
    assert missing.text == ""
    assert sandbox.run("TZ=Asia/Tokyo date -d @0 +%H").text == "09\n"


def test_stdin_is_empty_unless_given(sandbox):
    started = time.monotonic()
    assert sandbox.run("cat; echo done").text == "done\n"
    assert sandbox.run("read x || echo end").text == "end\n"
    assert sandbox.run("git init -q . && git commit --allow-empty").exit_code != 0
    assert time.monotonic() - started < 5


def test_stdin_arrives_whole(sandbox):
    data = bytes(range(256)) * 20_000  # 5 MB, far more than a pipe holds
    result = sandbox.run("sha256sum", stdin=data)
    assert result.text.split()[0] == hashlib.sha256(data).hexdigest()


def test_stdin_that_is_not_read_does_not_disturb_what_follows(sandbox):
    assert sandbox.run("head -c 3", stdin=b"abcdef" * 1_000_000).text == "abc"
    assert sandbox.run("sleep 60", stdin=b"x" * 3_000_000, timeout=0.5).timed_out
    assert sandbox.run("echo next").text == "next\n"


def test_pagers_and_editors_do_not_wait(sandbox):
    script = (
        "git init -q . && git config user.name n && git config user.email e@x && "
        "for i in $(seq 40); do echo $i > f; git add f; git commit -qm $i; done; "
        "git log; git diff HEAD~39; git commit --allow-empty --amend"
    )
    result = sandbox.run(script, timeout=50)
    assert not result.timed_out
    assert result.exit_code == 0


# output


def test_output_below_the_cap_is_untouched(sandbox):
    result = sandbox.run("printf '%1000s' x", output_cap=1000)
    assert (len(result.output), result.omitted) == (1000, 0)


def test_head_and_tail_are_kept_and_the_gap_is_counted(sandbox):
    result = sandbox.run("seq 100000", output_cap=1000)
    whole = "".join(f"{n}\n" for n in range(1, 100001)).encode()
    assert whole.startswith(result.head)
    assert whole.endswith(result.tail)
    assert 990 <= len(result.head) + len(result.tail) <= 1000
    assert len(result.head) + len(result.tail) + result.omitted == len(whole)
    assert f"{result.omitted} bytes left out" in result.text


def test_hundred_megabytes_of_output_need_little_memory_here(sandbox):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = sandbox.run("head -c 100000000 /dev/zero", timeout=60, output_cap=50_000)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert result.exit_code == 0
    assert len(result.head) + len(result.tail) + result.omitted == 100_000_000
    assert after - before < 20_000  # kB


def test_endless_output_ends_with_the_time_limit(sandbox):
    result = sandbox.run("yes", timeout=1, output_cap=1000)
    assert result.timed_out
    assert result.omitted > 100_000
    assert result.duration < 3
    assert len(result.output) < 1100


def test_partial_output_of_a_timed_out_command_is_kept(sandbox):
    result = sandbox.run("echo before; sleep 60; echo after", timeout=0.5)
    assert result.timed_out
    assert result.exit_code == 124
    assert result.text == "before\n"


def test_bytes_that_are_not_utf8(sandbox):
    result = sandbox.run(r"printf '\xff\x96ok\x00end'")
    assert result.output == b"\xff\x96ok\x00end"
    assert result.text == "\ufffd\ufffdok\x00end"


@pytest.mark.parametrize("shift", range(4))
def test_a_character_cut_by_the_cap_is_left_out_whole(sandbox, shift):
    result = sandbox.run(f"printf '%{shift}s'; printf '😀%.0s' $(seq 500)", output_cap=100 + shift)
    assert result.omitted
    assert "\ufffd" not in result.text
    assert len(result.head) + len(result.tail) + result.omitted == 2000 + shift


def test_a_character_that_arrives_in_two_pieces(sandbox):
    assert sandbox.run(r"printf '\xf0\x9f'; sleep 0.3; printf '\x98\x80'").text == "😀"


def test_command_text_beyond_the_argument_limit(sandbox):
    body = "x" * 300_000
    result = sandbox.run(f"echo '{body}' | wc -c")
    assert result.text.strip() == "300001"
    assert sandbox.run(f"cat > f <<'END'\n{body}\nEND\nwc -c < f").text.strip() == "300001"


def test_small_commands_are_fast(sandbox):
    sandbox.run("true")
    started = time.monotonic()
    for _ in range(20):
        sandbox.run(["true"])
    plain = getattr(sandbox, "way", "") == "plain"  # each command is an exec of the engine
    assert (time.monotonic() - started) / 20 < (0.5 if plain else 0.05)


def test_limits_that_make_no_sense_are_refused(sandbox):
    with pytest.raises(ValueError, match="timeout"):
        sandbox.run("true", timeout=0)
    with pytest.raises(ValueError, match="output_cap"):
        sandbox.run("true", output_cap=0)
    with pytest.raises(ValueError, match="empty"):
        sandbox.run([])
    assert sandbox.run("echo still here").text == "still here\n"


def test_a_mount_that_does_not_exist_is_named(open_box):
    with pytest.raises(SandboxError, match="/no/such/folder"):
        open_box(mounts={"/no/such/folder": "/mnt/x"})


def test_two_edits_in_one_second_are_both_seen_by_python(sandbox, sandbox_kind):
    """Stale bytecode: the same size and second would make the second edit invisible."""
    if sandbox_kind == KIND:
        pytest.skip("no Python inside")
    for value in (1, 2, 3, 4):
        sandbox.write_file("module.py", f"VALUE = {value}\n".encode())
        result = sandbox.run("python3 -c 'import module; print(module.VALUE)'")
        assert result.text == f"{value}\n"
