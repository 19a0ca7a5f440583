"""Images: built on others, pulled with patience, never pulled, listed and pruned."""

from __future__ import annotations

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from environments import ImageMissing, SandboxSpec, image_store, images, open_sandbox
from environments.engine import connect


@pytest.fixture
def client():
    engine = connect()
    yield engine
    engine.close()


@pytest.mark.docker
def test_the_dockerfile_builds_on_any_base_with_the_hosts_certificates(
    client, monkeypatch, tmp_path
):
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("-----BEGIN CERTIFICATE-----\nonly here\n-----END CERTIFICATE-----\n")
    monkeypatch.setenv("PIP_CERT", str(bundle))
    base, name = images.base_image(client).name, f"nexus-agent/test-{os.getpid()}:built"
    images.build_from(client, base, name)
    try:
        with open_sandbox(SandboxSpec(image=name), "docker") as box:
            assert "only here" in box.run("cat $SSL_CERT_FILE $PIP_CERT $GIT_SSL_CAINFO").text
            assert box.run("python --version && git --version").exit_code == 0
    finally:
        client.images.remove(name, force=True)


@pytest.mark.docker
def test_a_build_that_fails_says_why(client, monkeypatch):
    base = images.base_image(client).name
    monkeypatch.setattr(images, "dockerfile", lambda: "ARG BASE\nFROM ${BASE}\nRUN no-such-tool\n")
    with pytest.raises(ImageMissing, match="no-such-tool: not found"):
        images.build_from(client, base, f"nexus-agent/test-{os.getpid()}:failed")


def test_certificates_come_from_what_the_hosts_programs_use(monkeypatch, tmp_path):
    for name in images.CA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(images, "CA_FILES", (str(tmp_path / "system"),))
    assert images.ca_bundle() == b""
    (tmp_path / "system").write_bytes(b"system")
    assert images.ca_bundle() == b"system"
    (tmp_path / "own").write_bytes(b"own")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "own"))
    assert images.ca_bundle() == b"own"


@pytest.mark.docker
def test_an_image_that_may_not_be_pulled_is_not_asked_for(monkeypatch):
    def asked(*_):
        raise AssertionError("a registry was asked")

    monkeypatch.setattr(images, "_pull", asked)
    with pytest.raises(ImageMissing, match="agent images pull"):
        open_sandbox(SandboxSpec(image="nexus-agent/not-here:1", pull="never"), "docker")


@pytest.fixture
def registry(monkeypatch, tmp_path):
    """A registry that answers by a list: a text is a refusal, None the image. Keeps the times."""
    answers: list[str | None] = []
    seen = SimpleNamespace(answers=answers, times=[], at_once=0, most=0)

    def pull(_, name):
        seen.times.append(time.monotonic())
        seen.at_once += 1
        seen.most = max(seen.most, seen.at_once)
        time.sleep(0.05)
        seen.at_once -= 1
        answer = answers.pop(0) if answers else None
        if answer is not None:
            raise ImageMissing(f"image {name} cannot be pulled: {answer}")

    monkeypatch.setattr(images, "_pull", pull)
    monkeypatch.setattr(images, "BACKOFF", (0.1, 0.3))
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path))
    return seen


def test_a_refusal_that_passes_is_waited_for(registry):
    registry.answers += ["toomanyrequests: You have reached your pull rate limit", "503 Service"]
    said: list[str] = []
    images.pull_image(None, "some/image", said.append)
    first, second, third = registry.times
    assert 0.1 < second - first < third - second
    assert sum("trying again" in line for line in said) == 2


def test_a_refusal_that_stays_is_given_up(registry):
    registry.answers += ["429 Too Many Requests"] * 3
    with pytest.raises(ImageMissing, match="Too Many"):
        images.pull_image(None, "some/image")
    assert len(registry.times) == 3
    registry.answers += ["manifest unknown"]
    with pytest.raises(ImageMissing, match="manifest unknown"):
        images.pull_image(None, "some/image")
    assert len(registry.times) == 4  # waiting would not help


def test_pulls_come_one_after_the_other(registry):
    threads = [
        threading.Thread(target=images.pull_image, args=(None, f"image{n}")) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(registry.times), registry.most) == (4, 1)


@pytest.mark.docker
def test_listed_and_pruned(client, monkeypatch):
    from agent.cli import app
    from environments.hostfiles import write_empty_rootfs

    old, foreign = f"{images.REPOSITORY}:test-old-{os.getpid()}", f"foreign-{os.getpid()}:1"
    images._import(client, old, write_empty_rootfs)
    client.api.tag(old, *foreign.split(":"))  # as an image that somebody else named
    try:
        current = images.base_image(client).name

        def listed(*more: str) -> dict[str, str]:
            done = CliRunner().invoke(app, ["images", "list", "--json", *more])
            assert done.exit_code == 0, done.output
            return {item["name"]: item["kind"] for item in json.loads(done.stdout)}

        assert {current: "base", old: "old base"}.items() <= listed().items()
        # the present one stays, and here all that other tests may be using: asked for after
        # those that may go were listed, so that none is too new to be among them
        monkeypatch.setattr(
            image_store,
            "current_names",
            lambda: [n for i in client.api.images() for n in i["RepoTags"] or () if n != old],
        )
        assert image_store.prune_images(client) == {old: "removed"}
        assert current in listed()
        assert listed("--all")[foreign] == "other"
        assert old not in listed("--all")
    finally:
        client.images.remove(foreign, force=True)
