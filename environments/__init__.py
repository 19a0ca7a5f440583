"""Sandboxes in which a model's commands run. Knows nothing of models or tasks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from environments.base import (
    EngineUnreachable,
    ExecResult,
    ImageMissing,
    Limits,
    Patch,
    Sandbox,
    SandboxError,
    SandboxFileError,
    SandboxLost,
    SandboxSpec,
    StartTimeout,
)

__all__ = [
    "Choice",
    "EngineUnreachable",
    "ExecResult",
    "ImageMissing",
    "Limits",
    "Patch",
    "Sandbox",
    "SandboxError",
    "SandboxFileError",
    "SandboxLost",
    "SandboxSpec",
    "StartTimeout",
    "choose",
    "clean",
    "open_sandbox",
    "probe",
]

ENGINE_SECONDS = 2.0  # how long `auto` waits for an engine


@dataclass(frozen=True, slots=True)
class Choice:
    """Which kind of sandbox is taken, and why, as a sentence for the user."""

    kind: str
    reason: str


def _quiet(_: str) -> None:
    pass


def choose(kind: str = "auto") -> Choice:
    """Settle which kind is used. `auto`: Docker when an engine answers, else bubblewrap.

    Any other kind is taken as named: "docker", "bubblewrap", or "package.module:Class" with a
    class that is called as `Class(spec, progress=...)` and gives a `Sandbox`. Raises SandboxError
    when neither kind can be used; nothing ever runs on the bare host.
    """
    if kind != "auto":
        if kind not in ("docker", "bubblewrap") and ":" not in kind:
            raise SandboxError(
                f"unknown sandbox {kind!r}: use auto, docker, bubblewrap or package.module:Class"
            )
        return Choice(kind, "as asked for")
    from environments import bubblewrap

    try:
        return Choice("docker", f"Docker engine {_engine()['version']} answers")
    except SandboxError as error:
        unusable = bubblewrap.why_unusable()
        if unusable is None:
            return Choice("bubblewrap", "no Docker engine answers")
        raise SandboxError(
            f"no sandbox can be used: {error}; {unusable}. Start Docker or make bubblewrap work"
        ) from error


def open_sandbox(
    spec: SandboxSpec, kind: str = "auto", *, progress: Callable[[str], None] = _quiet
) -> Sandbox:
    """Open a sandbox; close it by leaving its `with` block. `progress` gets lines for the user.

    Raises EngineUnreachable, ImageMissing, StartTimeout, or SandboxError.
    """
    chosen = choose(kind)
    if chosen.kind == "docker":
        from environments.docker import open_docker

        return open_docker(spec, progress=progress)
    if chosen.kind == "bubblewrap":
        from environments.bubblewrap import BubblewrapSandbox

        return BubblewrapSandbox(spec, progress=progress)
    module, _, name = chosen.kind.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SandboxError(f"sandbox {chosen.kind} cannot be loaded: {error}") from error
    sandbox = factory(spec, progress=progress)
    if not isinstance(sandbox, Sandbox):
        raise SandboxError(f"sandbox {chosen.kind} lacks methods of environments.base.Sandbox")
    return sandbox


def clean(*, everything: bool = False) -> dict[str, int]:
    """Remove what dead clients left: {"docker": containers, "bubblewrap": folders}.

    With `everything` containers of living clients go as well. A kind that cannot be used here is
    left out.
    """
    from environments import bubblewrap, docker
    from environments.engine import connect

    removed = {"bubblewrap": bubblewrap.reap()}
    try:
        client = connect(ENGINE_SECONDS)
        try:
            removed["docker"] = docker.reap(client, everything=everything)
        finally:
            client.close()
    except EngineUnreachable:
        pass
    return removed


def probe(limits: Limits | None = None) -> dict[str, Any]:
    """Facts about sandboxes on this host, for `agent doctor`. Never raises.

    Keys: docker (dict with version and cgroup, or None), docker_error, bubblewrap (path or None),
    bubblewrap_error, cgroup (1, 2 or 0), unenforced (sentences about bubblewrap), choice, reason.
    """
    import os
    import secrets

    from environments import bubblewrap, cgroups
    from environments.owner import owner_mark

    facts: dict[str, Any] = {"docker": None, "docker_error": None, "cgroup": cgroups.version()}
    try:
        facts["docker"] = _engine()
    except SandboxError as error:
        facts["docker_error"] = str(error)
    facts["bubblewrap_error"] = bubblewrap.why_unusable()
    facts["bubblewrap"] = None if facts["bubblewrap_error"] else bubblewrap.find_bwrap()
    limits = limits or Limits.model_validate({})
    group = cgroups.make_group(f"{owner_mark()}.{secrets.token_hex(4)}", limits)
    group.remove()
    facts["unenforced"] = bubblewrap.fallbacks(limits, group)[2]
    facts["user"] = os.getuid()
    try:
        chosen = choose()
        facts["choice"], facts["reason"] = chosen.kind, chosen.reason
    except SandboxError as error:
        facts["choice"], facts["reason"] = None, str(error)
    return facts


def _engine() -> dict[str, Any]:
    """Version and cgroup version of the engine. Raises EngineUnreachable, SandboxError."""
    from environments.engine import connect, translated

    client = connect(ENGINE_SECONDS)
    try:
        with translated("cannot ask the Docker engine for its version"):
            about = client.info()
            return {
                "version": about.get("ServerVersion", "?"),
                "cgroup": int(about.get("CgroupVersion", 1)),
                "system": about.get("OperatingSystem", "?"),
            }
    finally:
        client.close()
