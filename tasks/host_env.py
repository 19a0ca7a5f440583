"""A Python environment of the host for a sandbox: `--env PREFIX`, mounted read-only at its place.

A virtual environment holds links and paths to itself and to the installation it was made from, so
both are mounted where they are. What lies below /usr is the sandbox's own there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from environments.base import Sandbox
from tasks.instance import TaskError

_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/sys")
_ASK = "import sys; print(sys.prefix); print('%d.%d' % sys.version_info[:2])"


@dataclass(frozen=True, slots=True)
class HostEnv:
    """An environment that was found, and what of the host it needs inside."""

    prefix: Path
    mounts: Mapping[str, str]
    base: Path | None  # the installation a virtual environment was made from

    @property
    def variables(self) -> dict[str, str]:
        """What an activation would set, but for PATH."""
        if self.base is None:
            return {"CONDA_PREFIX": str(self.prefix), "CONDA_DEFAULT_ENV": self.prefix.name}
        return {"VIRTUAL_ENV": str(self.prefix)}

    def check(self, sandbox: Sandbox) -> None:
        """Raises TaskError unless `python` inside is that of the environment, and runs."""
        own = f"{self.prefix}/bin/python"
        found = sandbox.run(["sh", "-c", "command -v python"]).text.strip()
        tried = sandbox.run([own, "-c", _ASK]) if found == own else None
        if tried is not None and tried.text.splitlines()[:1] == [str(self.prefix)]:
            return
        said = tried.text.strip()[-500:] if tried is not None else f"`python` is {found or 'gone'}"
        raise TaskError(f"--env {self.prefix}: {self._missing(sandbox)} ({said}). {_REMEDY}")

    def _missing(self, sandbox: Sandbox) -> str:
        python = self.prefix / "bin" / "python"
        target = python.resolve()
        if sandbox.run(["test", "-e", str(target)]).exit_code != 0:
            return f"its python is {target}, which is not in the {sandbox.kind} sandbox"
        if sandbox.run(["test", "-r", str(target)]).exit_code != 0:
            return f"its python is {target}, which the sandbox's user may not read"
        return f"its python ({target}) does not run in the {sandbox.kind} sandbox"


_REMEDY = (
    "Take --sandbox bubblewrap, which has this machine's /usr; or make the environment with an "
    "interpreter outside /usr (`uv venv --managed-python`, conda), which is then mounted as well; "
    "or use --image with an environment of its own"
)


def host_env(prefix: str) -> HostEnv:
    """Look at an environment on the host. Raises TaskError where it is none or cannot be mounted.

    The user's working tree may hold it: it is not copied then, but mounted.
    """
    path = Path(prefix).expanduser().absolute()
    python = path / "bin" / "python"
    if not path.is_dir():
        raise TaskError(f"--env {prefix}: not a folder")
    if path.resolve() != path:
        path = path.resolve()
        python = path / "bin" / "python"
    if _in_system(path):
        raise TaskError(
            f"--env {prefix}: {path} belongs to the system, which a sandbox has of its own; name a "
            "virtual environment"
        )
    if not python.exists():
        hint = "it is a link to nothing" if python.is_symlink() else "there is none"
        raise TaskError(
            f"--env {prefix}: no {python} ({hint}); name the folder of a virtual environment "
            "(`python -m venv`, `uv venv`) or a conda prefix"
        )
    home = _home(path)
    if home is None and not (path / "conda-meta").is_dir():
        raise TaskError(
            f"--env {prefix}: neither a virtual environment (no pyvenv.cfg) nor a conda prefix (no "
            "conda-meta)"
        )
    mounts = {str(path): str(path)}
    base = None
    if home is not None:
        # the interpreter's own folder, behind links; its home as the environment spells it
        base = home.parent
        for place in (base, *_installations(python)):
            if not _in_system(place) and place.is_dir() and not _covered(place, mounts):
                mounts[str(place)] = str(place)
    return HostEnv(path, mounts, base)


def _home(prefix: Path) -> Path | None:
    """`home` of pyvenv.cfg: the folder of the interpreter it was made with."""
    try:
        text = (prefix / "pyvenv.cfg").read_text("utf-8")
    except (OSError, ValueError):
        return None
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip().lower() == "home":
            return Path(value.strip())
    return None


def _installations(python: Path) -> list[Path]:
    """Prefixes on the way from the link to the interpreter: each has a bin folder in it."""
    found = []
    at = python
    for _ in range(20):
        if not at.is_symlink():
            break
        at = at.parent / at.readlink()
        at = at.parent.resolve() / at.name
        found.append(at.parent.parent)
    return found


def _in_system(path: Path) -> bool:
    return str(path) == "/" or any(path.is_relative_to(top) for top in _SYSTEM)


def _covered(place: Path, mounts: Mapping[str, str]) -> bool:
    return any(place.is_relative_to(Path(mounted)) for mounted in mounts)
