"""The first user message in two segments: the same ids as in one, and only the first is pinned."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import byte_chat

from agent.token_log import TokenLog

TEXT = st.text(st.sampled_from("ab \n<|im_end|>é`"), max_size=30)


@settings(max_examples=50, deadline=None)
@given(TEXT, TEXT.filter(bool))
def test_a_tail_changes_no_id_and_is_not_pinned(user: str, tail: str) -> None:
    chat = byte_chat()
    one, two = TokenLog(), TokenLog()
    chat.open(one, "system", user + tail)
    chat.open(two, "system", user, tail=tail)
    assert list(one.ids) == list(two.ids)
    first, second = [segment for segment in two.segments if segment.role == "user"]
    assert (first.pinned, second.pinned) == (True, False)
    assert first.end == second.start
    assert chat.text(two.ids[first.start : first.end]).endswith(user)
    assert chat.text(two.ids[second.start : second.end]).startswith(tail)
