"""Finds a file on the package indexes that pip is configured for, without running any package.

`pip download` of a source distribution runs its build backend to learn its metadata. What an agent
is asked to repair is not to be run on the host, so this asks the same indexes itself: the simple
API (PEP 503 pages and PEP 691 JSON), `find-links` folders and pages, with pip's certificates and
proxy. No host is named here: the default index is the one pip itself carries.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import url2pathname

import requests

from tasks.instance import TaskError

_ACCEPT = (
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.5, "
    "text/html;q=0.1"
)


class FetchError(TaskError):
    """A file could not be fetched, or is not what it should be."""


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Where pip looks for packages on this machine, and how it connects."""

    indexes: tuple[str, ...]  # base URLs of the simple API, in order
    find_links: tuple[str, ...] = ()  # folders, file: URLs or pages
    cert: str | None = None  # CA bundle; None leaves the choice to requests
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: frozenset[str] = frozenset()
    timeout: float = 60.0  # seconds, per read


def pip_settings(environ: Mapping[str, str] | None = None) -> IndexSettings:
    """The settings of the pip of this interpreter: its files, then `PIP_*` variables.

    `environ` replaces the process's environment (for tests). Without pip the variables alone count;
    FetchError if then no index is known.
    """
    env = dict(os.environ if environ is None else environ)
    values = _pip_config(env)

    def many(name: str) -> tuple[str, ...]:
        return tuple(values.get(name, "").split())

    indexes: tuple[str, ...] = ()
    if values.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        indexes = (values.get("index-url") or _default_index(), *many("extra-index-url"))
    return IndexSettings(
        indexes=indexes,
        find_links=many("find-links"),
        cert=values.get("cert") or None,
        client_cert=values.get("client-cert") or None,
        proxy=values.get("proxy") or None,
        trusted_hosts=frozenset(many("trusted-host")),
        timeout=float(values.get("timeout") or values.get("default-timeout") or 60.0),
    )


def _pip_config(env: Mapping[str, str]) -> dict[str, str]:
    """pip's options by name. As in pip: global < [download] < environment."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    ranks = {"global": 0, "download": 1, ":env:": 2}
    best: dict[str, tuple[int, str]] = {}
    for line in done.stdout.splitlines():  # global.index-url='https://...'
        key, equals, quoted = line.partition("=")
        section, _, name = key.rpartition(".")
        if not equals or section not in ranks:
            continue
        value = str(ast.literal_eval(quoted))
        if name not in best or ranks[section] >= best[name][0]:
            best[name] = (ranks[section], value)
    if done.returncode != 0:  # no pip here
        for key, value in env.items():
            if key.startswith("PIP_") and value:
                best[key[4:].lower().replace("_", "-")] = (2, value)
    return {name: value for name, (_, value) in best.items()}


def _default_index() -> str:
    try:
        from pip._internal.models.index import PyPI
    except ImportError as error:
        raise FetchError(
            "no package index is known: this Python has no pip and PIP_INDEX_URL is not set; "
            "install pip or set PIP_INDEX_URL"
        ) from error
    return str(PyPI.simple_url)


def fetch(project: str, filename: str, settings: IndexSettings) -> Iterator[bytes]:
    """Yield, for every place that offers `filename` of `project`, the file's bytes.

    The caller checks each against its sum and stops at the first that fits. Places that cannot be
    reached are skipped; if no place gave the file, FetchError says what each of them answered.
    """
    found = False
    troubles: list[str] = []
    with _session(settings) as session:
        for page in (*settings.find_links, *(_project_url(i, project) for i in settings.indexes)):
            try:
                link = _links(session, page, settings).get(filename)
                if link is None:
                    troubles.append(f"{_shown(page)}: does not list {filename}")
                    continue
                data = _read(session, link.address, settings)[0]
            except (OSError, ValueError) as error:  # requests' errors are OSErrors
                troubles.append(f"{_shown(page)}: {_reason(error)}")
                continue
            found = True
            yield data
    if not found:
        places = "; ".join(troubles) or "pip is configured with no index and no find-links"
        raise FetchError(
            f"cannot fetch {filename}: {places}. Check the network or pip's index settings "
            "(`pip config list`); what was fetched once is kept and needs no network"
        )


def listing(project: str, settings: IndexSettings) -> dict[str, str | None]:
    """Names of all files of a project, with the sha256 that the first place to give one gives.

    FetchError if no place lists any; it says what each of them answered.
    """
    sums: dict[str, str | None] = {}
    troubles: list[str] = []
    # find-links hold files of many projects; names are the caller's to compare
    with _session(settings) as session:
        for page in (*(_project_url(i, project) for i in settings.indexes), *settings.find_links):
            try:
                links = _links(session, page, settings)
            except (OSError, ValueError) as error:
                troubles.append(f"{_shown(page)}: {_reason(error)}")
                continue
            for name, link in links.items():
                sums[name] = sums.get(name) or link.sha256
    if not sums:
        places = "; ".join(troubles) or "pip is configured with no index and no find-links"
        raise FetchError(
            f"cannot list the files of {project}: {places}. Check the name, the network and pip's "
            "index settings (`pip config list`)"
        )
    return sums


def _session(settings: IndexSettings) -> requests.Session:
    session = requests.Session()
    session.mount("https://", requests.adapters.HTTPAdapter(max_retries=2))
    session.cert = settings.client_cert
    if settings.proxy:
        session.proxies = {"http": settings.proxy, "https": settings.proxy}
    return session


def _project_url(index: str, project: str) -> str:
    return f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', project).lower()}/"


def _local(place: str) -> Path | None:
    """The path that `place` means, if it is on this machine."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return None if parts.scheme in ("http", "https") else Path(place).expanduser()


