"""A tree as one tar in a temporary file, with the blob ids of its contents.

It is read once from the host's disk, and goes into a sandbox while it is still read; and since its
contents stay here, they need not be fetched from there when a base is marked.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Self, cast

from environments.treescan import LARGEST, blob_id, read_whole

_BLOCK = 512
_PART = 16 << 20  # bytes that are worth a program to unpack them
_OWNER = b"0000000\0"
_MAGIC = b"ustar  \0" + bytes(80) + bytes(167)  # owners without names, no device, the rest
_SUM = sum(_MAGIC) + 8 * ord(" ")  # of what is in every header, its own place taken for blanks


class Contents:
    """Contents of files by the ids git gives them, in a file."""

    def __init__(
        self, file: IO[bytes], ids: dict[bytes, tuple[int, int]], *, packed: bool = False
    ) -> None:
        """`ids`: id -> offset and length in the file, each compressed by zlib if `packed`."""
        self.file, self.ids, self._packed = file, ids, packed

    @classmethod
    def bundled(cls, file: IO[bytes]) -> Self:
        """Those in a file of `treescan.py`: id, length as 8 bytes, compressed content, ..."""
        ids = {}
        at = file.seek(0)
        while len(head := file.read(28)) == 28:
            length = int.from_bytes(head[20:], "big")
            ids[head[:20]] = (at + 28, length)
            at = file.seek(at + 28 + length)
        return cls(file, ids, packed=True)

    def read(self, blob: bytes) -> bytes:
        """Raises KeyError, OSError, ValueError where it is closed."""
        offset, length = self.ids[blob]
        self.file.flush()
        data = os.pread(self.file.fileno(), length, offset)
        return zlib.decompress(data) if self._packed else data

    def close(self) -> None:
        """Free the file."""
        self.file.close()


class TreeArchive(Contents):
    """A tar that holds a tree, whole. Closed by whoever made it."""

    def __init__(self, file: IO[bytes], ids: dict[bytes, tuple[int, int]]) -> None:
        super().__init__(file, ids)
        # of each file: size, time, id and name, as `treescan.py` takes
        self.placed: list[bytes] = []
        self.holds_git = False  # whether anything in it is named `.git`
        self._digest = hashlib.sha256()
        self._ready = 0  # bytes that are in the file
        self._failure: BaseException | None = None
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, top: Path, names: Iterable[str], *, vanishing: bool = False) -> Self:
        """Of files, links and folders below `top`, by relative names; other kinds are left out.

        Folders that are not named come with the files in them. The work is done beside the caller:
        what cannot be read or (unless `vanishing`) is gone is an OSError of `parts` and `whole`.
        """
        archive = cls(tempfile.TemporaryFile(), {})  # noqa: SIM115 (closed with the archive)

        def fill() -> None:
            try:
                archive._fill(os.fsencode(top), names, vanishing=vanishing)
            except BaseException as error:  # handed to whoever waits
                archive._failure = error
            with archive._news:
                archive._thread = None
                archive._news.notify_all()

        archive._thread = threading.Thread(target=fill, name="tree-archive", daemon=True)
        archive._thread.start()
        return archive

    @classmethod
    def opened(cls, path: Path) -> Self:
        """A tar on disk, made by any program. Raises OSError, tarfile.TarError."""
        archive = cls(path.open("rb"), {})
        file = archive.file
        archive._ready = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as items:
                for item in items:
                    name = os.fsencode(item.name.removeprefix("./"))
                    archive.holds_git |= b".git" in name.split(b"/")
                    if item.isreg() and not item.issparse() and item.size <= LARGEST:
                        data = os.pread(file.fileno(), item.size, item.offset_data)
                        archive._holds(name, item.mtime, data, item.offset_data)
        except BaseException:
            archive.close()
            raise
        return archive

    def parts(self) -> Iterator[IO[bytes]]:
        """The tar in parts, each a tar of its own, as they become ready. Raises OSError."""
        at = 0
        while True:
            with self._news:
                while self._thread is not None and self._ready - at < _PART:
                    self._news.wait()
                over, ready = self._thread is None, self._ready
            if self._failure is not None:
                raise self._failure
            if ready > at or not at:
                yield cast("IO[bytes]", _Slice(self.file, at, ready))
            if over:
                return
            at = ready

    def whole(self) -> Self:
        """The archive, when it is complete. Raises OSError."""
        with self._news:
            while self._thread is not None:
                self._news.wait()
        if self._failure is not None:
            raise self._failure
        return self

    @property
    def digest(self) -> str:
        """What names the tree by its content: names, bytes, links and whether files can be run.

        Of an archive made by `of`, once it is complete.
        """
        self.whole()
        return self._digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the tar to disk, once it is complete. Raises OSError."""
        self.whole()
        with path.open("xb") as sink:
            shutil.copyfileobj(_Slice(self.file, 0, self._ready), sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())

    def close(self) -> None:
        """Free the file, once nobody writes to it."""
        with self._news:
            while self._thread is not None:
                self._news.wait()
        super().close()

    def _fill(self, top: bytes, names: Iterable[str], *, vanishing: bool) -> None:
        at = 0
        seen: dict[tuple[int, int], bytes] = {}  # files with several names: they stay one file
        for text in names:
            name = os.fsencode(text)
            if b".git" in name and b".git" in name.split(b"/"):
                self.holds_git = True
            try:
                at += self._add(name, top + b"/" + name, at, seen)
            except FileNotFoundError:
                if not vanishing:
                    raise
            if at - self._ready >= _PART:
                self._tell(at)
        self._tell(at)

    def _add(self, name: bytes, path: bytes, at: int, seen: dict[tuple[int, int], bytes]) -> int:
        """Write one entry at `at`; returns its bytes."""
        info = os.lstat(path)
        kind, write = stat.S_IFMT(info.st_mode), self.file.write
        if kind == stat.S_IFLNK:
            target = os.readlink(path)  # noqa: PTH115 (bytes)
            self._digest.update(b"%b\0%b\0" % (target, name))
            return write(_head(name, info, tarfile.SYMTYPE, 0, target))
        if kind == stat.S_IFDIR:
            return write(_head(name + b"/", info, tarfile.DIRTYPE, 0))
        if kind != stat.S_IFREG:
            return 0
        if info.st_nlink > 1:
            first = seen.setdefault((info.st_dev, info.st_ino), name)
            if first != name:
                self._digest.update(b"%b\0%b\0" % (first, name))
                return write(_head(name, info, tarfile.LNKTYPE, 0, first))
        data = read_whole(path, info.st_size, LARGEST)
        if data is None:  # in no patch, so no id is needed
            self._digest.update(b"%d %d\0" % (info.st_size, info.st_mtime_ns) + name)
            return _write_large(self.file, name, path, info)
        head = _head(name, info, tarfile.REGTYPE, len(data))
        blob = self._holds(name, info.st_mtime, data, at + len(head))
        self._digest.update(b"%b%d\0%b\0" % (blob, info.st_mode & 0o100, name))
        return write(head + data + bytes(-len(data) % _BLOCK))

    def _holds(self, name: bytes, mtime: float, data: bytes, offset: int) -> bytes:
        """Note where a content stands. Returns its id."""
        blob = blob_id(data)
        self.ids[blob] = (offset, len(data))
        self.placed.append(b"%d %d %b %b" % (len(data), mtime, blob.hex().encode(), name))
        return blob

    def _tell(self, ready: int) -> None:
        self.file.flush()
        with self._news:
            self._ready = ready
            self._news.notify_all()


