"""What an image has inside, found out once by a container of it that runs one shell script."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from environments.base import SandboxError, StartTimeout
from environments.engine import translated
from environments.paths import cache_dir

if TYPE_CHECKING:
    import docker

RECIPE = 1  # raise when the script changes
OLDEST = (3, 8)  # the resident program's

# The resident program wants any recent Python; the project's own may be as old as it likes.
SCRIPT = r"""
say() { printf '%s=%s\n' "$1" "$2"; }
say ready yes
for p in python3 python /usr/bin/python3 /usr/local/bin/python3 /opt/miniconda3/bin/python3 \
  /opt/conda/bin/python3 /root/miniconda3/bin/python3 /testbed/.venv/bin/python; do
  q=$(command -v "$p" 2>/dev/null) || continue
  v=$("$q" -Ic 'import sys; print("%d.%d %s" % (sys.version_info[:2] + (sys.executable,)))' \
    2>/dev/null) && say python "$v"
done
for p in bash git tar find xargs; do command -v "$p" >/dev/null 2>&1 && say program "$p"; done
[ -d /testbed ] && say testbed "$(stat -c '%u:%g' /testbed 2>/dev/null)"
for e in /opt/miniconda3/envs/testbed /opt/conda/envs/testbed /root/miniconda3/envs/testbed \
  /testbed/.venv /root/.venv; do
  [ -x "$e/bin/python" ] && say project "$e"
done
exit 0
"""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What the probe saw."""

    python: str | None = None  # an interpreter for the resident program
    python_version: str | None = None
    programs: tuple[str, ...] = ()  # of bash, git, tar, find, xargs
    testbed: bool = False  # the project lies in /testbed, as in images of SWE-bench and R2E-Gym
    owner: str = ""  # uid:gid of /testbed
    project: str | None = None  # the project's environment: a conda prefix or a .venv

    @property
    def way(self) -> str:
        """How commands are run: "resident", or "plain" without a Python that can be used."""
        return "resident" if self.python else "plain"


def image_facts(client: docker.DockerClient, image: str, timeout: float) -> ImageFacts:
    """The facts, kept on disk under the image's content id.

    Raises SandboxError when the image has no `sh`, StartTimeout, ImageMissing, EngineUnreachable.
    """
    with translated(f"cannot look at image {image}"):
        identity = str(client.api.inspect_image(image)["Id"]).replace(":", "-")
    kept = cache_dir("image-facts") / f"{identity}-{RECIPE}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        data = json.loads(kept.read_text("utf-8"))
        return ImageFacts(**{**data, "programs": tuple(data["programs"])})
    facts = _parsed(_probe(client, image, timeout), image)
    partial = kept.with_suffix(f".{id(facts)}.partial")
    partial.write_text(json.dumps(asdict(facts)), "utf-8")
    partial.replace(kept)
    return facts


def _probe(client: docker.DockerClient, image: str, timeout: float) -> str:
    from environments.docker import labels, remove_container

    api: Any = client.api
    host = api.create_host_config(
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        pids_limit=64,
        mem_limit="512m",
    )
    with translated(f"cannot look into image {image}"):
        made = api.create_container(
            image,
            entrypoint=["sh", "-c", SCRIPT],
            command=[],
            host_config=host,
            labels=labels(timeout + 60),
            healthcheck={"test": ["NONE"]},
        )
    try:
        with translated(f"image {image} cannot run `sh`, which every sandbox needs"):
            api.start(made["Id"])
        try:
            with translated(f"image {image} did not answer within {timeout:g} s"):
                api.wait(made["Id"], timeout=timeout)
                return str(
                    api.logs(made["Id"], stdout=True, stderr=False).decode("utf-8", "replace")
                )
        except SandboxError as error:
            raise StartTimeout(str(error)) from error
    finally:
        remove_container(client, made["Id"])


def _parsed(said: str, image: str) -> ImageFacts:
    found: dict[str, list[str]] = {}
    for line in said.splitlines():
        key, _, value = line.partition("=")
        found.setdefault(key, []).append(value)
    if "ready" not in found:
        raise SandboxError(f"image {image} cannot run `sh`, which every sandbox needs: {said!r}")
    python = version = None
    for entry in found.get("python", ()):
        number, _, path = entry.partition(" ")
        if path.startswith("/") and tuple(map(int, number.split("."))) >= OLDEST:
            python, version = path, number
            break
    return ImageFacts(
        python=python,
        python_version=version,
        programs=tuple(found.get("program", ())),
        testbed="testbed" in found,
        owner=found.get("testbed", [""])[0],
        project=found.get("project", [None])[0],
    )
