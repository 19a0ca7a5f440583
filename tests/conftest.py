"""What all tests share: sandboxes of both kinds, and what happens where something is missing.

A test marked `docker` is skipped where no Docker engine answers, unless NEXUS_REQUIRE_DOCKER=1:
then it fails. So is one marked `oracle` where `make oracles` was not run (`oracle("swebench")`:
`make oracles-swebench`), unless NEXUS_REQUIRE_ORACLES=1. The fixtures `sandbox`, `shared_sandbox`
and `open_box` run a test once for each kind, `one_sandbox` with the cheaper kind only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from environments import Sandbox, SandboxError, SandboxSpec, open_sandbox

ORACLES = Path(__file__).parent.parent / ".oracles"  # `make oracles`


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other, and sums depend on their number."""
    torch = sys.modules.get("torch")  # what does not use it need not wait for its import
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def _docker_error() -> str | None:
    from environments.engine import connect

    try:
        client = connect(2.0)
    except SandboxError as error:
        return str(error)
    client.close()
    return None


@functools.cache
def _bubblewrap_error() -> str | None:
    from environments.bubblewrap import why_unusable

    return why_unusable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("docker") and (error := _docker_error()):
        _skip_or_fail("NEXUS_REQUIRE_DOCKER", error)
    if marker := item.get_closest_marker("oracle"):
        name = "".join(f"-{arg}" for arg in marker.args)
        folder = ORACLES.with_name(ORACLES.name + name)
        if not (folder / ".installed").is_file():
            error = f"there is no {folder}: run `make oracles{name}`"
            _skip_or_fail("NEXUS_REQUIRE_ORACLES", error)


def _skip_or_fail(variable: str, error: str) -> None:
    if os.environ.get(variable) == "1":
        pytest.fail(f"{variable}=1, but {error}", pytrace=False)
    pytest.skip(error)


@pytest.fixture(
    scope="session", params=[pytest.param("docker", marks=pytest.mark.docker), "bubblewrap"]
)
def sandbox_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox that this host can run."""
    if request.param == "bubblewrap" and (error := _bubblewrap_error()):
        pytest.skip(error)
    return str(request.param)


@pytest.fixture
def open_box(sandbox_kind: str) -> Iterator[Callable[..., Any]]:
    """Opens sandboxes of one kind by the fields of their spec; they end with the test."""
    with contextlib.ExitStack() as stack:

        def opener(**fields: Any) -> Sandbox:
            return stack.enter_context(open_sandbox(SandboxSpec(**fields), sandbox_kind))

        yield opener


@pytest.fixture
def sandbox(open_box: Callable[..., Any]) -> Any:
    """A fresh sandbox with an empty workspace."""
    return open_box()


@pytest.fixture(scope="module")
def module_sandbox(sandbox_kind: str) -> Iterator[Sandbox]:
    with open_sandbox(SandboxSpec(), sandbox_kind) as box:
        yield box


@pytest.fixture
def shared_sandbox(module_sandbox: Sandbox) -> Sandbox:
    """A sandbox that the tests of one module share, for those that leave nothing running.

    Workspace, home and temporary folders are empty again; opening one for each test costs a second.
    """
    return _emptied(module_sandbox)


@pytest.fixture(scope="session")
def _one_sandbox() -> Iterator[Sandbox]:
    with open_sandbox(SandboxSpec(), "docker" if _bubblewrap_error() else "bubblewrap") as box:
        yield box


@pytest.fixture
def one_sandbox(_one_sandbox: Sandbox) -> Sandbox:
    """The same, of the cheaper kind: for work that one and the same program does in both."""
    return _emptied(_one_sandbox)


def _emptied(box: Sandbox) -> Sandbox:
    folders = f"{box.workdir} /tmp /var/tmp /home/agent"
    clear = f"chmod -R u+rwX {box.workdir} && find {folders} -mindepth 1 -delete"
    assert box.run(clear, cwd="/").exit_code == 0
    return box
