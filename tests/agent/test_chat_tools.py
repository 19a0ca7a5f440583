"""Tools that the template itself writes, thoughts that are counted, and thoughts switched off."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_samples import CHATML, KNOWS_TOOLS, LLAMA_LIKE, LLAMA_SPECIALS, MOVES_TOOLS, build
from chat_samples import OPENS_THOUGHT as OPENS
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.chat import Chat, Tool, UnbridgeableTemplate
from agent.token_log import TokenLog


def schema(name: str, says: str = "Do it.", **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    function = {"name": name, "description": says, "parameters": {"properties": properties}}
    return {"type": "function", "function": function}


TOOLS = [
    schema("view", path="A file."),
    schema("édit", "Replace <b>lines</b>.\n\n  Twice.", new="x"),
]
KNOWS = build(KNOWS_TOOLS)


def opened(chat: Chat, system: str = "Rules.", user: str = "Issue.") -> list[int]:
    log = TokenLog()
    chat.open(log, system, user)
    return list(log.ids)


def by_template(chat: Chat, messages: list[dict[str, str]], tools: Any = None) -> list[int]:
    ids: list[int] = chat._tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False
    )
    return ids


OPENING = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Issue."}]


def test_tools_stand_in_turn_0_as_the_template_writes_them() -> None:
    chat = Chat(KNOWS, "knows", TOOLS)
    assert opened(chat) == by_template(chat, OPENING, TOOLS)
    assert chat._tokens.by_text["<tool_call>"] in opened(chat)  # the template's own mark is real
    log = TokenLog()
    chat.open(log, "Rules.", "Issue.")
    first, *_ = log.segments
    assert (first.role, first.pinned, first.text) == ("system", True, "Rules.")
    written = chat._tokenizer.decode(log.ids[first.start : first.end])
    assert all(json.dumps(tool, ensure_ascii=False) in written for tool in TOOLS)
    assert written.endswith("<|im_end|>\n")


def test_the_bridge_is_the_same_with_tools_and_without() -> None:
    chat = Chat(KNOWS, "knows")
    given = chat.with_tools(TOOLS)
    assert (given.name, given.tools, given.layout_source) == ("knows", tuple(TOOLS), "template")
    assert given.roles == chat.roles == {"user", "tool"}
    assert chat.tools == ()
    tails = []
    for each in (chat, given):
        log = TokenLog()
        each.open(log, "Rules.", "Issue.")
        start = len(log)
        for turn in range(1, 4):
            log.append(each.encode("ok"), role="assistant", kind="sampled", turn=turn)
            each.bridge(log, f"out {turn}", role="tool", turn=turn + 1)
        tails.append(log.ids[start:])
    assert tails[0] == tails[1]
    assert opened(given.with_tools([])) == opened(chat)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_schema_that_spells_control_tokens_is_text(data: st.DataObject) -> None:
    control = sorted(Chat(KNOWS)._tokens.by_text)
    text = st.lists(
        st.sampled_from([*control, "a", '"', "\n", "<", "|>", "Qzspelt", "1z"]), max_size=8
    ).map("".join)
    plain = Chat(KNOWS, "plain", [schema("view", "", path="")])
    hostile = [schema("view", data.draw(text), **{"p" + data.draw(text): data.draw(text)})]
    chat = Chat(KNOWS, "hostile", hostile)

    ids = opened(chat)

    def control_of(ids: list[int]) -> list[int]:
        return [i for i in ids if i in chat._tokens.ids]

    assert control_of(ids) == control_of(opened(plain))
    rendered = chat._tokenizer.apply_chat_template(
        OPENING, tools=hostile, tokenize=False, add_generation_prompt=True
    )
    assert chat._tokenizer.decode(ids) == rendered


@pytest.mark.parametrize(
    ("tokenizer", "seen"),
    [
        (build(CHATML + "{# the user's view #}"), "writes nothing about the tool 'view'"),
        (build(MOVES_TOOLS), "rendered as a whole has"),
        (build(None), "it has none"),
        (build(LLAMA_LIKE, LLAMA_SPECIALS, ()), "writes nothing about the tool 'view'"),
    ],
)
def test_a_template_that_knows_no_tools_is_refused_with_the_remedy(
    tokenizer: Any, seen: str
) -> None:
    with pytest.raises(UnbridgeableTemplate) as refused:
        Chat(tokenizer, "some-model").with_tools(TOOLS)
    message = str(refused.value)
    assert "the chat template of some-model cannot be given tools" in message
    assert seen in message
    assert "Choose a tool set that describes its tools in the prompt" in message


def test_a_name_that_stands_in_the_template_anyway_is_no_tool() -> None:
    tokenizer = build(CHATML.replace("Always be brief.", "view") + "view")
    with pytest.raises(UnbridgeableTemplate, match="writes nothing about the tool 'view'"):
        Chat(tokenizer, "m", TOOLS)


@pytest.mark.parametrize("tool", [{"type": "function"}, {"function": {"description": "x"}}])
def test_a_schema_without_a_name_is_an_error(tool: Tool) -> None:
    with pytest.raises(ValueError, match="has no name"):
        Chat(KNOWS, "m", [tool])


def test_thoughts_are_switched_off_in_every_prompt_and_stay_in_the_log() -> None:
    chat = Chat(KNOWS, "knows", thinking=False)
    assert (chat.layout_source, chat.opens_in_thought) == ("template", False)
    log = TokenLog()
    chat.open(log, "s", "u")
    log.append(chat.encode("ok"), role="assistant", kind="sampled", turn=0)
    chat.bridge(log, "out", role="tool", turn=1)
    prompt = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert chat._tokenizer.decode(log.ids[:]) == (
        f"<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n{prompt}ok<|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\nout\n</tool_response><|im_end|>\n{prompt}"
    )
    assert log.ids[-2] == chat._tokens.by_text["</think>"]  # a real one, as in the template
    with_tools = chat.with_tools(TOOLS)
    assert with_tools._tokenizer.decode(opened(with_tools)[-20:]).endswith(prompt)


def test_thoughts_cannot_be_switched_off_without_a_switch() -> None:
    for template in (CHATML, None):
        with pytest.raises(UnbridgeableTemplate, match=r"switched off for m by its chat template"):
            Chat(build(template), "m", thinking=False)
    assert opened(Chat(build(CHATML), thinking=True)) == opened(Chat(build(CHATML)))


THOUGHTS = [
    ("<think>a b</think>", "\nrun it"),
    ("<think>\n\n</think>", "\n\ncall"),
    ("<think>cut off in 日本", ""),
    ("never opened</think>", "say"),
    ("", "no thought at all"),
    ("", ""),
    ("<think>x <think> y</think>", " z"),
]


@pytest.mark.parametrize("apart", [False, True], ids=["marks", "letters"])
@pytest.mark.parametrize("closed", [False, True], ids=["cut", "closed"])
@pytest.mark.parametrize(("thought", "rest"), THOUGHTS)
def test_ids_of_a_thought_are_counted(thought: str, rest: str, closed: bool, apart: bool) -> None:
    chat = Chat(KNOWS)
    encode = chat.encode if apart else lambda text: chat._tokenizer.encode(text)
    ids = [*encode(thought), *encode(rest), *([chat.close_id] if closed else [])]
    assert chat.thought_tokens(ids) == len(encode(thought))


def test_thoughts_that_are_not_at_the_beginning_are_counted_too() -> None:
    chat = Chat(KNOWS)
    encode = chat._tokenizer.encode
    parts = ["🙂🙂", "<think>a</think>", "in between 🙂", "<think>日本</think>", "end"]
    ids = [i for part in parts for i in encode(part)]
    assert chat.thought_tokens(ids) == len(encode(parts[1])) + len(encode(parts[3]))
    cut = encode("日")[:2]  # two bytes of three: one U+FFFD, as one byte would be
    assert chat.text(cut) == "\ufffd"
    assert chat.thought_tokens([*cut, *encode(parts[1])]) == len(encode(parts[1]))


def test_a_reply_that_starts_in_a_thought_is_counted_from_its_start() -> None:
    chat = Chat(build(OPENS))
    encode = chat._tokenizer.encode
    assert chat.thought_tokens(encode("a b</think>") + encode("\n\nc")) == len(
        encode("a b</think>")
    )
    assert chat.thought_tokens(encode("never closed")) == len(encode("never closed"))
    assert chat.thought_tokens([chat.close_id]) == 0
