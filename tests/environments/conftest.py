"""The conformance suite runs on three kinds: Docker with and without Python inside, bubblewrap."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments import hostfiles
from tests.conftest import _bubblewrap_error
from tests.environments.plain_image import KIND

HERE = Path(__file__).parent
KINDS = [
    pytest.param("docker", marks=pytest.mark.docker),
    "bubblewrap",
    pytest.param(KIND, marks=pytest.mark.docker, id="plain"),
]

# What costs seconds by plain execs and is decided by code or limits that the other Docker kind
# shares; the rest of the suite runs on all three in every run, these with `-m slow`.
COSTLY = {
    "test_fork_bomb_beside_an_earlier_server",
    "test_memory_of_all_processes_together_is_limited",
    "test_cpu_is_limited",
    "test_a_process_that_destroys_the_base_while_it_is_used_is_noticed",
    "test_names",
    "test_no_network_but_loopback",
    "test_folders_of_the_host_are_not_there",
    "test_link_out_of_the_workspace_reaches_nothing",
    "test_abstract_sockets_of_the_host_are_not_reached",
    "test_devices_of_the_host_are_not_there",
    "test_own_control_group_cannot_be_widened",
    "test_settings_of_the_kernel_cannot_be_written",
    "test_environment_of_the_client_is_not_there",
    "test_an_error_in_the_with_block_closes",
    "test_limits_that_make_no_sense_are_refused",
    "test_no_base",
    "test_tree_errors",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # They count processes and containers and use up what a host has: one worker does them all.
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.xdist_group("sandboxes"))
        call = getattr(item, "callspec", None)
        kind = call.params.get("sandbox_kind") if call else None
        if kind == KIND and getattr(item, "originalname", "") in COSTLY:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=KINDS)
def sandbox_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox that this host can run, by the name that `open_sandbox` takes."""
    if request.param == "bubblewrap" and (error := _bubblewrap_error()):
        pytest.skip(error)
    if request.param == KIND and (missing := hostfiles.missing_packages()):
        pytest.skip(f"no image without Python can be made here: dpkg lacks {missing}")
    return str(request.param)
