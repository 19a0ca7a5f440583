"""An image without Python, made from this machine's files, and sandboxes of it.

`tests.environments.plain_image:open_plain` is a kind of sandbox for `open_sandbox`.
"""

from __future__ import annotations

import hashlib
from typing import Any

from environments import SandboxSpec, hostfiles
from environments.docker import open_docker
from environments.engine import connect
from environments.images import REPOSITORY, _import, is_present

KIND = "tests.environments.plain_image:open_plain"
_NAMES = """
bash coreutils dash diffutils findutils grep sed gzip tar mawk util-linux procps git make patch
tzdata
"""
PACKAGES = tuple(_NAMES.split())


def plain_image() -> str:
    """Its name; made when it is not there (4 s). `agent images prune` removes it."""
    text = " ".join([hostfiles.fingerprint(), *PACKAGES])
    name = f"{REPOSITORY}:plain-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    client = connect(patience=20.0)
    try:
        if not is_present(client, name):
            _import(client, name, lambda sink: hostfiles.write_debian_rootfs(sink, PACKAGES))
    finally:
        client.close()
    return name


def open_plain(spec: SandboxSpec, *, progress: Any) -> Any:
    """A sandbox in Docker without Python inside."""
    return open_docker(spec.model_copy(update={"image": plain_image()}), progress=progress)
