"""A root file system for containers made from files that this machine already has.

Two ways. `write_debian_rootfs`: on Debian and Ubuntu, the files of the wanted packages and all that
they depend on, by dpkg's own lists. `write_empty_rootfs`: on any merged-/usr Linux, an empty tree
whose /usr is mounted from the host at run time (`USR_MOUNTS`).
"""
# ruff: noqa: PTH113, PTH114, PTH118
# (a path here is compared and written as text, and a resolved one would not be the one wanted)

from __future__ import annotations

import functools
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

RECIPE = 1  # raise when the content of an image changes for reasons that names do not show

PACKAGES = """
bash coreutils dash diffutils findutils grep sed gzip bzip2 xz-utils tar mawk util-linux procps
hostname base-files base-passwd debianutils libc-bin ncurses-base passwd python3 python3-distutils
python3-lib2to3 git ca-certificates less patch make tzdata ripgrep file unzip
"""
REQUIRED = (
    "bash",
    "coreutils",
    "git",
    "grep",
    "sed",
    "findutils",
    "make",
    "patch",
    "tar",
    "tzdata",
)
SKIPPED = (
    "/usr/share/man/",
    "/usr/share/doc/",
    "/usr/share/doc-base/",
    "/usr/share/info/",
    "/usr/share/locale/",
    "/usr/share/lintian/",
    "/usr/share/bug/",
    "/usr/share/i18n/",
    "/var/lib/dpkg/",
    "/usr/lib/python3/dist-packages/",
    "/usr/lib/systemd/",
)
EXTRA_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/usr/bin/awk", "/usr/bin/which")
EXTRA_TREES = ("/etc/alternatives", "/etc/ld.so.conf.d", "/etc/ssl/certs")
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
FOLDERS = {
    "dev": 0o755,
    "etc": 0o755,
    "home": 0o755,
    "home/agent": 0o777,
    "mnt": 0o755,
    "opt": 0o755,
    "proc": 0o555,
    "root": 0o700,
    "run": 0o755,
    "sys": 0o555,
    "tmp": 0o1777,
    "usr": 0o755,
    "var": 0o755,
    "var/tmp": 0o1777,
    "workspace": 0o777,
}
ETC = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    "agent:x:1000:1000:agent:/home/agent:/bin/bash\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\nagent:x:1000:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
USR_MOUNTS = {
    path: path for path in ("/usr", "/etc/alternatives", "/etc/ssl/certs", "/etc/ld.so.cache")
}


def usr_python() -> str | None:
    """An interpreter of this machine below /usr."""
    return shutil.which("python3", path="/usr/bin:/usr/local/bin")


def missing_packages() -> list[str]:
    """Required packages that this machine's dpkg does not know; ["dpkg"] where there is no dpkg."""
    try:
        known = _installed()
    except (OSError, subprocess.SubprocessError):
        return ["dpkg"]
    missing = [name for name in REQUIRED if name not in known[0]]
    if "python3" not in known[0]:
        missing.append("python3")
    return missing


