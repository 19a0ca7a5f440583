"""A log as the template renders it whole: equal to transformers' own rendering, thoughts stripped,
text never control; and what full_context feeds under `history=template`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chat_samples import (
    KNOWS_TOOLS,
    OPENS_THOUGHT,
    REWRITES_THE_PAST,
    STRIPS_THOUGHTS,
    THINKS_SINCE,
    build,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_talk import nexus, tiny

from agent.chat import Chat, UnbridgeableTemplate
from agent.protocol import FullContext, make_protocol
from agent.shared_prompt import SharedPrompt
from agent.template_history import template_ids
from agent.token_log import TokenLog
from cache import Sampling

TEMPLATES = {
    "strips thoughts": STRIPS_THOUGHTS,
    "thinks since": THINKS_SINCE,
    "opens thought": OPENS_THOUGHT,
    "knows tools": KNOWS_TOOLS,
}
REPLIES = (
    "<think>\nWhere?\n\n    x = 1\n</think>\n\nLook: <tool_call>\n{}\n</tool_call>",
    "<think>\n\n</think>\n\ndone",
    "no thought  ",
    "<think>cut off",
    "日本</think>\n🙂",
    "",
)


@functools.cache
def chat_of(name: str, thinking: bool | None = None) -> Chat:
    return Chat(build(TEMPLATES[name]), name, thinking=thinking)


def by_transformers(chat: Chat, messages: Sequence[tuple[str, str]]) -> list[int]:
    """The conversation by the tokenizer alone."""
    switch = {} if chat._thinking is None else {"enable_thinking": chat._thinking}
    ids: list[int] = chat._tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in messages],
        tools=[dict(tool) for tool in chat.tools] or None,
        add_generation_prompt=True,
        return_dict=False,
        **switch,
    )
    return ids


def converse(
    chat: Chat,
    messages: Sequence[tuple[Any, str]],
    replies: Sequence[str],
    *,
    encode: Callable[[str], list[int]] | None = None,
) -> TokenLog:
    log = TokenLog()
    chat.open(log, "Rules.", messages[0][1])
    for turn, ((role, text), reply) in enumerate(zip(messages[1:], replies, strict=True)):
        ids = encode(reply) if encode else chat._tokenizer.encode(reply)
        closed = [chat.close_id] if turn % 2 else []
        log.append([*ids, *closed], role="assistant", kind="sampled", turn=turn)
        chat.bridge(log, text, role=role, turn=turn + 1)
    return log


def as_messages(
    chat: Chat, messages: Sequence[tuple[str, str]], replies: Sequence[str]
) -> list[tuple[str, str]]:
    opener = "<think>\n" if chat.opens_in_thought else ""
    turns = [("system", "Rules."), messages[0]]
    for message, reply in zip(messages[1:], replies, strict=True):
        turns += [("assistant", opener + reply), message]
    return turns


texts = st.lists(st.sampled_from(["user", " ", "\n", "\n\n", "é", "日", "0", "<"])).map("".join)


@pytest.mark.parametrize("thinking", [None, False])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_ids_are_those_of_transformers(
    name: str, thinking: bool | None, data: st.DataObject
) -> None:
    if thinking is False and name != "knows tools":
        return
    chat = chat_of(name, thinking)
    message = st.tuples(st.sampled_from(["user", "tool"]), texts)
    messages = [("user", data.draw(texts)), *data.draw(st.lists(message, max_size=6))]
    replies = [data.draw(st.sampled_from(REPLIES)) for _ in messages[1:]]
    log = converse(chat, messages, replies)
    assert template_ids(chat, log) == by_transformers(chat, as_messages(chat, messages, replies))


def test_thoughts_of_the_past_are_gone_and_the_log_keeps_them() -> None:
    chat = chat_of("strips thoughts")
    messages = [("user", "u"), ("user", "next"), ("tool", "out")]
    log = converse(chat, messages, ["<think>old</think>a", "<think>new</think>b"])
    before = log.digest()
    text = chat._tokenizer.decode(template_ids(chat, log))
    assert "old" not in text
    assert "<think>new</think>b" in text  # no question since
    assert "<think>old</think>a" in chat._tokenizer.decode(log.ids[:])
    assert log.digest() == before


def test_tools_stand_in_the_rendering_too() -> None:
    tool = {"type": "function", "function": {"name": "view", "description": "<|im_end|>"}}
    chat = chat_of("knows tools").with_tools([tool])
    messages = [("user", "u"), ("tool", "out")]
    log = converse(chat, messages, ["<think>x</think>ok"])
    ids = template_ids(chat, log)
    turn_0 = log.segments[2].end
    assert ids[:turn_0] == list(log.ids[:turn_0])
    rendered = by_transformers(chat, as_messages(chat, messages, ["<think>x</think>ok"]))
    assert chat._tokenizer.decode(ids) == chat._tokenizer.decode(rendered)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_spelled_control_tokens_stay_text(name: str, data: st.DataObject) -> None:
    chat = chat_of(name)
    control = sorted(chat._tokens.by_text)
    spelled = st.lists(st.sampled_from([*control, "a", " ", "\n", "<", "Qzspelt", "1z"])).map(
        lambda parts: "".join(["-", *parts, "-"])  # at the ends a template might look at them
    )
    issue, output, reply = (data.draw(spelled) for _ in range(3))
    innocent = converse(chat, [("user", "-"), ("tool", "-")], ["-"], encode=chat.encode)
    log = converse(chat, [("user", issue), ("tool", output)], [reply], encode=chat.encode)

    ids = template_ids(chat, log)

    wanted = [i for i in template_ids(chat, innocent) if i in chat._tokens.ids]
    assert [i for i in ids if i in chat._tokens.ids] == wanted
    text = chat._tokenizer.decode(ids)
    for content in (issue, output, reply):
        assert content in text


def test_a_spelled_thought_is_not_one() -> None:
    chat = chat_of("strips thoughts")
    said = "The tag </think> ends it."
    messages = [("user", "u"), ("user", "v")]
    spelled = template_ids(chat, converse(chat, messages, [said], encode=chat.encode))
    real = template_ids(chat, converse(chat, messages, [said]))
    assert said in chat._tokenizer.decode(spelled)
    assert "The tag" not in chat._tokenizer.decode(real)


def test_a_tail_cannot_complete_a_control_token() -> None:
    chat, log = chat_of("strips thoughts"), TokenLog()
    chat.open(log, "s", "x<|im_", tail="end|>y")
    assert template_ids(chat, log) == list(log.ids)


def test_special_tokens_within_a_reply_are_lost() -> None:
    chat = chat_of("strips thoughts")
    messages = [("user", "u"), ("tool", "v")]
    log = converse(chat, messages, ["a<|im_start|>b<|endoftext|>"])
    assert template_ids(chat, log) == by_transformers(chat, as_messages(chat, messages, ["ab"]))


def test_what_no_reply_followed_is_an_empty_turn() -> None:
    chat, log = chat_of("strips thoughts"), TokenLog()
    chat.open(log, "s", "u")
    chat.bridge(log, "v", turn=1)
    wanted = [("system", "s"), ("user", "u"), ("assistant", ""), ("user", "v")]
    assert template_ids(chat, log) == by_transformers(chat, wanted)


def test_a_log_without_a_prompt_at_its_end_is_an_error() -> None:
    chat, log = chat_of("strips thoughts"), TokenLog()
    for _ in range(2):
        with pytest.raises(ValueError, match="does not end with a generation prompt"):
            template_ids(chat, log)
        if not len(log):
            chat.open(log, "s", "u")
            log.append([5], role="assistant", kind="sampled", turn=0)


def test_a_template_that_is_not_used_is_an_error() -> None:
    chat, log = Chat(build(REWRITES_THE_PAST), "m"), TokenLog()
    chat.open(log, "s", "u")
    with pytest.raises(UnbridgeableTemplate, match="the chat template of m cannot be continued"):
        template_ids(chat, log)
    with pytest.raises(ValueError, match=r"own chat template.*of m cannot be.*Use history=raw"):
        protocol(chat)


# Under full_context


def tiny_for(chat: Chat) -> Any:
    return tiny("llama", vocab_size=len(chat._tokenizer))


def protocol(chat: Chat, name: str = "full_context", *, model: Any = None, **options: Any) -> Any:
    options = {"history": "template", **options}
    model = tiny_for(chat) if model is None else model
    return make_protocol(name, model, chat, nexus(1 << 20), sampling=Sampling(), **options)


class Fed:
    """Keeps the ids that a protocol's sessions are fed, turn by turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from agent.session import Session

        self.ids: list[list[int]] = []
        feed = Session.feed

        def kept(session: Session, ids: Sequence[int], **options: Any) -> None:
            self.ids.append(list(ids))
            feed(session, ids, **options)

        monkeypatch.setattr(Session, "feed", kept)


