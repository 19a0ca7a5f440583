"""`agent tasks`: what is shown, what is validated, and how the commands end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agent.cli import app
from tasks import validate
from tasks.source import Entry
from tasks.swe_bench_rows import SweRow
from tasks.validate import Validation, read_results
from tests.tasks.row_fixtures import classic, fifth, write_lines


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, ["tasks", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    long = classic(2, problem_statement=f"{'A very long title ' * 20}\nand a text")
    return write_lines(tmp_path / "rows.jsonl", [classic(1), long, classic(3, FAIL_TO_PASS=[])])


def test_one_line_each_and_whole_for_programs(rows: Path) -> None:
    result = run("list", "--tasks", rows)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "owner__calc-1\tswe_bench\towner/calc\tdouble(1) is wrong",
        f"owner__calc-2\tswe_bench\towner/calc\t{('A very long title ' * 20).strip()}",
    ]
    assert "owner__calc-3 is left out: no test has to be fixed" in result.stderr


def test_the_pairs_are_the_default() -> None:
    lines = run("list").stdout.splitlines()
    assert len(lines) == 13
    assert (
        "tinydb-4.8.2\trelease_pair\ttinydb\tLRUCache keeps the old value when a key" in lines[11]
    )


def test_json_and_ids_only(rows: Path) -> None:
    (row,) = json.loads(run("list", "--tasks", rows, "--ids", "owner__calc-1", "--json").stdout)
    assert set(row) == {"id", "kind", "repo", "title", "digest"}
    assert (row["id"], row["kind"], len(row["digest"])) == ("owner__calc-1", "swe_bench", 64)
    assert run("list", "--tasks", rows, "-q").stdout == "owner__calc-1\nowner__calc-2\n"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--ids", "tinydb-4.8.2,parse-1.22.3"], ["parse-1.22.3", "tinydb-4.8.2"]),
        (["--ids", "tinydb-4.8.2", "--ids", "parse-1.22.3"], ["parse-1.22.3", "tinydb-4.8.2"]),
        (["--filter", "^xml", "--slice", "1:"], ["xmltodict-0.14.2"]),
        (["--slice", "-1:"], ["itsdangerous-2.1.1"]),
    ],
)
def test_some_of_them(options: list[str], wanted: list[str]) -> None:
    assert run("list", "-q", *options).stdout.splitlines() == wanted


def test_a_drawn_order() -> None:
    orders = {run("list", "-q", "--shuffle", "--seed", str(seed)).stdout for seed in (1, 2, 3)}
    assert len(orders) == 3
    assert run("list", "-q", "--shuffle", "--seed", "1").stdout in orders
    (order, *_) = orders
    assert sorted(order.split()) == sorted(run("list", "-q").stdout.split())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--ids", "tinydb"], "no such instance: tinydb; of 13 there are for example"),
        (["--slice", "2"], "write START:STOP"),
        (["--filter", "["], "no regular expression"),
        (["--tasks", "absent.jsonl"], "absent.jsonl: no such file"),
    ],
)
@pytest.mark.parametrize("command", ["list", "validate"])
def test_what_does_not_fit_is_told(command: str, options: list[str], told: str) -> None:
    result = run(command, *options)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert told in result.stderr.replace("\n", " ")


Outcomes = Callable[..., list[str]]


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Outcomes:
    """Says what becomes of each instance that is validated; gives the list of those that were."""

    def said(**wrong: Any) -> list[str]:
        seen: list[str] = []

        def one(entry: Entry, opened: object, *, sandbox: str) -> Validation:
            seen.append(entry.instance_id)
            why = wrong.get(entry.instance_id.replace("-", "_").replace(".", "_"), "")
            if isinstance(why, BaseException):
                raise why
            return Validation(
                entry.instance_id,
                entry.kind,
                entry.digest,
                valid=not why,
                why=why.removeprefix("error: "),
                error=why.startswith("error: "),
                notes=("of note",) if entry.instance_id == "parse-1.22.3" else (),
                sandbox=sandbox,
            )

        monkeypatch.setattr(validate, "validate_one", one)
        return seen

    return said


THREE = ["--ids", "parse-1.22.3,tinydb-4.8.2,xmltodict-1.0.3", "--sandbox", "bubblewrap"]
IDS = ["parse-1.22.3", "xmltodict-1.0.3", "tinydb-4.8.2"]


def test_all_valid(outcomes: Outcomes) -> None:
    seen = outcomes()
    result = run("validate", *THREE, "--workers", "2")
    assert result.exit_code == 0
    assert sorted(seen) == sorted(IDS)
    words = [line.split()[:2] for line in result.stdout.splitlines()]
    assert words == [
        ["valid", "parse-1.22.3"],
        ["of", "note"],
        ["valid", "xmltodict-1.0.3"],
        ["valid", "tinydb-4.8.2"],
        ["3", "of"],
    ]


def test_what_is_not_valid_is_named(outcomes: Outcomes) -> None:
    outcomes(tinydb_4_8_2="the reference patch is unresolved", xmltodict_1_0_3="error: no engine")
    result = run("validate", *THREE)
    assert result.exit_code == 1
    assert "not valid tinydb-4.8.2  the reference patch is unresolved" in result.stdout
    assert "no result xmltodict-1.0.3  no engine" in result.stdout
    assert result.stdout.splitlines()[-2:] == [
        "1 of 3 valid",
        "leave out: xmltodict-1.0.3,tinydb-4.8.2",
    ]
    result = run("validate", *THREE, "--json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)
    assert [row["instance_id"] for row in rows] == IDS
    assert [row["valid"] for row in rows] == [True, False, False]


def test_a_second_call_goes_on_where_the_first_ended(outcomes: Outcomes, tmp_path: Path) -> None:
    out = tmp_path / "new" / "valid.jsonl"
    outcomes(xmltodict_1_0_3="error: no engine", parse_1_22_3="wrong")
    assert run("validate", *THREE, "--out", out).exit_code == 1
    assert {item.instance_id: item.error for item in read_results(out)} == {
        "parse-1.22.3": False,
        "xmltodict-1.0.3": True,
        "tinydb-4.8.2": False,
    }
    seen = outcomes()
    result = run("validate", *THREE, "--out", out)
    assert seen == ["xmltodict-1.0.3"]  # what is known to be wrong is not done again
    assert f"2 of 3 are in {out} already" in result.stderr.replace("\n", "")
    assert "2 of 3 valid" in result.stdout
    assert result.exit_code == 1
    rows = json.loads(run("validate", *THREE, "--out", out, "--json").stdout)
    assert [row["instance_id"] for row in rows] == IDS  # in the order of the source
    seen = outcomes()
    assert run("validate", *THREE, "--out", out, "--sandbox", "docker").exit_code == 0
    assert len(seen) == 3  # another kind of sandbox is another question


def test_what_was_done_before_an_interruption_is_kept(outcomes: Outcomes, tmp_path: Path) -> None:
    out = tmp_path / "valid.jsonl"
    outcomes(xmltodict_1_0_3=KeyboardInterrupt())
    result = run("validate", *THREE, "--out", out)
    assert result.exit_code == 130
    assert f"interrupted; what was done is kept in {out}" in result.stderr.replace("\n", "")
    assert [item.instance_id for item in read_results(out)] == ["parse-1.22.3"]
    assert outcomes() == []
    assert run("validate", *THREE, "--out", out).exit_code == 0


def test_a_file_of_something_else_is_not_overwritten(outcomes: Outcomes, tmp_path: Path) -> None:
    outcomes()
    (tmp_path / "README.md").write_text("# About\n")
    result = run("validate", *THREE, "--out", tmp_path / "README.md")
    assert result.exit_code == 1
    assert "is no validation; name another file" in result.stderr.replace("\n", " ")
    assert (tmp_path / "README.md").read_text() == "# About\n"


def test_images_are_built_for_those_rows_that_can_be(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_images = pytest.importorskip("tasks.local_images")
    asked: list[SweRow] = []

    def build(chosen: list[SweRow], out: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
        asked.extend(chosen)
        say("building")
        return [fifth(1)]

    monkeypatch.setattr(local_images, "build", build)
    monkeypatch.setattr(local_images, "RECIPES", {"owner__calc-1": None})
    result = run("build", "--tasks", rows, "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 0
    assert "owner__calc-1  local/calc:1" in result.stdout
    assert [row.instance_id for row in asked] == ["owner__calc-1"]
    monkeypatch.setattr(local_images, "RECIPES", {"other-1": None})
    result = run("build", "--tasks", rows, "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 1
    assert "has none of other-1" in result.stderr.replace("\n", " ")
    result = run("build", "--tasks", "pairs", "--ids", IDS[0], "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 1
    assert "holds no rows of SWE-bench" in result.stderr
