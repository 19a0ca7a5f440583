"""Source distributions: sums, places they come from, the cache, unsafe archives."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import sources
from tasks.package_index import FetchError, IndexSettings, fetch, listing, pip_settings
from tasks.sources import Sdist


def make_tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o644
    return info, data


def sdist(data: bytes) -> Sdist:
    return Sdist(project="Some_Thing", file="some_thing-1.0.tar.gz", sha256=sum_of(data))


def sum_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


GOOD = make_tar(member("some_thing-1.0/pkg/a.py", b"x = 1\n"), member("some_thing-1.0/PKG-INFO"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address it is served at."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def guess_type(self, path: str | os.PathLike[str]) -> str:
            if (
                Path(path).suffix == ".json"
                or (Path(self.translate_path(self.path)) / "x").exists()
            ):
                return "application/vnd.pypi.simple.v1+json"
            return super().guess_type(path)

    folder = tmp_path / "site"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_wrong_sum_is_refused_and_leaves_nothing(cache: Path) -> None:
    wanted = sdist(GOOD)
    with pytest.raises(FetchError, match=f"should be {wanted.sha256}.*{sum_of(b'evil')}.*refused"):
        sources.archive(wanted, lambda _: [b"evil"])
    assert [p for p in cache.rglob("*") if p.is_file()] == []


def test_the_next_place_is_tried_after_one_with_a_wrong_sum() -> None:
    assert sources.archive(sdist(GOOD), lambda _: [b"evil", GOOD]).read_bytes() == GOOD


def test_what_is_cached_needs_no_network_and_a_damaged_archive_is_fetched_again() -> None:
    def offline(_: Sdist) -> Iterator[bytes]:
        raise FetchError("no network")

    path = sources.archive(sdist(GOOD), lambda _: [GOOD])
    assert sources.archive(sdist(GOOD), offline) == path
    path.write_bytes(GOOD[:-1])
    with pytest.raises(FetchError, match="no network"):
        sources.archive(sdist(GOOD), offline)
    assert sources.archive(sdist(GOOD), lambda _: [GOOD]).read_bytes() == GOOD


def test_the_tree_has_no_top_folder_and_is_mended_when_it_was_changed() -> None:
    def tree() -> Path:
        return sources.tree(sdist(GOOD), lambda _: [GOOD])

    assert (tree() / "pkg" / "a.py").read_bytes() == b"x = 1\n"
    (tree() / "pkg" / "a.py").write_text("x = 2\n")
    assert (tree() / "pkg" / "a.py").read_bytes() == b"x = 1\n"
    (tree() / "pkg" / "conftest.py").write_text("")
    assert not (tree() / "pkg" / "conftest.py").exists()
    before = (tree() / "pkg" / "a.py").stat().st_ctime_ns
    assert (tree() / "pkg" / "a.py").stat().st_ctime_ns == before  # unchanged: not unpacked again


def test_a_link_to_a_folder_does_not_make_the_tree_look_changed() -> None:
    data = make_tar(
        member("top/real/a.py", b"x"), member("top/link", kind=tarfile.SYMTYPE, link="real")
    )
    first = sources.tree(sdist(data), lambda _: [data])
    before = (first / "real" / "a.py").stat().st_ctime_ns
    again = sources.tree(sdist(data), lambda _: [data])
    assert (again / "link" / "a.py").stat().st_ctime_ns == before


@pytest.mark.parametrize(
    "bad",
    [
        member("top/../../../evil", b"x"),
        member("top/link", kind=tarfile.SYMTYPE, link="../../../etc/passwd"),
        member("top/link", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        member("top/hard", kind=tarfile.LNKTYPE, link="top/other"),
        member("top/device", kind=tarfile.CHRTYPE),
    ],
)
def test_archives_that_reach_outside_are_refused(bad, cache: Path, tmp_path: Path) -> None:
    data = make_tar(bad)
    with pytest.raises(FetchError, match="member"):
        sources.tree(sdist(data), lambda _: [data])
    assert not (tmp_path / "evil").exists()
    assert not list(cache.rglob("tree"))
    assert not list(cache.rglob("unpack-*"))


@pytest.mark.parametrize("name", ["../x.tar.gz", "a/b.tar.gz", "x.zip", ".tar.gz"])
def test_file_names_that_are_not_plain_sdists_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="file"):
        Sdist(project="x", file=name, sha256="0" * 64)


def test_fetch_from_html_json_and_folders(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    (folder / "files").mkdir()
    (folder / "files" / "some_thing-1.0.tar.gz").write_bytes(GOOD)
    page = folder / "html" / "some-thing"
    page.mkdir(parents=True)
    (page / "index.html").write_text(
        '<a href="../../files/some_thing-1.0.tar.gz#sha256=00">some_thing-1.0.tar.gz</a>'
    )
    links = tmp_path / "links"
    links.mkdir()
    (links / "some_thing-1.0.tar.gz").write_bytes(GOOD)
    (folder / "page.json").write_text(
        json.dumps(
            {"files": [{"filename": "some_thing-1.0.tar.gz", "url": "files/some_thing-1.0.tar.gz"}]}
        )
    )
    for settings in (
        IndexSettings((f"{address}/html",)),
        IndexSettings((f"{address}/absent", f"{address}/html/")),
        IndexSettings((), (str(links),)),
        IndexSettings((), (f"{address}/page.json",)),
        IndexSettings((), (links.as_uri(),)),
        IndexSettings(((folder / "html").as_uri(),)),
    ):
        assert list(fetch("Some_Thing", "some_thing-1.0.tar.gz", settings)) == [GOOD], settings


def test_the_files_of_a_project_and_the_sums_that_the_index_gives(
    site: tuple[Path, str], tmp_path: Path
) -> None:
    folder, address = site
    page = folder / "html" / "some-thing"
    page.mkdir(parents=True)
    (page / "index.html").write_text(
        f'<a href="../a-1.0.tar.gz#sha256={"0" * 64}">a</a><a href="b-1.0.tar.gz#md5=0">b</a>'
    )
    (folder / "page.json").write_text(
        json.dumps(
            {
                "files": [
                    {"filename": "b-1.0.tar.gz", "url": "b", "hashes": {"sha256": "1" * 64}},
                    {"filename": "a-1.0.tar.gz", "url": "a", "hashes": {"sha256": "2" * 64}},
                ]
            }
        )
    )
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "c-1.0.tar.gz").write_bytes(GOOD)
    places = (f"{address}/page.json", str(tmp_path / "links"))
    found = listing("Some_Thing", IndexSettings((f"{address}/gone", f"{address}/html"), places))
    assert found == {"a-1.0.tar.gz": "0" * 64, "b-1.0.tar.gz": "1" * 64, "c-1.0.tar.gz": None}
    with pytest.raises(FetchError, match=r"cannot list the files of x: .*answered 404"):
        listing("x", IndexSettings((f"{address}/gone",)))


def test_the_error_says_what_each_place_answered_and_hides_passwords(
    site: tuple[Path, str],
) -> None:
    folder, address = site
    (folder / "some-thing").mkdir()
    (folder / "some-thing" / "index.html").write_text("nothing")
    secret = address.replace("http://", "http://me:secret@")
    settings = IndexSettings((secret, f"{address}/gone", "http://127.0.0.1:1/simple"))
    with pytest.raises(FetchError) as caught:
        list(fetch("some-thing", "some_thing-1.0.tar.gz", settings))
    text = str(caught.value)
    assert "does not list some_thing-1.0.tar.gz" in text
    assert "answered 404" in text
    assert "cannot be reached" in text
    assert "pip config list" in text
    assert "secret" not in text


def test_pip_settings_follow_pip(tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://one.invalid/simple\nextra-index-url = file:///extra\n"
        "[download]\ncert = /from/file\n[install]\nproxy = http://ignored.invalid\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    env["PIP_CONFIG_FILE"] = str(config)
    settings = pip_settings(env | {"PIP_FIND_LINKS": "/a /b"})
    assert settings.indexes[0] == "https://one.invalid/simple"
    assert "file:///extra" in settings.indexes
    assert settings.find_links == ("/a", "/b")
    assert settings.cert == "/from/file"
    assert settings.proxy is None
    settings = pip_settings(env | {"PIP_INDEX_URL": "https://two.invalid/simple"})
    assert settings.indexes[0] == "https://two.invalid/simple"
    assert pip_settings(env | {"PIP_NO_INDEX": "1"}).indexes == ()


def test_without_any_setting_the_index_is_pips_own() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    first = pip_settings(env | {"PIP_CONFIG_FILE": os.devnull}).indexes[0]
    from pip._internal.models.index import PyPI

    assert first == PyPI.simple_url
