"""The Hugging Face hub: whether it is there, one large file of it, and whole repositories.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE` and `HF_HOME` mean what they mean everywhere.
"""

from __future__ import annotations

import errno
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import huggingface_hub
import requests
from huggingface_hub import constants

from agent.catalogue import HubFile

# What names one. Others its client refuses with a ValueError, wherever it is asked.
_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
REPOSITORY = re.compile(rf"(?!.*(?:--|\.\.|\.git$)){_PART}/{_PART}")
_T = TypeVar("_T")
_CHUNK = 1 << 16  # bytes; what a broken connection loses at most
_PROBE_SECONDS = 6.0  # in all, name look-up included, which no socket time-out bounds
_TRIES = 3

# What a causal language model needs; other formats of the same weights stay where they are.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
_UNWANTED = ["*/*", "consolidated*"]


class HubUnavailable(RuntimeError):
    """The hub does not answer, or does not give what was asked for."""


def require_reachable(endpoint: str | None = None) -> None:
    """Raise HubUnavailable within seconds unless the hub answers.

    Any answer counts, an error status too: what a file's own answer is, its download tells.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubUnavailable("the hub is switched off (HF_HUB_OFFLINE)")
    url = endpoint or constants.ENDPOINT
    answers: list[str | None] = []

    def ask() -> None:
        try:
            requests.head(url, timeout=(3.0, 3.0), allow_redirects=False)
            answers.append(None)
        except requests.RequestException as error:
            answers.append(_kind(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    failed = answers[0] if answers else f"no answer in {_PROBE_SECONDS:.0f} s"
    if failed is not None:
        raise HubUnavailable(f"the hub cannot be reached ({failed})")


def download(
    source: HubFile,
    part: Path,
    size: int,
    on_bytes: Callable[[int], None],
    *,
    endpoint: str | None = None,
) -> None:
    """Download one file of `size` bytes to `part`, going on where an earlier try ended.

    No token is sent: catalogue models are public. A broken connection is taken up again twice.
    Raises HubUnavailable when the hub refuses, offers a file of another size, or breaks off; what
    arrived stays in `part`.
    """
    url = huggingface_hub.hf_hub_url(
        source.repo, source.file, revision=source.revision, endpoint=endpoint
    )
    for left in reversed(range(_TRIES)):
        try:
            _download_rest(url, part, size, on_bytes)
            return
        except requests.RequestException as error:
            if left == 0:
                raise HubUnavailable(f"the hub broke off ({_kind(error)})") from error


def _download_rest(url: str, part: Path, size: int, on_bytes: Callable[[int], None]) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have > size:
        part.unlink()
        have = 0
    if have == size:
        return
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with requests.get(url, headers=headers, stream=True, timeout=(5.0, 30.0)) as answer:
        if not answer.ok:
            raise HubUnavailable(f"the hub does not give {url} (status {answer.status_code})")
        if answer.status_code != 206:
            have = 0  # the server starts from the beginning
        offered = have + int(answer.headers.get("Content-Length", size - have))
        if offered != size:
            raise HubUnavailable(f"the hub offers {offered} bytes at {url}, expected {size}")
        with part.open("r+b" if have else "wb") as out:
            out.seek(have)
            for chunk in answer.iter_content(_CHUNK):
                out.write(chunk)
                have += len(chunk)
                on_bytes(have)
    if have != size:  # requests does not count what a closed connection left out
        raise requests.ConnectionError(f"connection closed after {have} of {size} bytes")


def config_file(repo: str) -> Path:
    """The repository's config.json, from the hub or its local cache. Raises HubUnavailable."""
    return small_file(repo, "config.json")


def small_file(repo: str, name: str) -> Path:
    """Another file of a repository, likewise. Raises HubUnavailable, also where it has none."""
    return Path(_guarded(lambda: huggingface_hub.hf_hub_download(repo, name), repo))


def snapshot_bytes(repo: str) -> int:
    """Bytes that the wanted files of a repository take. Raises HubUnavailable."""
    plan = _guarded(
        lambda: huggingface_hub.snapshot_download(
            repo, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, dry_run=True
        ),
        repo,
    )
    return sum(info.file_size or 0 for info in plan if info.will_download)


def snapshot(repo: str) -> Path:
    """Folder with the repository's weights, config and tokenizer, in the hub's own local cache.

    The hub's client shows its bars, resumes, and puts a file in place only whole.
    Raises HubUnavailable.
    """
    return Path(
        _guarded(
            lambda: huggingface_hub.snapshot_download(
                repo, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            ),
            repo,
        )
    )


def store() -> Path:
    """The folder in which the hub's client keeps what it fetched; created when missing."""
    folder = Path(constants.HF_HUB_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def local_snapshot(repo: str) -> Path | None:
    """The folder of a repository that was fetched before and is whole, without asking the hub."""
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                local_files_only=True,
            )
        )
    except (huggingface_hub.errors.LocalEntryNotFoundError, OSError):
        return None
    return folder if whole(folder) else None


def whole(folder: Path) -> bool:
    """Whether a model folder has its config and every file of weights that its index names."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    names = set(json.loads(index.read_text())["weight_map"].values())
    return all((folder / name).is_file() for name in names)


def _guarded(ask: Callable[[], _T], repo: str) -> _T:
    try:
        return ask()
    except huggingface_hub.errors.GatedRepoError as error:
        raise HubUnavailable(
            f"{repo} is gated: accept its terms there, then run `hf auth login` or set HF_TOKEN"
        ) from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise HubUnavailable(
            f"the hub has no repository {repo}, or it is private: check the name, and HF_TOKEN"
        ) from error
    except Exception as error:
        # What comes has no base in common: by release OSError (requests) or HTTPError (httpx,
        # httpx2) of the transport, RuntimeError of hf_xet, ValueError for a name that is none.
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise HubUnavailable(f"the hub does not give {repo}: {_kind(error)}") from error


def _kind(error: BaseException) -> str:
    """The reason at the bottom of a chain of connection errors, in a few words."""
    text = str(error)
    if "resolve" in text or "Name or service" in text:
        return "its name does not resolve"
    if isinstance(error, requests.Timeout):
        return "timed out"
    if "refused" in text:
        return "connection refused"
    return type(error).__name__
