"""Images for SWE-bench instances, made on this machine from a project's source distribution.

The official images come from a registry. Where none can be reached, a few instances can be had
otherwise: a release of the project is close enough to the instance's base commit that reference
patch and test patch apply to it. The image is laid out as the official ones are (/testbed is a
repository, its environment lies at /opt/miniconda3/envs/testbed), on this project's own base, and
serves the official harness as well: rows are written in the form of its version 5.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.base import ImageMissing, SandboxError
from tasks import sources
from tasks.instance import TaskError
from tasks.log_parsers import REPOSITORIES
from tasks.patches import PatchRefused, apply_to_folder
from tasks.sources import Sdist
from tasks.swe_bench_rows import SweRow
from tasks.swe_bench_script import eval_script

if TYPE_CHECKING:
    import docker

Progress = Callable[[str], None]
REPOSITORY = "nexus-agent/local"
FORMAT = 1  # raise when the same recipe makes another image
INSTALL = "python -m pip install --no-build-isolation --no-deps -e ."
OLDEST = (3, 11)  # Python; one of the tests needs tomllib
_ENV = "/opt/miniconda3/envs/testbed"
_TOOLS = ("pip==24.0", "setuptools==68.2.2", "wheel==0.43.0", "pytest==7.2.2")
_PALLETS = ("itsdangerous==2.1.2", "markupsafe==2.1.5", "python-dotenv==1.0.1", "asgiref==3.7.2")
_FLASK_22 = (*_TOOLS, *_PALLETS, "werkzeug==2.2.3", "jinja2==3.1.4", "click==8.1.7")


@dataclass(frozen=True, slots=True)
class LocalRecipe:
    """What stands for an instance's base commit, and what its tests need."""

    sdist: Sdist
    requirements: tuple[str, ...]


def _flask(version: str, sha256: str, requirements: tuple[str, ...]) -> LocalRecipe:
    sdist = Sdist(project="flask", file=f"Flask-{version}.tar.gz", sha256=sha256)
    return LocalRecipe(sdist, requirements)


RECIPES: dict[str, LocalRecipe] = {
    "pallets__flask-4045": _flask(
        "2.0.0",
        "168e8507792cb8a3aa06afbe5d4d431d3e07c6318bc3893ceecb81aff09f848d",
        (*_TOOLS, *_PALLETS, "werkzeug==2.0.3", "jinja2==3.0.3", "click==8.0.4"),
    ),
    "pallets__flask-4992": _flask(
        "2.2.5", "edee9b0a7ff26621bd5a8c10ff484ae28737a2410d99b0bb9a6850c7fb977aa0", _FLASK_22
    ),
    "pallets__flask-5063": _flask(
        "2.2.3", "7eb373984bf1c770023fce9db164ed0c3353cd0b53f130f4693da0ca756a2e6d", _FLASK_22
    ),
}

_DOCKERFILE = f"""FROM {{base}}
ADD packages.tar.gz {_ENV}/lib/python{{python}}/site-packages/
ADD tree.tar.gz /testbed/
COPY setup /setup
RUN bash /setup {{python}} && rm /setup
WORKDIR /testbed
"""

# An environment as `venv` makes one, a stand-in for conda's `activate`, and one commit.
_SETUP = rf"""
set -euo pipefail
env={_ENV} packages={_ENV}/lib/python$1/site-packages
python=$(python3 -c 'import os, sys; print(os.path.realpath(sys.executable))')
mkdir -p "$env/bin" /opt/miniconda3/bin
ln -s "$python" "$env/bin/python"
ln -s python "$env/bin/python3"
home=$(dirname "$python")
printf 'home = %s\ninclude-system-site-packages = false\n' "$home" > "$env/pyvenv.cfg"
[ ! -d "$packages/bin" ] || mv "$packages"/bin/* "$env/bin/"
cat > /opt/miniconda3/bin/activate <<'EOF'
conda() {{ export CONDA_PREFIX=/opt/miniconda3/envs/$2 PATH=/opt/miniconda3/envs/$2/bin:$PATH; }}
EOF
cd /testbed
git init -q -b main .
printf '*.egg-info/\n__pycache__/\n*.pyc\n.pytest_cache/\n' >> .git/info/exclude
PATH="$env/bin:$PATH" {INSTALL} --quiet --root-user-action ignore
export GIT_AUTHOR_NAME=SWE-bench GIT_AUTHOR_EMAIL=none GIT_AUTHOR_DATE='2020-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=SWE-bench GIT_COMMITTER_EMAIL=none GIT_COMMITTER_DATE=$GIT_AUTHOR_DATE
git add --all
git commit -q -m 'SWE-bench'
"""