def test_full_context_feeds_the_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, fed, log = chat_of("strips thoughts"), Fed(monkeypatch), TokenLog()
    full = protocol(chat)
    chat.open(log, "Rules.", "u")
    messages: list[tuple[str, str]] = [("user", "u")]
    replies = []
    for turn, reply in enumerate(REPLIES):
        answer = full.reply(log, max_new_tokens=2)
        rendered = by_transformers(chat, as_messages(chat, messages, replies))
        assert fed.ids[-1] == rendered
        assert answer.stats.fed == len(rendered)
        replies.append(reply)
        log.append(chat._tokenizer.encode(reply), role="assistant", kind="sampled", turn=turn)
        messages.append(("user", f"out {turn}"))
        chat.bridge(log, f"out {turn}", turn=turn + 1)
    assert len(fed.ids[-1]) < len(log) - 20  # thoughts were stripped, else this shows nothing
    full.close()


def test_pins_stand_where_the_log_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of("strips thoughts")
    full = protocol(chat)
    assert isinstance(full, FullContext)
    log = converse(chat, [("user", "u"), ("user", "v")], ["<think>x</think>y"])
    full.reply(log, max_new_tokens=1)
    assert full._pinned == set(log.pinned_spans()) == {(0, log.segments[1].end)}
    chat.bridge(log, "keep", turn=2, pinned=True)
    with pytest.raises(ValueError, match="pin nothing but the system and the first user message"):
        full.reply(log, max_new_tokens=1)
    full.close()


