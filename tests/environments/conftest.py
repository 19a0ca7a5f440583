"""The conformance suite runs on three kinds: Docker with and without Python inside, bubblewrap."""

from __future__ import annotations

import pytest

from environments import hostfiles
from tests.conftest import _bubblewrap_error
from tests.environments.plain_image import KIND

KINDS = [
    pytest.param("docker", marks=pytest.mark.docker),
    "bubblewrap",
    pytest.param(KIND, marks=pytest.mark.docker, id="plain"),
]


@pytest.fixture(scope="session", params=KINDS)
def sandbox_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox that this host can run, by the name that `open_sandbox` takes."""
    if request.param == "bubblewrap" and (error := _bubblewrap_error()):
        pytest.skip(error)
    if request.param == KIND and (missing := hostfiles.missing_packages()):
        pytest.skip(f"no image without Python can be made here: dpkg lacks {missing}")
    return str(request.param)
