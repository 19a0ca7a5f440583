"""Rows of task files: JSON lines, JSON and parquet, on disk or in data sets of the hub.

The hub's client settles where fetched files are kept; `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and
`HF_HUB_OFFLINE` mean what they mean everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from environments.paths import cache_dir
from tasks.instance import TaskError

SUFFIXES = (".jsonl", ".json", ".parquet")
_NAME = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?(:(?P<split>\w+))?$")
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "state.json", "config.json"}


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read."""

    place: str  # file, and line or number
    fields: dict[str, Any]
    folder: Path  # of the file


def read_rows(src: str, split: str = "test") -> Iterator[Row]:
    """All rows of a file, a folder, or a data set of the hub. Raises TaskError."""
    path = Path(src).expanduser()
    if path.is_dir():
        names = [str(p.relative_to(path)) for p in sorted(path.rglob("*")) if p.is_file()]
        files = [path / name for name in choose(names, split, src)]
    elif path.is_file():
        files = [path]
    elif path.suffix in SUFFIXES:
        raise TaskError(f"{src}: no such file")
    elif named := _NAME.fullmatch(src):
        wanted = named["split"] or split
        files = fetch(named["repo"], named["revision"], wanted, strict=bool(named["split"]))
    else:
        raise TaskError(
            f"{src!r} is no source of tasks: give pairs, a file ({', '.join(SUFFIXES)}), a folder "
            "of such files, or a data set of the hub as owner/name"
        )
    for file in files:
        yield from read_file(file)


def read_file(path: Path) -> Iterator[Row]:
    """The rows of one file, each with its line or number."""
    readers = {".jsonl": _lines, ".json": _list, ".parquet": _parquet}
    if path.suffix not in readers:
        raise TaskError(f"{path}: not a file of rows; they end in {', '.join(SUFFIXES)}")
    for place, row in readers[path.suffix](path):
        if not isinstance(row, dict):
            raise TaskError(f"{place} is no object with fields")
        yield Row(place, row, path.absolute().parent)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}, line {number}", _parsed(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read {path}: {error}") from error


def _list(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read {path}: {error}") from error
    data = _parsed(text, str(path))
    if not isinstance(data, list):
        raise TaskError(f"{path}: a .json file of rows is one list; with a row a line it is .jsonl")
    for number, row in enumerate(data, 1):
        yield f"{path}, row {number}", row


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise TaskError(f"{place} is no JSON: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise TaskError(
            f"reading {path} needs pyarrow, which the extra `data` brings: "
            "pip install 'nexus-agent[data]'"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):  # rows can be large
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (OSError, ArrowException) as error:
        raise TaskError(f"cannot read {path}: {error}") from error


def choose(names: Sequence[str], split: str, src: str, *, strict: bool = False) -> list[str]:
    """The files of a split: those that have its name as a folder or as a part of theirs.

    Unless `strict`, where all files are of one split, these are meant whatever `split` says.
    Raises TaskError, which names what there is.
    """
    data = [
        name
        for name in sorted(names)
        if PurePosixPath(name).suffix in SUFFIXES and PurePosixPath(name).name not in _NOT_DATA
    ]
    for suffix in (".parquet", ".jsonl", ".json"):  # one and the same data set may have several
        of_kind = [name for name in data if name.endswith(suffix)]
        chosen = [name for name in of_kind if split in _words(name)]
        if chosen:
            return chosen
        if not strict and len({_split(name) for name in of_kind}) == 1:
            return of_kind
    if not data:
        raise TaskError(f"{src} holds no {', '.join(SUFFIXES)} files")
    raise TaskError(
        f"{src} has no split {split!r}; there are {', '.join(sorted({_split(n) for n in data}))} "
        f"(name one with {src}:SPLIT)"
    )


def _words(name: str) -> set[str]:
    """Folders and parts of the name: data/test-00000-of-00001.parquet has `test` among them."""
    return {word for part in PurePosixPath(name).parts for word in re.split(r"[-.]", part)}


def _split(name: str) -> str:
    return re.split(r"[-.]", PurePosixPath(name).name)[0]


def fetch(repo: str, revision: str | None, split: str, *, strict: bool = False) -> list[Path]:
    """Files of a data set of the hub, fetched or from its client's cache. Raises TaskError."""
    import huggingface_hub as hub
    import requests
    from huggingface_hub import constants, errors

    def get(names: Sequence[str], **more: Any) -> list[Path]:
        chosen = choose(names, split, repo, strict=strict)
        more |= {"repo_type": "dataset", "revision": revision}
        return [Path(hub.hf_hub_download(repo, name, **more)) for name in chosen]

    # what a data set consists of, for a time without the hub
    name = f"{repo}@{revision or 'main'}".replace("/", "--")
    listing = cache_dir("datasets") / f"{name}.json"
    try:
        if not constants.HF_HUB_OFFLINE:  # the client alone would try again for half a minute
            requests.head(constants.ENDPOINT, timeout=(3.0, 3.0), allow_redirects=False)
        names = hub.HfApi().list_repo_files(repo, repo_type="dataset", revision=revision)
        listing.write_text(json.dumps(names))
        return get(names)
    except TaskError:
        raise
    except Exception as error:  # the client's transport raises exceptions of its own libraries
        answer = getattr(error, "response", None)
        status = getattr(answer, "status_code", None)
        if isinstance(error, errors.HfHubHTTPError) and status in (401, 403, 404):
            raise TaskError(
                f"the hub gives no data set {repo}{f'@{revision}' if revision else ''} ({status}); "
                "check its name, and HF_TOKEN if it is not public"
            ) from error
        try:
            return get(json.loads(listing.read_text()), local_files_only=True)
        except (OSError, ValueError, errors.LocalEntryNotFoundError):
            raise TaskError(
                f"the hub cannot be reached for the data set {repo} ({_brief(error)}), and it was "
                f"not fetched before; give a file instead (there is none at {repo}), or set "
                "HF_ENDPOINT"
            ) from error


def _brief(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text else type(error).__name__