def test_a_first_prompt_is_shared_where_log_and_rendering_agree() -> None:
    chat, shared = chat_of("strips thoughts"), SharedPrompt()
    log = converse(chat, [("user", "u")], [])
    model = tiny_for(chat)
    ids = []
    for attempt in range(3):
        shared.last = attempt == 2
        full = protocol(chat, model=model, shared=shared)
        reply = full.reply(log, max_new_tokens=4)
        assert (reply.stats.forked > 0) is (attempt > 0)
        ids.append(reply.ids)
        full.close()
    assert ids[0] == ids[1] == ids[2]
    later = converse(chat, [("user", "u"), ("user", "v")], ["<think>x</think>y"])
    full = protocol(chat, model=model, shared=(unused := SharedPrompt()))
    assert full.reply(later, max_new_tokens=1).stats.fed == len(template_ids(chat, later))
    assert unused.tokens == 0  # what was fed is not what the log says, so it is nobody's prompt
    full.close()


def test_true_eviction_refuses_it_and_says_why() -> None:
    chat = chat_of("strips thoughts")
    with pytest.raises(ValueError, match=r"rewrites the past.*full_context, or history=raw"):
        protocol(chat, "true_eviction")
    with pytest.raises(ValueError, match=r"unknown history 'html'.*raw, template"):
        protocol(chat, history="html")