def build(
    rows: Iterable[SweRow], out: Path, progress: Progress = lambda _: None
) -> list[dict[str, Any]]:
    """Build an image for each row and write the rows, with image and script, to `out`.

    A list as JSON, or a line each where the name ends in .jsonl. Raises TaskError (a row for which
    no release is known, or whose patches do not apply to it), FetchError, SandboxError.
    """
    from environments.engine import connect
    from environments.image_facts import image_facts
    from environments.images import base_image

    chosen = list(rows)
    for row in chosen:
        _recipe(row)
    with contextlib.closing(connect(timeout=600.0)) as client:
        base = base_image(client, progress)
        if base.mounts:
            raise ImageMissing(
                f"image {base.name} borrows files of this machine, so that no other can be built "
                "on it; an engine that reaches a registry, or a Debian host, has another base"
            )
        python = image_facts(client, base.name, 60.0).python_version or ""
        if not python or tuple(map(int, python.split("."))) < OLDEST:
            raise ImageMissing(f"image {base.name} has Python {python or '(none)'}, not 3.11")
        made = [_made(client, row, base.name, python, progress) for row in chosen]
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in made)
    out.write_text(lines if out.suffix == ".jsonl" else json.dumps(made, indent=1) + "\n")
    return made


def _recipe(row: SweRow) -> LocalRecipe:
    if row.instance_id not in RECIPES:
        raise TaskError(
            f"no release is known that stands for {row.instance_id}; images can be built for: "
            f"{', '.join(RECIPES)}"
        )
    return RECIPES[row.instance_id]


def _made(
    client: docker.DockerClient, row: SweRow, base: str, python: str, progress: Progress
) -> dict[str, Any]:
    """The row of an instance, whose image is there now."""
    from environments.images import is_present

    recipe = _recipe(row)
    image = _image_name(row, recipe, base)
    if not is_present(client, image):
        tree = sources.tree(recipe.sdist)
        check_patches(row, tree)
        progress(f"building {image} from {recipe.sdist.file}")
        _build(client, image, _context(recipe, tree, base, python, progress))
    head = client.containers.run(
        image, ["git", "rev-parse", "HEAD"], remove=True, network_mode="none", entrypoint=[]
    )
    commit = head.decode().strip()
    script = eval_script(row.repo, row.version, commit, row.test_patch, install=INSTALL)
    added = {
        "base_commit": commit,
        "image": image,
        "eval_script": script,
        "log_parser": REPOSITORIES[row.repo],
        "eval_type": "pass_and_fail",
        "made_of": recipe.sdist.file,  # instead of the commit of the original row
    }
    return {**row.record(), **added}


def check_patches(row: SweRow, tree: Path) -> None:
    """TaskError unless test patch and reference patch apply to a release."""
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(tree, copy, symlinks=True)
        for name, patch in (("test_patch", row.test_patch), ("patch", row.patch)):
            try:
                apply_to_folder(patch.encode(), copy)
            except PatchRefused as error:
                raise TaskError(
                    f"{row.instance_id}: its {name} does not apply to the release: {error}"
                ) from error


def _image_name(row: SweRow, recipe: LocalRecipe, base: str) -> str:
    facts = [FORMAT, recipe.sdist.sha256, recipe.requirements, base, _DOCKERFILE, _SETUP]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    return f"{REPOSITORY}.{row.instance_id.replace('__', '_1776_').lower()}:{digest}"


def _context(
    recipe: LocalRecipe, tree: Path, base: str, python: str, progress: Progress
) -> io.BytesIO:
    """What the image is built from, as a tar."""
    from environments.python_env import python_env

    packages = python_env(recipe.requirements, python, progress=progress)
    parts = {
        "Dockerfile": _DOCKERFILE.format(base=base, python=python).encode(),
        "setup": _SETUP.encode(),
        "packages.tar.gz": _packed(packages, ()),
        "tree.tar.gz": _packed(tree, ("*.egg-info", "PKG-INFO")),
    }
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in parts.items():
            item = tarfile.TarInfo(name)
            item.size, item.mode = len(data), 0o644
            archive.addfile(item, io.BytesIO(data))
    sink.seek(0)
    return sink


def _packed(folder: Path, left_out: Sequence[str]) -> bytes:
    """A folder's content as a tar, root's, always with the same bytes."""

    def cleaned(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if any(Path(item.name).match(pattern) for pattern in left_out):
            return None
        item.uid = item.gid = 0
        item.uname = item.gname = "root"
        item.mtime = 1577836800
        item.mode |= 0o644 | (0o111 if item.isdir() else 0)
        return item

    sink = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=sink, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for child in sorted(folder.iterdir()):
            archive.add(child, arcname=child.name, filter=cleaned)
    return sink.getvalue()


def _build(client: docker.DockerClient, image: str, context: io.BytesIO) -> None:
    from docker.errors import BuildError

    from environments.engine import translated
    from environments.images import LABEL

    with translated(f"image {image} cannot be built"):
        try:
            client.images.build(
                fileobj=context,
                custom_context=True,
                tag=image,
                labels={LABEL: "local"},
                network_mode="none",
                rm=True,
                forcerm=True,
            )
        except BuildError as error:
            log = "".join(str(item.get("stream", "")) for item in error.build_log)
            raise SandboxError(f"image {image} cannot be built: {log.strip()[-1500:]}") from error
