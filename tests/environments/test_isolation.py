"""Ways out of a sandbox, and what each gets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from environments import SandboxFileError, SandboxSpec, open_sandbox


@pytest.fixture
def sandbox(shared_sandbox):
    return shared_sandbox


def test_no_network_but_loopback(sandbox):
    assert sandbox.run("ls /sys/class/net 2>/dev/null || true").text.split() in ([], ["lo"])
    assert sandbox.run("tail -n +3 /proc/net/dev | cut -d: -f1").text.split() == ["lo"]
    for address, port in (("1.1.1.1", 53), ("10.0.0.1", 80), ("example.org", 443)):
        result = sandbox.run(f"exec 3<>/dev/tcp/{address}/{port}", timeout=20)
        assert result.exit_code == 1
        assert any(word in result.text for word in ("unreachable", "name resolution", "not known"))


def test_loopback_services_of_the_host_are_not_reached(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
        subprocess.run(["bash", "-c", line], check=True)  # it can be reached from here
        assert "refused" in sandbox.run(line).text


def test_abstract_sockets_of_the_host_are_not_reached(sandbox):
    name = f"nexus-test-abstract-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        if getattr(sandbox, "way", "") == "plain":
            assert name in Path("/proc/net/unix").read_text()
            seen = sandbox.run("cat /proc/net/unix")
            assert seen.exit_code == 0
            assert name not in seen.text
            return
        code = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')"
        subprocess.run([sys.executable, "-c", code], check=True)
        assert "refused" in sandbox.run(["python3", "-c", code]).text


def test_processes_of_the_host_are_not_seen(sandbox):
    host = subprocess.Popen(["sleep", "7654321"])
    try:
        listing = sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").text
        assert "7654321" not in listing
        assert int(sandbox.run("ls -d /proc/[0-9]* | wc -l").text) < 8
        sandbox.run(f"kill -9 {host.pid}")
        assert host.poll() is None
    finally:
        host.kill()
        host.wait()


def test_engine_socket_is_not_there(sandbox):
    result = sandbox.run("ls /var/run/docker.sock /run/docker.sock /run/containerd")
    assert result.text.count("No such file") == 3


def test_folders_of_the_host_are_not_there(sandbox, tmp_path):
    (tmp_path / "secret").write_text("secret")
    # the interpreter's prefix may lie in the home folder; nothing else of it shows
    places = [tmp_path / "secret", Path("~/.cache").expanduser(), Path.cwd() / "pyproject.toml"]
    for place in places:
        assert place.exists()
        assert sandbox.run(["ls", str(place)]).exit_code == 2
        with pytest.raises(SandboxFileError):
            sandbox.read_file(str(place))
    assert sandbox.run("cat /etc/shadow").exit_code == 1


def test_environment_of_the_client_is_not_there(open_box, monkeypatch):
    monkeypatch.setenv("NEXUS_TEST_TOKEN", "hunter2")
    box = open_box()
    assert "hunter2" not in box.run("env; cat /proc/*/environ 2>/dev/null").text


def test_link_out_of_the_workspace_reaches_nothing(open_box, tmp_path):
    (tmp_path / "precious").write_text("host")
    box = open_box()
    box.run(["ln", "-s", str(tmp_path), "out"])
    box.run(["ln", "-s", "../../../../../../../.." + str(tmp_path), "up"])
    for name in ("out", "up"):
        with pytest.raises(SandboxFileError):
            box.read_file(f"{name}/precious")
    for name in ("out", "up"):  # what is written lands in a folder of that name inside
        box.run(f"mkdir -p {tmp_path}; echo changed > {name}/precious")
        box.write_file(f"{name}/other", b"changed")
    box.mark_base()
    box.run("echo x > new")
    assert box.diff().files == ("new",)
    box.close()
    assert (tmp_path / "precious").read_text() == "host"
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_mounted_folders_are_read_only(open_box, tmp_path):
    (tmp_path / "data").write_text("original")
    box = open_box(mounts={str(tmp_path): "/opt/mounted"})
    assert box.read_file("/opt/mounted/data") == b"original"
    attempts = (
        "echo x > /opt/mounted/data; touch /opt/mounted/new; rm /opt/mounted/data; "
        "mount -o remount,rw /opt/mounted; mount -o remount,bind,rw /opt/mounted; "
        "umount /opt/mounted; echo x > /opt/mounted/data"
    )
    assert box.run(attempts).text.count("Read-only file system") >= 3
    with pytest.raises(SandboxFileError, match="Read-only"):
        box.write_file("/opt/mounted/data", b"x")
    assert (tmp_path / "data").read_text() == "original"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.docker
def test_an_ordinary_user_where_the_trees_owner_allows(tmp_path):
    with open_sandbox(SandboxSpec(), "docker") as box:
        assert box.run("id -u").text.strip() not in ("0", "")
        assert box.run("git init -q . && git status && touch x && stat -c %U .").exit_code == 0
    if os.getuid():
        return
    (tmp_path / "secret").mkdir(mode=0o700)
    with open_sandbox(SandboxSpec(mounts={str(tmp_path / "secret"): "/opt/s"}), "docker") as box:
        assert box.run("id -u; ls /opt/s").text == "0\n"  # else it could not read its mount


def test_no_privileges_and_no_way_to_them(sandbox):
    status = sandbox.run("cat /proc/self/status").text
    values = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert int(values["CapEff"], 16) == int(values["CapBnd"], 16) == 0
    assert values["NoNewPrivs"] == "1"
    for command in (
        "mount -t tmpfs x /mnt",
        "mknod /tmp/disk b 8 0",
        "chroot / true",
        "unshare --user --map-root-user mount -t tmpfs x /tmp",
        "hostname other",
        "nsenter -t 1 -m true",
        "date -s 2001-01-01",
    ):
        result = sandbox.run(command)
        assert result.exit_code != 0, command


def test_settings_of_the_kernel_cannot_be_written(sandbox):
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/swappiness"):
        # writes back what is there, so that a failure of this test changes nothing
        assert sandbox.run(f'v=$(cat {path}); echo "$v" > {path}').exit_code != 0
    assert sandbox.run("test -w /proc/sysrq-trigger && echo -n '' > /proc/sysrq-trigger").exit_code


def test_devices_of_the_host_are_not_there(sandbox):
    found = set(sandbox.run("find /dev -type b -o -type c").text.split())
    harmless = {"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts/ptmx"}
    assert {path.removeprefix("/dev/") for path in found} <= harmless
    assert sandbox.run("head -c 1 /dev/mem /dev/kmem /dev/sda /dev/kvm").exit_code != 0


def test_own_control_group_cannot_be_widened(sandbox):
    script = (
        "for f in /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/pids/pids.max "
        "/sys/fs/cgroup/memory.max /sys/fs/cgroup/pids.max; do "
        "[ -e $f ] && echo 99999999999 > $f && echo WIDENED; done; echo end"
    )
    result = sandbox.run(script)
    assert "WIDENED" not in result.text
    assert result.text.endswith("end\n")
