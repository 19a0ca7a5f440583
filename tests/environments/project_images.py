"""Images laid out like those of SWE-bench and R2E-Gym, built on the project's own base."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager

from environments.engine import connect
from environments.images import base_image

# The state that an agent starts from is one commit above the base, as the real images have it;
# the fix is on another branch. `python` on the image's own PATH is not the project's.
REPOSITORY = r"""
set -e
mkdir -p /testbed; cd /testbed; git init -q -b main .
export GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e@x GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e@x
printf 'def double(x):\n    return x + x + 1\n' > calc.py
mkdir tests; printf 'from calc import double\n\ndef test_double():\n    assert double(2) == 4\n' \
  > tests/test_calc.py
git add -A; git commit -qm base
git checkout -q -b fix; printf 'def double(x):\n    return x + x\n' > calc.py
git commit -qam 'the fix'; git tag v2; git checkout -q main
echo 'pinned' > requirements.lock; git add -A; git commit -qm SWE-bench
git remote add origin https://example.invalid/calc.git; git update-ref refs/remotes/origin/fix fix
"""
WRAPPER = r"""#!/bin/sh
PROJECT_ENVIRONMENT={env} exec /usr/bin/python3 "$@"
"""


def dockerfile(env: str, wrapper: str, owner: str) -> str:
    """Its text: an environment at `env` whose python is a wrapper, and the repository."""
    return f"""FROM {{base}}
COPY wrapper {env}/bin/python
COPY setup /setup
RUN mkdir -p /opt/miniconda3/bin {env}/bin && chmod 755 {env}/bin/python && sh /setup && \\
    ln -s /usr/bin/python3 /opt/miniconda3/bin/python && rm /setup && chown -R {owner} /testbed
ENV PATH=/opt/miniconda3/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
WORKDIR /testbed
ENTRYPOINT ["false"]
"""


@contextmanager
def project_image(
    name: str,
    env: str = "/opt/miniconda3/envs/testbed",
    *,
    wrapper: str = WRAPPER,
    owner: str = "0:0",
) -> Iterator[str]:
    """An image of that name and a tag of this process, removed at the end."""
    import tarfile

    name = f"{name}-{os.getpid()}"

    client = connect()
    try:
        text = dockerfile(env, wrapper, owner).replace("{base}", base_image(client).name)
        sink = io.BytesIO()
        files = {"Dockerfile": text, "wrapper": wrapper.replace("{env}", env), "setup": REPOSITORY}
        with tarfile.open(fileobj=sink, mode="w") as archive:
            for file, content in files.items():
                item = tarfile.TarInfo(file)
                item.size, item.mode = len(content.encode()), 0o755
                archive.addfile(item, io.BytesIO(content.encode()))
        sink.seek(0)
        client.images.build(
            fileobj=sink, custom_context=True, tag=name, rm=True, forcerm=True, network_mode="none"
        )
        yield name
        client.images.remove(name, force=True)
    finally:
        client.close()
