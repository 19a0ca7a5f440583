"""A tree as a tar: byte for byte, and its contents by id."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from environments import treearchive
from environments.treearchive import TreeArchive, everything


def tree(folder: Path) -> Path:
    """One of everything that a tar can hold."""
    long = "d" * 60 + "/" + "e" * 60 + "/file.txt"
    names = ["plain.txt", "with space/ünï文", 'quo"te\\', "new\nline", long, "empty", ".git/config"]
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if name == "empty" else os.fsencode(name) * 100)
    (folder / "run.sh").write_bytes(b"#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "secret").write_bytes(b"s")
    (folder / "secret").chmod(0o600)
    (folder / "link").symlink_to("plain.txt")
    (folder / "far").symlink_to("x" * 150)
    (folder / "hollow" / "deep").mkdir(parents=True)
    os.link(folder / "plain.txt", folder / "second name")
    os.mkfifo(folder / "pipe")
    raw = os.fsencode(folder) + b"/latin-\xe9"
    with open(raw, "wb") as file:  # noqa: PTH123 (bytes path)
        file.write(b"e")
    os.utime(folder / "plain.txt", (1_500_000_000.75, 1_500_000_000.75))
    return folder


def listing(top: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        info = path.lstat()
        name = str(path.relative_to(top))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = (stat.S_IMODE(info.st_mode), int(info.st_mtime), path.read_bytes())
        elif path.is_dir():
            found[name] = stat.S_IMODE(info.st_mode)
    return found


def unpacked(archive: TreeArchive, into: Path) -> Path:
    into.mkdir()
    for part in archive.parts():
        subprocess.run(["tar", "-xpf", "-", "-C", into], input=part.read(), check=True)
    return into


def test_unpacked_it_is_the_tree(tmp_path: Path) -> None:
    top = tree(tmp_path / "tree")
    archive = TreeArchive.of(top, everything(top))
    found = listing(unpacked(archive, tmp_path / "out"))
    assert found == listing(top)
    assert (tmp_path / "out" / "plain.txt").stat().st_nlink == 2
    assert archive.holds_git
    archive.close()


def test_its_parts_come_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(treearchive, "_PART", 1)
    top = tree(tmp_path / "tree")
    names = [n for n in everything(top) if not (top / n).is_dir() and n != "pipe"]
    taken = threading.Semaphore(0)

    def slowly() -> Iterator[str]:
        for name in names:
            yield name
            assert taken.acquire(timeout=30)

    archive = TreeArchive.of(top, slowly())
    sizes, out = [], tmp_path / "out"
    out.mkdir()
    for part in archive.parts():
        data = part.read()
        sizes.append(len(data) - 1024)
        subprocess.run(["tar", "-xpf", "-", "-C", out], input=data, check=True)
        taken.release()
    assert len(sizes) > len(names) - 3  # the last ones may come together
    archive.save(tmp_path / "whole.tar")
    assert sum(sizes) == (tmp_path / "whole.tar").stat().st_size - 1024
    assert {k: v for k, v in listing(out).items() if not isinstance(v, int)} == {
        k: v for k, v in listing(top).items() if not isinstance(v, int)
    }
    archive.close()


def test_contents_are_found_by_the_ids_that_git_gives(tmp_path: Path) -> None:
    top = tree(tmp_path / "tree")
    archive = TreeArchive.of(top, ["plain.txt", "run.sh", "link", "empty"]).whole()
    assert not archive.holds_git
    asked = ["git", "hash-object", "--no-filters", "plain.txt", "run.sh", "empty"]
    ids = subprocess.run(asked, cwd=top, capture_output=True, check=True).stdout.split()
    assert {bytes.fromhex(blob.decode()) for blob in ids} == set(archive.ids)
    for blob, name in zip(ids, ("plain.txt", "run.sh", "empty"), strict=True):
        assert archive.read(bytes.fromhex(blob.decode())) == (top / name).read_bytes()
    archive.close()


def test_one_that_was_saved_holds_the_same(tmp_path: Path) -> None:
    top = tree(tmp_path / "tree")
    archive = TreeArchive.of(top, everything(top))
    archive.save(tmp_path / "saved.tar")
    again = TreeArchive.opened(tmp_path / "saved.tar")
    assert set(again.ids) == set(archive.ids)
    assert sorted(again.placed) == sorted(archive.placed)
    assert all(again.read(blob) == archive.read(blob) for blob in archive.ids)
    assert listing(unpacked(again, tmp_path / "out")) == listing(top)
    subprocess.run(["tar", "-cf", tmp_path / "gnu.tar", "-C", top, "."], check=True)
    theirs = TreeArchive.opened(tmp_path / "gnu.tar")
    assert set(theirs.ids) == set(archive.ids)
    assert theirs.holds_git
    for item in (archive, again, theirs):
        item.close()


def test_a_digest_names_content_names_links_and_modes(tmp_path: Path) -> None:
    def digest() -> str:
        archive = TreeArchive.of(tmp_path / "t", sorted(everything(tmp_path / "t")))
        try:
            return archive.digest
        finally:
            archive.close()

    (tmp_path / "t").mkdir()
    file, link = tmp_path / "t" / "a", tmp_path / "t" / "l"
    file.write_bytes(b"one")
    link.symlink_to("a")
    seen = [digest()]
    os.utime(file, (1, 1))
    assert digest() == seen[0]
    changes = [
        lambda: file.write_bytes(b"two"),
        lambda: file.chmod(0o755),
        lambda: (link.unlink(), link.symlink_to("b")),
        lambda: file.rename(tmp_path / "t" / "c"),
        lambda: (tmp_path / "t" / "new").write_bytes(b""),
    ]
    for change in changes:
        change()
        seen.append(digest())
    assert len(set(seen)) == len(changes) + 1


def test_what_cannot_be_read_is_said_when_the_parts_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    archive = TreeArchive.of(tmp_path, ["a", "gone"])
    with pytest.raises(FileNotFoundError, match="gone"):
        list(archive.parts())
    archive.close()
    archive = TreeArchive.of(tmp_path, ["a", "gone"], vanishing=True)
    assert len(archive.whole().ids) == 1
    archive.close()


def test_large_files_are_streamed_and_have_no_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(treearchive, "LARGEST", 1000)
    data = os.urandom(5000)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "large").write_bytes(data)
    (tmp_path / "tree" / "small").write_bytes(data[:1000])
    archive = TreeArchive.of(tmp_path / "tree", ["large", "small"])
    out = unpacked(archive, tmp_path / "out")
    assert (out / "large").read_bytes() == data
    small = hashlib.sha1(b"blob 1000\0" + data[:1000]).digest()
    assert set(archive.ids) == {small}
    archive.close()


def test_names_of_any_length_and_time(tmp_path: Path) -> None:
    for length in (99, 100, 101, 155, 200, 255):
        (tmp_path / ("n" * length)).write_bytes(b"x")
    os.utime(tmp_path / ("n" * 99), (8**11 + 5, 8**11 + 5))
    os.utime(tmp_path / ("n" * 100), (-5, -5))
    archive = TreeArchive.of(tmp_path, everything(tmp_path)).whole()
    archive.file.seek(0)
    with tarfile.open(fileobj=archive.file, mode="r:") as items:
        found = {item.name: item.mtime for item in items}
    assert {len(name) for name in found} == {99, 100, 101, 155, 200, 255}
    assert found["n" * 99] == 8**11 + 5
    assert found["n" * 100] == -5
    archive.close()
