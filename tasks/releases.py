"""Finding the source distributions of releases on the indexes that pip is configured for."""

from __future__ import annotations

import re

from packaging.version import InvalidVersion, Version

from tasks.commits import sha256
from tasks.instance import TaskError
from tasks.package_index import fetch, listing, pip_settings
from tasks.sources import Sdist


def version(text: str) -> Version:
    """A version that a user named. TaskError if it is none."""
    try:
        return Version(text)
    except InvalidVersion as error:
        raise TaskError(f"{text!r} is no version") from error


def find_sdists(package: str, *versions: Version) -> list[Sdist]:
    """The source distributions of releases, with the sums that the index gives.

    Where it gives none (a folder of files), the sum is that of what is there. Raises FetchError,
    and TaskError with the versions that there are.
    """
    settings = pip_settings()
    there: dict[Version, tuple[str, str | None]] = {}
    others: set[Version] = set()  # have another kind of file only
    prefix = re.compile(rf"{re.sub(r'[-_.]+', '[-_.]+', re.escape(package))}-(\d.*)", re.IGNORECASE)
    for name, known in listing(package, settings).items():
        stem = prefix.fullmatch(name)
        if stem is None:
            continue
        packed = stem[1].endswith(".tar.gz")
        try:
            number = Version(stem[1].removesuffix(".tar.gz") if packed else _before_tags(stem[1]))
        except InvalidVersion:
            continue
        if packed:
            there[number] = (name, known)
        else:
            others.add(number)
    found: list[Sdist] = []
    for wanted in versions:
        if wanted not in there:
            why = ", only other files" if wanted in others else ""
            listed = ", ".join(map(str, sorted(there)[-12:])) or "none"
            raise TaskError(
                f"there is no source distribution (.tar.gz) of {package} {wanted}{why}; the "
                f"newest that there are: {listed}"
            )
        name, known = there[wanted]
        if known is None:
            known = sha256(next(iter(fetch(package, name, settings))))
        found.append(Sdist(project=package, file=name, sha256=known))
    return found


def _before_tags(stem: str) -> str:
    """The version in the rest of the name of a wheel or of another archive."""
    return re.sub(r"\.(?:zip|tar\.bz2|tgz|egg|exe|msi)$", "", stem.partition("-")[0])
