"""Predictions: the official format, there and back, and whole files only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import predictions
from tasks.instance import TaskError
from tasks.predictions import Prediction, read_predictions, write_predictions
from tests.tasks.row_fixtures import PATCH

names = st.text(alphabet="abc_-.1", min_size=1)
made = st.lists(
    st.builds(Prediction, names, st.text(min_size=1).filter(str.isprintable), st.binary()),
    unique_by=lambda prediction: prediction.instance_id,
    max_size=4,
)


@given(made, st.sampled_from([".jsonl", ".json"]))
def test_there_and_back_byte_by_byte(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[Prediction], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"predictions{suffix}"
    write_predictions(path, wanted)
    assert list(read_predictions(path).values()) == wanted


def test_the_official_form(tmp_path: Path) -> None:
    path = tmp_path / "new" / "preds.jsonl"
    write_predictions(path, [Prediction("a-1", "me", PATCH.encode()), Prediction("a-2", "me", b"")])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"instance_id": "a-1", "model_name_or_path": "me", "model_patch": PATCH},
        {"instance_id": "a-2", "model_name_or_path": "me", "model_patch": ""},
    ]
    assert path.stat().st_mode & 0o777 == 0o644


def test_what_other_tools_write(tmp_path: Path) -> None:
    path = tmp_path / "preds.json"
    row = {"model_name_or_path": "me", "model_patch": None, "cost": 1}
    path.write_text(json.dumps({"a-1": row, "a-2": {**row, "model_patch": "x"}}))
    assert read_predictions(path) == {
        "a-1": Prediction("a-1", "me", b""),
        "a-2": Prediction("a-2", "me", b"x"),
    }
    path.write_text(json.dumps([{"instance_id": "a-1", **row}]))
    assert read_predictions(path, known=["a-1", "a-2"]) == {"a-1": Prediction("a-1", "me", b"")}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"instance_id": "a-1", "model_patch": "x"}], "line 1 .*no model_name_or_path"),
        ([{"model_name_or_path": "me"}], "line 1 .*no instance_id"),
        ([{"instance_id": "a-1", "model_name_or_path": "me", "model_patch": 3}], "is no text"),
        ([{"instance_id": "a-1", "model_name_or_path": "me"}] * 2, "line 2 is a second .* a-1"),
        ([{"instance_id": "b-1", "model_name_or_path": "me"}], "b-1 is not among the 2 instances"),
    ],
)
def test_what_is_no_prediction(tmp_path: Path, rows: list[object], told: str) -> None:
    path = tmp_path / "preds.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TaskError, match=told):
        read_predictions(path, known=["a-1", "a-2"])


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot read"):
        read_predictions(tmp_path / "absent.json")
    with pytest.raises(TaskError, match="cannot read"):
        read_predictions(tmp_path / "absent.jsonl")
    with pytest.raises(TaskError, match=r"are \.jsonl or \.json"):
        read_predictions(tmp_path / "preds.parquet")
    (tmp_path / "preds.json").write_text('{"a-1": "x"}')
    with pytest.raises(TaskError, match="a-1 is no object"):
        read_predictions(tmp_path / "preds.json")


def test_who_reads_while_it_is_written_gets_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "preds.jsonl"
    write_predictions(path, [Prediction("a-1", "me", b"x")])
    with path.open() as reader:
        write_predictions(path, [Prediction("a-2", "me", b"y")])
        assert '"a-1"' in reader.read()
    assert list(read_predictions(path)) == ["a-2"]


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "preds.jsonl"
    before = [Prediction("a-1", "me", b"x")]
    write_predictions(path, before)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(predictions.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_predictions(path, [Prediction("a-2", "me", b"y" * 10_000)])
    assert list(read_predictions(path).values()) == before
    assert [file.name for file in tmp_path.iterdir()] == ["preds.jsonl"]
