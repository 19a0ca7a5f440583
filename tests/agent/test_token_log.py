"""The token log: only ever added to, and given back whole."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent.token_log import ROLES, Segment, TokenLog

ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@st.composite
def entries(draw: st.DrawFn) -> list[dict[str, Any]]:
    turn, result = 0, []
    for _ in range(draw(st.integers(0, 8))):
        turn += draw(st.integers(0, 2))
        kind = draw(st.sampled_from(["injected", "sampled"]))
        result.append(
            {
                "ids": draw(ids),
                "role": draw(st.sampled_from(ROLES)),
                "kind": kind,
                "turn": turn,
                "pinned": draw(st.booleans()),
                "text": draw(st.none() | st.text(max_size=5)) if kind == "injected" else None,
            }
        )
    return result


def log_of(items: list[dict[str, Any]]) -> TokenLog:
    log = TokenLog()
    for item in items:
        log.append(item["ids"], **{k: v for k, v in item.items() if k != "ids"})
    return log


@settings(deadline=None)
@given(entries())
def test_the_log_is_the_concatenation_of_what_was_appended(items: list[dict[str, Any]]) -> None:
    log = log_of(items)
    assert list(log.ids) == [i for item in items for i in item["ids"]]
    assert len(log) == len(log.ids) == sum(len(item["ids"]) for item in items)
    for segment, item in zip(log.segments, items, strict=True):
        assert list(log.ids[segment.start : segment.end]) == item["ids"]
        for field in ("role", "kind", "turn", "pinned", "text"):
            assert getattr(segment, field) == item[field]


@settings(deadline=None)
@given(entries())
def test_a_log_survives_json(items: list[dict[str, Any]]) -> None:
    log = log_of(items)
    back = TokenLog.from_dict(json.loads(json.dumps(log.to_dict())))
    assert list(back.ids) == list(log.ids)
    assert back.segments == log.segments
    assert back.digest() == log.digest()


@settings(deadline=None)
@given(entries())
def test_pinned_spans_cover_exactly_the_pinned_ids(items: list[dict[str, Any]]) -> None:
    spans = log_of(items).pinned_spans()
    wanted = [item["pinned"] for item in items for _ in item["ids"]]
    covered = [any(start <= i < end for start, end in spans) for i in range(len(wanted))]
    assert covered == wanted
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))  # joined, in order
    assert all(start < end for start, end in spans)


@settings(deadline=None)
@given(ids, ids)
def test_digest_is_the_sha256_of_the_ids_up_to_n(first: list[int], second: list[int]) -> None:
    log = log_of(
        [{"ids": part, "role": "user", "kind": "injected", "turn": 0} for part in (first, second)]
    )
    both = first + second
    for n in range(len(both) + 1):
        packed = struct.pack(f"<{n}I", *both[:n])
        assert log.digest(n) == hashlib.sha256(packed).hexdigest()
    assert log.digest() == log.digest(len(both))


class PrefixNeverChanges(RuleBasedStateMachine):
    """Whatever is called, also with wrong values, a prefix once seen stays."""

    def __init__(self) -> None:
        super().__init__()
        self.log = TokenLog()
        self.view = self.log.ids
        self.seen: list[int] = []
        self.segments: tuple[Segment, ...] = ()

    @rule(new=ids, turn=st.integers(0, 5))
    def append(self, new: list[int], turn: int) -> None:
        before = len(self.log)
        try:
            segment = self.log.append(new, role="tool", kind="sampled", turn=turn)
        except ValueError:
            assert turn < self.segments[-1].turn
            return
        assert (segment.start, segment.end) == (before, before + len(new))
        self.seen += new
        self.segments += (segment,)

    @rule(good=ids, bad=st.sampled_from([-1, 2**31, 1.5, "1", None]))
    def append_something_wrong(self, good: list[int], bad: Any) -> None:
        turn = self.segments[-1].turn if self.segments else 0
        with pytest.raises((ValueError, TypeError)):
            self.log.append([*good, bad], role="tool", kind="sampled", turn=turn)

    @rule(new=ids)
    def change_what_was_given_in_or_out(self, new: list[int]) -> None:
        turn = self.segments[-1].turn if self.segments else 0
        given = list(new)
        self.segments += (self.log.append(given, role="user", kind="injected", turn=turn),)
        self.seen += new
        given.append(7)
        self.log.to_dict()["ids"].append(7)
        self.log.pinned_spans().append((0, 1))

    @invariant()
    def all_is_as_it_was(self) -> None:
        assert list(self.log.ids) == self.seen
        assert list(self.view) == self.seen  # the view that was taken first is live
        assert self.log.segments == self.segments


TestPrefixNeverChanges = PrefixNeverChanges.TestCase
TestPrefixNeverChanges.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def sample() -> TokenLog:
    log = TokenLog()
    log.append([5, 6, 7], role="system", kind="injected", turn=0, pinned=True, text="s")
    log.append([8], role="assistant", kind="sampled", turn=0)
    return log


def test_the_view_offers_no_way_to_write() -> None:
    view: Any = sample().ids
    for attempt in (
        lambda: view.__setitem__(0, 1),
        lambda: view.__delitem__(0),
        lambda: view.append(1),
        lambda: view.extend([1]),
        lambda: view.clear(),
    ):
        with pytest.raises(AttributeError):
            attempt()
    with pytest.raises(TypeError):
        memoryview(view)
    assert isinstance(view[1:3], tuple)
    assert (view[0], view[-1], view[1:3], 7 in view) == (5, 8, (6, 7), True)
    assert view == [5, 6, 7, 8]
    assert view != [5, 6, 7]


def test_segments_cannot_be_changed() -> None:
    log = sample()
    with pytest.raises(AttributeError):
        log.segments[0].start = 1  # type: ignore[misc]
    assert isinstance(log.segments, tuple)


def test_the_view_is_not_copied() -> None:
    log = sample()
    assert log.ids is log.ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "robot"}, "role 'robot' is not one of system, user, assistant, tool"),
        ({"kind": "guessed"}, "kind 'guessed' is not one of injected, sampled"),
        ({"turn": -1}, "turn -1 comes before turn 0"),
        ({"kind": "sampled", "text": "x"}, "a sampled span has no source text"),
        ({"ids": [1, -2]}, "token id -2 is outside 0 to 2147483647"),
    ],
)
def test_wrong_entries_are_refused_whole(change: dict[str, Any], message: str) -> None:
    log = sample()
    before = (log.digest(), log.segments)
    entry = {"ids": [1], "role": "user", "kind": "injected", "turn": 0, "text": None, **change}
    with pytest.raises(ValueError, match=message):
        log.append(entry.pop("ids"), **entry)
    assert (log.digest(), log.segments) == before


@pytest.mark.parametrize("n", [-1, 5])
def test_no_digest_of_more_than_there_is(n: int) -> None:
    with pytest.raises(ValueError, match="the log holds 4"):
        sample().digest(n)


def test_a_changed_record_is_refused() -> None:
    def changed(**fields: Any) -> dict[str, Any]:
        return {**sample().to_dict(), **fields}

    good = sample().to_dict()
    for data, message in (
        (changed(ids=[5, 6, 7, 9]), "digest"),
        (changed(ids=[5, 6, 7, 8, 9]), "1 ids at the end belong to no segment"),
        (changed(ids=[5, 6, 7]), r"segment \[3, 4\)"),
        (changed(segments=good["segments"][1:]), r"segment \[3, 4\) does not follow id 0"),
        (changed(format=2), "format 2 is not 1"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenLog.from_dict(data)


def test_ids_may_come_as_other_integers() -> None:
    torch = pytest.importorskip("torch")
    log = TokenLog()
    log.append(torch.tensor([3, 4]), role="user", kind="injected", turn=0)
    assert log.ids[:] == (3, 4)
    assert all(type(i) is int for i in log.ids)
