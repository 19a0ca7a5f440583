"""Release pairs: the data, references, and what an agent gets to see."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pytest

from environments.base import Sandbox, SandboxSpec
from tasks import release_pair
from tasks.instance import Task, TaskError

RECORD = json.loads(
    (resources.files("tasks") / "data" / "release_pairs.jsonl").read_text("utf-8").splitlines()[0]
)


def no_sandbox(spec: SandboxSpec) -> Sandbox:
    raise AssertionError("no sandbox is needed here")


def load(instance_id: str, packages: Path | None = None, file: Path | None = None) -> Task:
    def python_env(needs: Sequence[str]) -> Path:
        assert packages is not None
        return packages

    return release_pair.load(instance_id, file, open_sandbox=no_sandbox, python_env=python_env)


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps(RECORD | changes) + "\n")
    return path


def test_thirteen_instances_with_distinct_ids() -> None:
    ids = release_pair.list_ids()
    assert len(ids) == len(set(ids)) == 13
    assert "tinydb-4.8.2" in ids


def test_unknown_id_lists_what_there_is() -> None:
    with pytest.raises(TaskError, match=r"no instance 'tinydb'; there are: .*tinydb-4\.8\.2"):
        load("tinydb")


def test_parse_ref() -> None:
    assert release_pair.parse_ref("a-1.0") == ("a-1.0", None)
    assert release_pair.parse_ref("a-1.0@/x/y@z.jsonl") == ("a-1.0", Path("/x/y@z.jsonl"))
    for bad in ("", "@file", "a@"):
        with pytest.raises(TaskError, match="ID@FILE"):
            release_pair.parse_ref(bad)


def test_own_file(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", instance_id="mine-1")
    assert release_pair.list_ids(file) == ["mine-1"]
    assert load("mine-1", file=file).instance.instance_id == "mine-1"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"test_paths": ["../outside"]}, "inside the source tree"),
        ({"test_paths": ["/etc"]}, "inside the source tree"),
        ({"test_paths": ["."]}, "inside the source tree"),
        ({"fail_to_pass": []}, "fail_to_pass"),
        ({"sdist_new": {"file": "x.tar.gz", "sha256": "abc"}}, "sha256"),
        ({"test_seconds": 0}, "test_seconds"),
    ],
)
def test_bad_records_are_refused_with_line_and_field(
    tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    file = write(tmp_path / "bad.jsonl", **changes)
    with pytest.raises(TaskError, match=rf"bad\.jsonl, line 1 .*{told}"):
        release_pair.read(file)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot read"):
        release_pair.read(tmp_path / "absent.jsonl")
    (tmp_path / "broken.jsonl").write_text("\n{\n")
    with pytest.raises(TaskError, match="line 2"):
        release_pair.read(tmp_path / "broken.jsonl")


def test_the_instance_says_nothing_of_the_solution() -> None:
    for instance_id in release_pair.list_ids():
        pair = release_pair.find(instance_id)
        shown = repr(load(instance_id).instance)
        for test in pair.fail_to_pass:
            assert test not in shown
        assert pair.sdist_new["file"] not in shown
        assert pair.new.sha256 not in shown
        assert "reference" not in shown


def test_the_task_shows_no_answers_when_printed() -> None:
    task = load("tinydb-4.8.2")
    assert isinstance(task, Task)
    assert "test_lru_cache_set_update" not in repr(task)


def test_requirements_are_one_set_for_all_without_the_packages_under_test() -> None:
    pairs = release_pair.read()
    needs = release_pair.requirements(pairs)
    assert {"pytest<9", "freezegun", "simplejson", "tzdata", "pyyaml", "wcwidth"} <= needs
    assert not needs & {pair.package for pair in pairs}


@pytest.mark.parametrize(
    "found",
    ["tinydb", "tinydb.py", "TinyDB-4.8.2.dist-info", "tinydb-4.8.1.egg-info", "tinydb.so"],
)
def test_a_copy_of_the_package_in_the_environment_is_refused(tmp_path: Path, found: str) -> None:
    (tmp_path / "pytest").mkdir()
    load("tinydb-4.8.2", tmp_path).spec()
    (tmp_path / found).mkdir()
    with pytest.raises(TaskError, match=f"hold {found}, a copy of the package under test"):
        load("tinydb-4.8.2", tmp_path).spec()


def test_packages_that_only_sound_alike_are_not_refused(tmp_path: Path) -> None:
    for name in ("parse_type", "parse_type-0.6.dist-info", "tinydb_serialization", "parser.py"):
        (tmp_path / name).mkdir()
    load("parse-1.22.3", tmp_path).spec()
    load("tinydb-4.8.2", tmp_path).spec()


def test_the_spec_mounts_the_dependencies_and_puts_the_tree_first(tmp_path: Path) -> None:
    spec = load("humanize-4.12.1", tmp_path).spec()
    assert list(spec.mounts) == [str(tmp_path)]
    assert spec.env["PYTHONPATH"].split(":") == [f"{spec.workdir}/src", *spec.mounts.values()]
    assert not spec.limits.network


def test_the_command_shown_leaves_the_module_path_alone() -> None:
    for instance_id in release_pair.list_ids():
        command = load(instance_id).instance.test_command
        assert command is not None
        assert command.startswith("python -m pytest ")
        assert "PYTHONPATH" not in command
