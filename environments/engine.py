"""The Docker engine: how it is reached, and what its errors mean here."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager

import docker
import docker.errors
import requests
import urllib3

from environments.base import EngineUnreachable, ImageMissing, SandboxError, SandboxLost

RESTART_SECONDS = 15.0  # how long an engine may take to come back

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


def connect(timeout: float = 60.0, patience: float = 0.0) -> docker.DockerClient:
    """A client for the engine that the environment names. Raises EngineUnreachable.

    `timeout` is in seconds and holds for every request. An engine that is there but refuses, as it
    does while it restarts, is tried again for `patience` seconds; one that is not there is not.
    """
    ends = time.monotonic() + min(patience, RESTART_SECONDS)
    while True:
        try:
            with translated("cannot connect"):
                client = docker.from_env(timeout=timeout)  # type: ignore[arg-type]  # stub: int
                client.ping()
                return client
        except EngineUnreachable as error:
            if time.monotonic() >= ends or not _refused(error):
                raise
        time.sleep(0.25)


def _refused(error: BaseException | None) -> bool:
    """Whether a refused or broken connection lies at the bottom of an error."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, ConnectionRefusedError | ConnectionResetError | BrokenPipeError):
            return True
        if isinstance(error, http.client.RemoteDisconnected):
            return True
        nested = [item for item in error.args if isinstance(item, BaseException)]
        error = error.__cause__ or error.__context__ or (nested[0] if nested else None)
        seen += 1
    return False


def _reason(error: BaseException) -> str:
    text = getattr(error, "explanation", None) or str(error)
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return " ".join(str(text).split())[:500]
