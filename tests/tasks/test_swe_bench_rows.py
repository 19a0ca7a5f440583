"""Rows of SWE-bench: both generations, lists in both forms, and all of Lite where it is at hand."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.source import canonical, open_source
from tasks.swe_bench_rows import SweRow
from tests.tasks.row_fixtures import SHARED, classic, fifth

LITE = SHARED / "swe_bench_lite.jsonl"
ids = st.from_regex(r"[a-z]{1,8}__[A-Za-z0-9]{1,8}-[0-9]{1,5}", fullmatch=True)
tests = st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4)


def test_a_classic_row() -> None:
    row = SweRow.model_validate(classic())
    assert row.fail_to_pass == ('tests/test_calc.py::test_double[a, "b"]',)
    assert row.pass_to_pass == ()
    assert (row.image, row.eval_script, row.log_parser) == (None, None, None)
    assert row.eval_type == "pass_and_fail"


def test_a_row_of_version_5() -> None:
    row = SweRow.model_validate(fifth())
    assert row.fail_to_pass == ("tests/test_calc.py::test_double",)
    assert (row.image, row.log_parser) == ("local/calc:1", "parse_log_pytest")
    assert row.eval_script == "#!/bin/bash\npytest -rA\n"


@given(ids)
def test_the_official_image_of_an_id(name: str) -> None:
    image = SweRow.model_validate(classic(instance_id=name)).default_image
    assert image == f"swebench/sweb.eval.x86_64.{name.lower().replace('__', '_1776_')}:latest"
    assert image == image.lower()
    assert "__" not in image


def test_the_image_of_a_known_instance() -> None:
    row = SweRow.model_validate(classic(instance_id="astropy__astropy-12907"))
    assert row.default_image == "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"


@given(tests, tests)
def test_lists_and_json_text_of_lists_are_the_same(to_pass: list[str], to_keep: list[str]) -> None:
    lists = classic(FAIL_TO_PASS=to_pass, PASS_TO_PASS=to_keep)
    texts = classic(FAIL_TO_PASS=json.dumps(to_pass), PASS_TO_PASS=json.dumps(to_keep))
    assert SweRow.model_validate(lists) == SweRow.model_validate(texts)
    assert SweRow.model_validate(lists).fail_to_pass == tuple(to_pass)
    assert canonical(SweRow.model_validate(lists)) == canonical(SweRow.model_validate(texts))


@given(tests, st.booleans())
def test_a_record_is_the_row_again(to_pass: list[str], new: bool) -> None:
    row = SweRow.model_validate((fifth if new else classic)(FAIL_TO_PASS=to_pass))
    record = row.record()
    assert SweRow.model_validate(json.loads(json.dumps(record))) == row
    assert record["FAIL_TO_PASS"] == to_pass
    assert ("image" in record) == new


def test_fields_that_are_null_or_of_parquets_types() -> None:
    moment = datetime.datetime(2022, 3, 3, 15, 14, 54)
    row = SweRow.model_validate(
        classic(hints_text=None, test_patch=None, created_at=moment, version=4.2, image="")
    )
    assert (row.hints_text, row.test_patch, row.version) == ("", "", "4.2")
    assert row.created_at == "2022-03-03T15:14:54"
    assert row.image is None
    assert SweRow.model_validate(classic(PASS_TO_PASS=None)).pass_to_pass == ()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"FAIL_TO_PASS": "tests/test_a.py"}, "neither a list nor JSON text"),
        ({"FAIL_TO_PASS": '{"a": 1}'}, "not that of a list"),
        ({"FAIL_TO_PASS": [["a"]]}, "valid string"),
        ({"instance_id": "../x"}, "instance_id"),
        ({"instance_id": "a/b"}, "instance_id"),
        ({"base_commit": "a; rm -rf /"}, "base_commit"),
        ({"problem_statement": ""}, "problem_statement"),
        ({"eval_type": "guess"}, "eval_type"),
    ],
)
def test_bad_rows_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        SweRow.model_validate(classic(**changes))


@pytest.mark.skipif(not LITE.is_file(), reason=f"there is no {LITE.name} beside the checkout")
def test_all_of_lite() -> None:
    source = open_source(str(LITE))
    rows = [json.loads(line) for line in LITE.read_text().splitlines()]
    assert len(source.entries) == len(rows) == 300
    assert source.notes == ()
    for entry, row in zip(source.entries, rows, strict=True):
        parsed = SweRow.model_validate(row)
        assert entry.instance_id == row["instance_id"]
        assert entry.problem == row["problem_statement"]
        assert entry.reference_patch() == row["patch"].encode()
        assert entry.title
        assert list(parsed.fail_to_pass) == json.loads(row["FAIL_TO_PASS"])
        assert list(parsed.pass_to_pass) == json.loads(row["PASS_TO_PASS"])
        assert SweRow.model_validate(parsed.record()) == parsed
    assert len({entry.digest for entry in source.entries}) == 300