def fingerprint() -> str:
    """Names what `write_debian_rootfs` would write: recipe and versions of all packages."""
    dependencies, provided, versions = _installed()
    chosen = _closure(PACKAGES.split(), dependencies, provided)
    text = "\n".join([str(RECIPE), *(f"{name} {versions[name]}" for name in chosen)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_debian_rootfs(sink: IO[bytes], names: Sequence[str] = tuple(PACKAGES.split())) -> None:
    """Write the tar (about 180 MB) of these packages. Raises OSError and subprocess errors."""
    dependencies, provided, _ = _installed()
    packages = _closure(names, dependencies, provided)
    listing = subprocess.run(
        ["dpkg-query", "-L", *packages], capture_output=True, text=True, check=False
    ).stdout
    paths = {line for line in listing.splitlines() if line.startswith("/") and line != "/."}
    paths.update(EXTRA_FILES)
    for top in EXTRA_TREES:
        for folder, subfolders, files in os.walk(top):
            links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
            paths.update(os.path.join(folder, name) for name in files + links)
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _write_skeleton(archive)
        written = {"/" + name for name in (*ETC, *LINKS)}
        for path in sorted(_wanted(paths) - written):
            _add_file(archive, path)
        if "python3" in packages and "/usr/bin/python" not in paths:
            _add_link(archive, "usr/bin/python", "python3")


def write_empty_rootfs(sink: IO[bytes]) -> None:
    """Write the tar of the tree whose /usr comes from the host."""
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _write_skeleton(archive)
        for name in ("etc/alternatives", "etc/ssl", "etc/ssl/certs"):
            _add_folder(archive, name, 0o755)
        _add_text(archive, "etc/ld.so.cache", "")
        # The host's /usr may lack the name `python`; /opt is ours.
        _add_folder(archive, "opt/bin", 0o755)
        for name in ("python", "python3"):
            _add_link(archive, f"opt/bin/{name}", usr_python() or "/usr/bin/python3")


@functools.cache
def _installed() -> tuple[dict[str, list[list[str]]], dict[str, str], dict[str, str]]:
    """Per installed package its alternatives of dependencies; who provides a name; versions."""
    layout = (
        "${Package}\t${Version}\t${Pre-Depends}, ${Depends}\t${Provides}\t${db:Status-Abbrev}\n"
    )
    text = subprocess.run(
        ["dpkg-query", "-W", "-f", layout], capture_output=True, text=True, check=True
    ).stdout
    dependencies: dict[str, list[list[str]]] = {}
    provided: dict[str, str] = {}
    versions: dict[str, str] = {}
    for line in text.splitlines():
        name, version, needs, provides, status = line.split("\t")
        if not status.startswith("ii"):
            continue
        versions[name] = version
        dependencies[name] = [
            [option.split("(")[0].split(":")[0].strip() for option in group.split("|")]
            for group in needs.split(",")
            if group.strip()
        ]
        for item in provides.split(","):
            if item.strip():
                provided.setdefault(item.split("(")[0].strip(), name)
    return dependencies, provided, versions


def _closure(
    names: Sequence[str], dependencies: dict[str, list[list[str]]], provided: dict[str, str]
) -> list[str]:
    seen: set[str] = set()
    todo = [name for name in names if name in dependencies]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for options in dependencies[name]:
            found = (o if o in dependencies else provided.get(o) for o in options)
            chosen = next((name for name in found if name), None)
            if chosen:
                todo.append(chosen)
    return sorted(seen)


def _wanted(names: Iterable[str]) -> set[str]:
    """Files and links under their true folder (merged /usr): an image may hold a path only once."""
    chosen = set()
    for name in names:
        folder, base = os.path.split(name)
        path = os.path.join(os.path.realpath(folder), base)
        if path.startswith(SKIPPED) or "/__pycache__/" in path:
            continue
        if os.path.islink(path) or os.path.isfile(path):
            chosen.add(path)
    return chosen


def _write_skeleton(archive: tarfile.TarFile) -> None:
    for name, mode in FOLDERS.items():
        _add_folder(archive, name, mode)
    for name, target in LINKS.items():
        _add_link(archive, name, target)
    for name, text in ETC.items():
        _add_text(archive, name, text)


def _add_folder(archive: tarfile.TarFile, name: str, mode: int) -> None:
    item = tarfile.TarInfo(name)
    item.type, item.mode = tarfile.DIRTYPE, mode
    archive.addfile(item)


def _add_link(archive: tarfile.TarFile, name: str, target: str) -> None:
    item = tarfile.TarInfo(name)
    item.type, item.linkname = tarfile.SYMTYPE, target
    archive.addfile(item)


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    item, data = tarfile.TarInfo(name), text.encode()
    item.size = len(data)
    archive.addfile(item, io.BytesIO(data))


def _add_file(archive: tarfile.TarFile, path: str) -> None:
    try:
        item = archive.gettarinfo(path, arcname=path.lstrip("/"))
        if item.islnk():  # the other name may not be in the image
            item.type, item.size = tarfile.REGTYPE, Path(path).stat().st_size
        item.uid = item.gid = 0
        item.uname = item.gname = ""
        item.mode &= ~0o6000  # set-uid programs have no use here
        if item.isreg():
            with Path(path).open("rb") as handle:
                archive.addfile(item, handle)
        else:
            archive.addfile(item)
    except PermissionError:
        return