def _read(session: requests.Session, place: str, settings: IndexSettings) -> tuple[bytes, str, str]:
    """Bytes, content type and final address of a file or page."""
    path = _local(place)
    if path is not None:
        if path.is_dir():
            path /= "index.html"
        return path.read_bytes(), "text/html", path.as_uri() if path.is_absolute() else place
    host = urlsplit(place).netloc.rpartition("@")[2]
    trusted = {host, host.partition(":")[0]} & settings.trusted_hosts
    answer = session.get(
        place,
        headers={"Accept": _ACCEPT, "Accept-Encoding": "identity"},
        timeout=(min(settings.timeout, 20.0), settings.timeout),
        verify=False if trusted else settings.cert,  # given, else an environment variable wins
    )
    answer.raise_for_status()
    return answer.content, answer.headers.get("Content-Type", ""), answer.url


@dataclass(frozen=True, slots=True)
class _Link:
    address: str
    sha256: str | None = None  # as the page gives it


def _links(session: requests.Session, page: str, settings: IndexSettings) -> dict[str, _Link]:
    """File name -> address and sum, of a simple page or a folder of files."""
    folder = _local(page)
    if folder is not None and folder.is_dir() and not (folder / "index.html").is_file():
        return {entry.name: _Link(str(entry)) for entry in folder.iterdir() if entry.is_file()}
    data, kind, address = _read(session, page, settings)
    if "json" in kind:
        return {
            entry["filename"]: _Link(
                urljoin(address, entry["url"]), (entry.get("hashes") or {}).get("sha256")
            )
            for entry in json.loads(data)["files"]
        }
    parser = _Anchors()
    parser.feed(data.decode("utf-8", "replace"))
    base = urljoin(address, parser.base) if parser.base else address
    links: dict[str, _Link] = {}
    for href in parser.hrefs:
        target, fragment = urldefrag(urljoin(base, href))
        name = unquote(urlsplit(target).path).rpartition("/")[2]
        known = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
        links.setdefault(name, _Link(target, known[1] if known else None))
    return links


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base: str | None = None
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "a" and href:
            self.hrefs.append(href)
        elif tag == "base" and href and self.base is None:
            self.base = href


def _shown(place: str) -> str:
    """An address without user name and password."""
    parts = urlsplit(place)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _reason(error: Exception) -> str:
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"answered {error.response.status_code}"
    if isinstance(error, requests.exceptions.SSLError):
        return "its certificate was not accepted (set PIP_CERT to your CA bundle)"
    if isinstance(error, requests.Timeout):
        return "did not answer in time"
    if isinstance(error, requests.ConnectionError):
        return "cannot be reached"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
