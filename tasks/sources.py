"""Source distributions: fetched by exact sum, kept in the user's cache, unpacked with care."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, Field

from environments.paths import cache_dir, locked
from tasks.package_index import FetchError, fetch, pip_settings


class Sdist(BaseModel):
    """One source distribution, known by its sum."""

    model_config = ConfigDict(frozen=True)

    project: str
    file: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+!-]*\.tar\.gz$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


def archive(sdist: Sdist, download: Callable[[Sdist], Iterable[bytes]] | None = None) -> Path:
    """The archive, from the cache or from pip's indexes; its sum is checked at every call.

    `download` yields candidates (default: pip's indexes). FetchError if none has the right sum.
    """
    path = cache_dir("sdists", sdist.sha256[:16]) / sdist.file
    if path.is_file() and _sha256(path.read_bytes()) == sdist.sha256:
        return path
    wrong: list[str] = []
    for data in (download or _from_indexes)(sdist):
        if _sha256(data) == sdist.sha256:
            _write(path, data)
            return path
        wrong.append(_sha256(data))
    raise FetchError(
        f"{sdist.file}: sha256 should be {sdist.sha256}, but what was offered has "
        f"{', '.join(wrong) or 'no content'}; refused. Use an index that has the original file"
    )


def tree(sdist: Sdist, download: Callable[[Sdist], Iterable[bytes]] | None = None) -> Path:
    """The unpacked source tree, without the archive's top folder.

    Kept in the cache. It is compared with the archive at every call and unpacked again if anything
    changed it. Raises FetchError.
    """
    packed = archive(sdist, download)
    place = packed.parent / "tree"
    with locked(packed.parent / "lock"), tarfile.open(packed) as tar:
        if _same(tar, place):
            return place
        shutil.rmtree(place, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix="unpack-", dir=packed.parent))
        try:
            _unpack(tar, fresh, sdist.file)
            fresh.chmod(0o755)
            fresh.rename(place)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return place


def unpack(packed: bytes, into: Path, name: str) -> Path:
    """Unpack an archive into a new folder, without its top folder. FetchError for unsafe members;
    `name` is what it calls the archive."""
    into.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        _unpack(tar, into, name)
    return into


def _from_indexes(sdist: Sdist) -> Iterable[bytes]:
    return fetch(sdist.project, sdist.file, pip_settings())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, also when two processes do it."""
    handle, name = tempfile.mkstemp(prefix="fetch-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _inner(member: tarfile.TarInfo) -> PurePosixPath | None:
    """Path of a member below the archive's top folder; None for that folder itself."""
    parts = PurePosixPath(member.name).parts
    return PurePosixPath(*parts[1:]) if len(parts) > 1 else None


def _unpack(tar: tarfile.TarFile, into: Path, name: str) -> None:
    for member in tar:
        inner = _inner(member)
        if inner is None:
            continue
        if member.islnk():
            raise FetchError(f"{name}: member {member.name!r} is a hard link; not supported")
        try:  # the filter refuses paths and links that lead outside, devices and set-uid bits
            tar.extract(member.replace(name=str(inner), deep=False), into, filter="data")
        except (tarfile.FilterError, KeyError) as error:
            raise FetchError(f"{name}: unsafe member {member.name!r}: {error}") from error


def _same(tar: tarfile.TarFile, place: Path) -> bool:
    """Whether the folder holds the archive's regular files, byte by byte, and no others."""
    if not place.is_dir():
        return False
    # a link to a folder is a member like a file
    there = {
        str(p.relative_to(place)) for p in place.rglob("*") if p.is_symlink() or not p.is_dir()
    }
    for member in tar:
        inner = _inner(member)
        if inner is None or member.isdir():
            continue
        if str(inner) not in there:
            return False
        there.discard(str(inner))
        content = tar.extractfile(member) if member.isreg() else None
        if content is not None and (place / inner).read_bytes() != content.read():
            return False
    return not there
