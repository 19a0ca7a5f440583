"""The Docker engine: how it is reached, and what its errors mean here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import docker
import docker.errors
import requests
import urllib3

from environments.base import EngineUnreachable, ImageMissing, SandboxError, SandboxLost

# Daemon failures come as errors of requests and urllib3, which are not docker's own.
ENGINE_ERRORS = (
    docker.errors.DockerException,
    requests.exceptions.RequestException,
    urllib3.exceptions.HTTPError,
    OSError,
)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn every error of the SDK into one of ours. `what` says what was being done."""
    try:
        yield
    except SandboxError:
        raise
    except docker.errors.ImageNotFound as error:
        raise ImageMissing(f"{what}: {_reason(error)}") from error
    except docker.errors.NotFound as error:
        raise SandboxLost(f"{what}: {_reason(error)}") from error
    except docker.errors.APIError as error:
        raise SandboxError(f"{what}: {_reason(error)}") from error
    except ENGINE_ERRORS as error:
        raise EngineUnreachable(
            f"{what}: the Docker engine does not answer ({_reason(error)}); start it, "
            "or use --sandbox bubblewrap"
        ) from error


def connect(timeout: float = 60.0) -> docker.DockerClient:
    """A client for the engine that the environment names. Raises EngineUnreachable.

    `timeout` is in seconds and holds for every request.
    """
    with translated("cannot connect"):
        return docker.from_env(timeout=timeout)  # type: ignore[arg-type]


def _reason(error: BaseException) -> str:
    text = getattr(error, "explanation", None) or str(error)
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return " ".join(str(text).split())[:500]