class _Slice(io.RawIOBase):
    """A part of a file that another thread writes to, with the end of a tar behind it."""

    def __init__(self, file: IO[bytes], start: int, end: int) -> None:
        super().__init__()
        self._fd, self._start, self._end, self._at = file.fileno(), start, end, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, self._size)
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._at
        size = left if size < 0 else min(size, left)
        own = max(0, min(size, self._end - self._start - self._at))
        data = os.pread(self._fd, own, self._start + self._at)
        if len(data) == own:
            data += bytes(size - own)
        self._at += len(data)
        return data

    @property
    def _size(self) -> int:
        return self._end - self._start + 2 * _BLOCK


def everything(top: Path) -> Iterator[str]:
    """Names of all that is below a folder, each folder before what it holds."""
    todo = [""]
    while todo:
        before = todo.pop()
        with os.scandir(top / before) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            yield before + entry.name
            if entry.is_dir(follow_symlinks=False):
                todo.append(f"{before}{entry.name}/")


def _write_large(file: IO[bytes], name: bytes, path: bytes, info: os.stat_result) -> int:
    """A large file, as long as it was when looked at: cut, or filled up with zeros."""
    written = file.write(_head(name, info, tarfile.REGTYPE, info.st_size))
    left = info.st_size
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        while left and (data := os.read(fd, min(left, 1 << 20))):
            left -= file.write(data)
    finally:
        os.close(fd)
    while left:
        left -= file.write(bytes(min(left, 1 << 20)))
    return written + info.st_size + file.write(bytes(-info.st_size % _BLOCK))


def _head(name: bytes, info: os.stat_result, kind: bytes, size: int, link: bytes = b"") -> bytes:
    """A header as GNU tar writes it, owned by nobody."""
    mtime = int(info.st_mtime)
    if len(name) > 100 or len(link) > 100 or size >= 8**11 or not 0 <= mtime < 8**11:
        item = tarfile.TarInfo(os.fsdecode(name.rstrip(b"/")))
        item.mode, item.mtime, item.size, item.type = stat.S_IMODE(info.st_mode), mtime, size, kind
        item.linkname = os.fsdecode(link)
        return item.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    fields = b"%07o\0" % stat.S_IMODE(info.st_mode) + _OWNER * 2 + b"%011o\0%011o\0" % (size, mtime)
    check = _SUM + sum(name) + sum(fields) + kind[0] + sum(link)
    name, link = name.ljust(100, b"\0"), link.ljust(100, b"\0")
    return name + fields + b"%06o\0 " % check + kind + link + _MAGIC
