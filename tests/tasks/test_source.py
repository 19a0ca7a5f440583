"""Sources: files, folders and the hub; which kind a row is; which entries are chosen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from environments.base import Sandbox, SandboxSpec
from tasks import release_pair, rows
from tasks.instance import TaskError
from tasks.made import MadeTask
from tasks.r2e_gym import R2eTask
from tasks.release_pair import ReleasePairTask
from tasks.rows import choose
from tasks.source import Entry, canonical, open_source, select
from tasks.swe_bench_rows import SweRow
from tests.tasks.hub_fake import FakeHub
from tests.tasks.row_fixtures import PATCH, classic, fifth, made, r2e, write_lines


def no_sandbox(spec: SandboxSpec) -> Sandbox:
    raise AssertionError("no sandbox is needed here")


def ids(src: str | Path, **options: Any) -> list[str]:
    return [entry.instance_id for entry in open_source(str(src), **options).entries]


def test_the_pairs_of_the_package() -> None:
    source = open_source()
    assert [entry.instance_id for entry in source.entries] == release_pair.list_ids()
    entry = source.find("tinydb-4.8.2")
    assert (entry.kind, entry.repo) == ("release_pair", "tinydb")
    assert entry.title == "LRUCache keeps the old value when a key is set again"
    task = entry.task(no_sandbox)
    assert isinstance(task, ReleasePairTask)
    assert task.instance == release_pair.load("tinydb-4.8.2").instance
    assert task.instance.problem == entry.problem


def test_a_pair_has_the_environment_of_all_pairs_also_if_it_is_the_only_one_asked_for() -> None:
    (one,) = open_source(only=["tinydb-4.8.2"]).entries
    whole = open_source().find("tinydb-4.8.2")
    needs: list[tuple[str, ...]] = []
    for entry in (one, whole):
        task = entry.task(no_sandbox)
        assert isinstance(task, ReleasePairTask)
        needs.append(task._requirements)
    assert needs[0] == needs[1]
    assert "freezegun" in needs[0]  # another pair's
    assert one == whole


def test_the_reference_of_a_pair() -> None:
    entry = open_source().find("jsonpointer-3.1.1")
    assert entry.reference_patch() == release_pair.reference_patch("jsonpointer-3.1.1")


def test_what_an_entry_shows_of_itself_has_no_answer_in_it(tmp_path: Path) -> None:
    for row in (classic(), fifth(), r2e()):
        (entry,) = open_source(str(write_lines(tmp_path / "a.jsonl", [row]))).entries
        assert "return x + x\n" not in repr(entry)
        assert "test_double" not in repr(entry)
        assert "test_kept" not in repr(entry)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
@pytest.mark.parametrize("row", [classic, fifth, r2e])
def test_all_forms_of_files_give_the_same_entries(tmp_path: Path, name: str, row: Any) -> None:
    data = [row(1), row(2), row(3)]
    plain = write_lines(tmp_path / "plain.jsonl", data)
    path = tmp_path / name
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(data), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(data))
    else:
        path.write_text("\n\n".join(json.dumps(item) for item in data))
    assert open_source(str(path)).entries == open_source(str(plain)).entries
    assert len(ids(path)) == 3


def test_kinds_are_known_by_their_fields(tmp_path: Path) -> None:
    pair = release_pair.read()[0].model_dump(mode="json")
    for row, kind, repo in (
        (classic(), "swe_bench", "owner/calc"),
        (fifth(), "swe_bench", "owner/calc"),
        (r2e(), "r2e_gym", "calc"),
        (pair, "release_pair", "jsonpointer"),
    ):
        (entry,) = open_source(str(write_lines(tmp_path / "a.jsonl", [row]))).entries
        assert (entry.kind, entry.repo) == (kind, repo)


def test_rows_of_r2e(tmp_path: Path) -> None:
    source = open_source(str(write_lines(tmp_path / "a.jsonl", [r2e(1), r2e(2)])))
    first, second = source.entries
    assert first.instance_id == "calc__" + "0" * 39 + "1"
    assert first.digest != second.digest
    assert first.title == "double is wrong"
    assert first.problem == "**Title:** double is wrong\n\n**Description:**\nby one"
    assert first.reference_patch().decode() == PATCH
    task = first.task(no_sandbox)
    assert isinstance(task, R2eTask)
    assert task.spec().image == "owner/calc_final:" + "0" * 39 + "1"


def test_rows_that_were_made_find_their_files_where_they_lie(tmp_path: Path) -> None:
    for place in ("here", "moved"):
        (tmp_path / place).mkdir()
        data = [made(tmp_path / place)]
        source = open_source(str(write_lines(tmp_path / place / "instances.jsonl", data)))
        (entry,) = source.entries
        assert (entry.kind, entry.repo, entry.title) == ("made", "my-calc", "double is wrong")
        assert entry.reference_patch().decode() == PATCH
        assert isinstance(entry.task(no_sandbox), MadeTask)
        if place == "here":
            digest = entry.digest
    assert entry.digest == digest
    (tmp_path / "moved" / "calc-1" / "reference.diff").write_text("other")
    with pytest.raises(TaskError, match="was changed"):
        entry.reference_patch()


def test_what_decides_is_in_the_digest_and_nothing_else(tmp_path: Path) -> None:
    def digest(row: dict[str, Any]) -> str:
        return open_source(str(write_lines(tmp_path / "a.jsonl", [row]))).entries[0].digest

    same = digest(classic())
    assert digest(dict(reversed(classic().items()))) == same
    assert digest(classic(unknown_field=1)) == same
    assert digest(classic(image=None, eval_script="")) == same
    for field in ("base_commit", "patch", "test_patch", "version", "problem_statement"):
        assert digest(classic(**{field: "x"})) != same
    assert digest(classic(PASS_TO_PASS=["a"])) != same
    assert digest(classic(eval_script="x")) != same


def test_a_digest_does_not_depend_on_how_a_row_is_written(tmp_path: Path) -> None:
    def mixed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: mixed(inner) for key, inner in reversed(value.items())}
        return value

    for row in (release_pair.read()[4].model_dump(mode="json"), fifth(), r2e()):
        path = write_lines(tmp_path / "a.jsonl", [row])
        digest = open_source(str(path)).entries[0].digest
        assert open_source(str(write_lines(path, [mixed(row)]))).entries[0].digest == digest


def test_a_field_that_a_row_does_not_use_is_not_in_its_digest() -> None:
    """Else a field that a later version adds would make all results of before worthless."""
    text = canonical(SweRow.model_validate(classic()))
    assert "image" not in text
    assert "eval_type" not in text
    assert "base_commit" in text


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([classic(1), r2e(2)], "line 2 is a row of kind r2e_gym, but .*line 1 is .*swe_bench"),
        ([classic(1), {"a": 1}], "line 2 is no instance of a known kind .*it has a"),
        ([classic(1), classic(2), classic(1)], "line 3 has the same id as .*line 1: owner__calc-1"),
        ([classic(1, instance_id="../up")], "line 1: '../up' is no instance id"),
        ([classic(1, FAIL_TO_PASS="x")], "line 1 is no row of kind swe_bench: FAIL_TO_PASS"),
        ([r2e(1, expected_output_json="x")], "line 1 .*expected_output_json: .*no JSON text"),
        ([r2e(1, parsed_commit_content="{}")], "line 1 .*parsed_commit_content: .*Field required"),
        ([[1]], "line 1 is no object"),
        ([], "holds no instances"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_with_the_row(tmp_path: Path, data: Any, told: str) -> None:
    with pytest.raises(TaskError, match=rf"bad\.jsonl.*{told}"):
        open_source(str(write_lines(tmp_path / "bad.jsonl", data)))


def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(classic()) + '\n{"instance')
    with pytest.raises(TaskError, match=r"a\.jsonl, line 2 is no JSON"):
        open_source(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(TaskError, match="is one list"):
        open_source(str(tmp_path / "a.json"))
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="cannot read"):
        open_source(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(TaskError, match=r"end in \.jsonl, \.json, \.parquet"):
        open_source(str(tmp_path / "a.csv"))
    with pytest.raises(TaskError, match="no such file"):
        open_source(str(tmp_path / "absent.jsonl"))
    with pytest.raises(TaskError, match="is no source of tasks"):
        open_source("one-word")


def test_a_broken_parquet_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(TaskError, match=r"cannot read .*a\.parquet"):
        open_source(str(tmp_path / "a.parquet"))


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(
        TaskError, match=r"the extra `data` brings: pip install 'nexus-agent\[data\]"
    ):
        open_source(str(tmp_path / "a.parquet"))


def test_rows_that_can_say_nothing_are_left_out_by_name(tmp_path: Path) -> None:
    data = [classic(1), classic(2, FAIL_TO_PASS="[]"), classic(3)]
    source = open_source(str(write_lines(tmp_path / "a.jsonl", data)))
    assert [entry.instance_id for entry in source.entries] == ["owner__calc-1", "owner__calc-3"]
    (note,) = source.notes
    assert "owner__calc-2 is left out: no test has to be fixed" in note
    source = open_source(
        str(write_lines(tmp_path / "a.jsonl", [r2e(1, expected_output_json="{}")]))
    )
    assert source.entries == ()
    assert "it expects no test result" in source.notes[0]


def test_only_some_rows_of_a_large_source(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [classic(1), classic(2, patch=[]), classic(3)])
    assert ids(path, only=["owner__calc-3"]) == ["owner__calc-3"]  # a bad row is not looked at
    with pytest.raises(TaskError, match="patch"):
        open_source(str(path))


def test_an_entry_without_a_reference(tmp_path: Path) -> None:
    (entry,) = open_source(str(write_lines(tmp_path / "a.jsonl", [classic(patch="")]))).entries
    with pytest.raises(TaskError, match="owner__calc-1: its row holds no reference patch"):
        entry.reference_patch()


def test_unknown_ids_are_named_with_those_that_are_like_them() -> None:
    source = open_source()
    with pytest.raises(
        TaskError, match=r"no such instance: tinydb-4\.8\.3; of 13 .*tinydb-4\.8\.2"
    ):
        source.find("tinydb-4.8.3")


# files of a folder or data set


def test_the_split_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "test-00000-of-00002.jsonl", [classic(1)])
    write_lines(tmp_path / "data" / "test-00001-of-00002.jsonl", [classic(2)])
    write_lines(tmp_path / "data" / "dev-00000-of-00001.jsonl", [classic(3)])
    (tmp_path / "README.md").write_text("about")
    assert ids(tmp_path) == ["owner__calc-1", "owner__calc-2"]
    assert ids(tmp_path, split="dev") == ["owner__calc-3"]
    with pytest.raises(TaskError, match="no split 'train'; there are dev, test"):
        open_source(str(tmp_path), split="train")


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (["data/train-0-of-1.parquet", "README.md"], "test", ["data/train-0-of-1.parquet"]),
        (["train/0.jsonl", "test/0.jsonl"], "test", ["test/0.jsonl"]),
        (["test.jsonl", "test.json", "test.parquet"], "test", ["test.parquet"]),
        (["latest.jsonl", "test.jsonl"], "test", ["test.jsonl"]),
        (["dataset_infos.json", "test.jsonl"], "dev", ["test.jsonl"]),
    ],
)
def test_which_files_are_a_split(names: list[str], split: str, chosen: list[str]) -> None:
    assert choose(names, split, "x/y") == chosen


def test_a_split_that_was_named_is_never_another() -> None:
    with pytest.raises(TaskError, match="no split 'test'; there are train"):
        choose(["train.jsonl"], "test", "x/y", strict=True)
    with pytest.raises(TaskError, match="holds no"):
        choose(["README.md", ".gitattributes"], "test", "x/y")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    lines = {
        name: (json.dumps(classic(number)) + "\n").encode()
        for number, name in enumerate(["data/test-0-of-1.jsonl", "data/dev-0-of-1.jsonl"], 1)
    }
    hub = FakeHub({"owner/lite": {"README.md": b"about", **lines}})
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub.serve() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def test_a_data_set_of_the_hub(hub: FakeHub) -> None:
    assert ids("owner/lite") == ["owner__calc-1"]
    assert not any("dev-0" in asked for asked in hub.asked)  # only what was asked for is fetched
    assert ids("owner/lite:dev") == ["owner__calc-2"]
    assert ids("owner/lite@v1:dev") == ["owner__calc-2"]
    assert any("/resolve/v1/" in asked for asked in hub.asked)
    with pytest.raises(TaskError, match="no split 'train'; there are dev, test"):
        open_source("owner/lite:train")
    with pytest.raises(TaskError, match=r"gives no data set owner/heavy \(404\); check its name"):
        open_source("owner/heavy")


def test_the_hub_is_not_needed_for_what_was_fetched(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ids("owner/lite") == ["owner__calc-1"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert ids("owner/lite") == ["owner__calc-1"]
    with pytest.raises(TaskError, match="cannot be reached for the data set owner/lite"):
        open_source("owner/lite:dev")  # of the same data set, but not fetched
    with pytest.raises(TaskError, match="was not fetched before"):
        open_source("owner/other")
    assert len(hub.asked) == asked


def test_without_a_hub_the_error_comes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")

    def never(*_: object, **__: object) -> None:
        pytest.fail("the client would try for half a minute")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", never)
    with pytest.raises(
        TaskError, match=r"hub cannot be reached for the data set owner/lite .*file"
    ):
        open_source("owner/lite")


# choosing


def entries(names: list[str]) -> list[Entry]:
    def refuse(*_: object) -> Any:
        raise AssertionError

    return [
        Entry(name, "swe_bench", "", "", "", "", SweRow.model_construct(), refuse, refuse)
        for name in names
    ]


def chosen(names: list[str], **options: Any) -> list[str]:
    return [entry.instance_id for entry in select(entries(names), **options)]


NAMES = [f"a-{n}" for n in range(6)] + [f"b-{n}" for n in range(4)]


def test_everything_is_chosen_by_default() -> None:
    assert chosen(NAMES) == NAMES


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"slice": "0:2"}, ["a-0", "a-1"]),
        ({"slice": "8:"}, ["b-2", "b-3"]),
        ({"slice": "-1:"}, ["b-3"]),
        ({"slice": ":4:2"}, ["a-0", "a-2"]),
        ({"filter": "^b-[01]"}, ["b-0", "b-1"]),
        ({"filter": "-3$"}, ["a-3", "b-3"]),
        ({"ids": ["b-1", "a-2", "b-1"]}, ["a-2", "b-1"]),
        ({"ids": ["a-1", "a-2", "b-1"], "filter": "a", "slice": "1:"}, ["a-2"]),
    ],
)
def test_what_is_chosen(options: dict[str, Any], wanted: list[str]) -> None:
    assert chosen(NAMES, **options) == wanted


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"slice": "3"}, "'3' is no slice; write START:STOP"),
        ({"slice": "a:b"}, "no slice"),
        ({"slice": "::0"}, "no slice"),
        ({"slice": "::-1"}, "no slice"),
        ({"slice": "20:30"}, "leaves none of 10 instances"),
        ({"filter": "("}, "no regular expression"),
        ({"filter": "zzz"}, "no instance id matches 'zzz'"),
        ({"ids": ["a-1", "a-99"]}, "no such instance: a-99; of 10"),
    ],
)
def test_what_cannot_be_chosen(options: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError, match=told):
        chosen(NAMES, **options)


@given(st.integers(), st.lists(st.sampled_from(NAMES), unique=True), st.randoms())
def test_a_seeds_order_depends_on_the_ids_alone(seed: int, some: list[str], random: Any) -> None:
    shuffled = chosen(NAMES, shuffle=True, seed=seed)
    assert sorted(shuffled) == sorted(NAMES)
    mixed = list(NAMES)
    random.shuffle(mixed)
    assert chosen(mixed, shuffle=True, seed=seed) == shuffled
    fewer = [name for name in shuffled if name in some]
    assert chosen(some, shuffle=True, seed=seed) == fewer


def test_seeds_give_different_orders_and_come_before_the_slice() -> None:
    orders = {tuple(chosen(NAMES, shuffle=True, seed=seed)) for seed in range(20)}
    assert len(orders) == 20
    first = {chosen(NAMES, shuffle=True, seed=seed, slice=":1")[0] for seed in range(40)}
    assert len(first) > 5
    assert chosen(NAMES, seed=7) == NAMES  # without shuffle a seed does nothing


def test_rows_know_the_folder_of_their_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [classic()])
    assert next(rows.read_file(path)).folder == tmp_path
