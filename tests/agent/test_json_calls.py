"""Calls as JSON between tags: what is a call, and what is an error and never run."""

from __future__ import annotations

import json

import pytest

from agent.dialects.base import Call, FormatErrorKind, ToolForm
from agent.dialects.json_calls import JsonCalls

FORMS = [
    ToolForm("view", ("path",), ("start", "end")),
    ToolForm("str_replace", ("path", "old_str", "new_str")),
    ToolForm("submit"),
]
DIALECT = JsonCalls(FORMS)
KIND = FormatErrorKind


def written(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def call(name: str, **arguments: object) -> str:
    return written(json.dumps({"name": name, "arguments": arguments}))


def test_a_call_is_read() -> None:
    turn = DIALECT.parse(f"I look.\n\n{call('view', path='a.py', start='3')}\n")
    assert turn.call is not None
    assert (turn.call.name, turn.call.arguments) == ("view", {"path": "a.py", "start": "3"})
    assert (turn.thought, turn.ignored) == ("I look.", "")
    assert turn.call.raw.startswith("<tool_call>")
    assert turn.call.raw.endswith("</tool_call>")


def test_arguments_become_the_texts_that_tools_take() -> None:
    text = written(
        '{"name": "x", "arguments": {"a": 3, "b": -1.5e3, "c": true, "d": [1, "é"], '
        '"e": {"k": null}, "f": null, "g": "", "h": "true", "i": 10000000000000000000001}}'
    )
    turn = JsonCalls().parse(text)
    assert turn.call is not None
    assert turn.call.arguments == {
        "a": "3",
        "b": "-1500.0",
        "c": "true",
        "d": '[1, "é"]',
        "e": '{"k": null}',
        "g": "",
        "h": "true",
        "i": "10000000000000000000001",
    }


def test_no_arguments_may_be_left_out() -> None:
    for body in ('{"name": "submit"}', '{"name": "submit", "arguments": {}}'):
        turn = DIALECT.parse(written(body))
        assert turn.call is not None
        assert turn.call.arguments == {}


@pytest.mark.parametrize(
    "value",
    [
        "</tool_call>",
        'a "</tool_call>" b\n<tool_call>{"name": "submit"}</tool_call>',
        "<think>\n</think>",
        "    indented\n\ttab\n\n",
        "back\\slash \\n 'x' \"y\"",
        "\u2028 🙂 日本",
        "",
    ],
)
def test_any_text_can_be_a_value(value: str) -> None:
    made = Call("str_replace", {"path": "a", "old_str": value, "new_str": value})
    text = DIALECT.render(made)
    turn = DIALECT.parse(f"Thought.\n{text}")
    assert turn.call is not None
    assert turn.call.arguments == made.arguments
    assert turn.ignored == ""
    # Decoding may end with the last character, and at no character before it.
    assert [DIALECT.stop(text[:end]) for end in range(len(text) + 1)] == [False] * len(text) + [
        True
    ]


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("I think it is done.", KIND.NO_CALL, "no function call"),
        ('{"name": "submit", "arguments": {}}', KIND.NO_CALL, "<tool_call>"),
        ('{"name": "submit"}</tool_call>', KIND.MALFORMED, "without <tool_call>"),
        ("<tool_call>", KIND.UNCLOSED, "no </tool_call>"),
        ('<tool_call>\n{"name": "submit", "arguments": {}}', KIND.UNCLOSED, "smaller steps"),
        ('<tool_call>\n{"name": "view", "arguments": {"path": "a', KIND.UNCLOSED, "not complete"),
        ("<tool_call>\n</tool_call>", KIND.MALFORMED, "nothing between"),
        (written("{'name': 'submit'}"), KIND.MALFORMED, "no valid JSON"),
        (written('{"name": "submit", "arguments": {},}'), KIND.MALFORMED, "no valid JSON"),
        (written('{"name": "view", "arguments": {"path": "a\nb"}}'), KIND.MALFORMED, "control"),
        (written('{"name": "submit"} extra'), KIND.MALFORMED, "follows its object"),
        (written('{"name": "view", "arguments": {"path": NaN}}'), KIND.MALFORMED, "NaN"),
        (
            written('{"name": "view", "arguments": {"path": ' + "9" * 5000 + "}}"),
            KIND.MALFORMED,
            "",
        ),
        (written('["submit"]'), KIND.MALFORMED, "JSON object"),
        (written('{"arguments": {}}'), KIND.MALFORMED, '"name"'),
        (written('{"name": 3}'), KIND.MALFORMED, '"name"'),
        (written('{"name": "view", "arguments": "{}"}'), KIND.MALFORMED, "an object"),
        (written('{"name": "view", "path": "a"}'), KIND.MALFORMED, "no others"),
        (
            written('{"name": "view", "arguments": {"path": "a", "path": "b"}}'),
            KIND.DUPLICATE_PARAMETER,
            "path",
        ),
        (written('{"name": "submit", "name": "view"}'), KIND.DUPLICATE_PARAMETER, "name"),
        (call("dance"), KIND.UNKNOWN_TOOL, "view, str_replace, submit"),
        (call("view", path="a", mode="x"), KIND.UNKNOWN_PARAMETER, "It takes: path, start, end"),
        (call("view", path="a", mode=None), KIND.UNKNOWN_PARAMETER, "mode"),
        (call("view", start=3), KIND.MISSING_PARAMETER, "needs the parameter path"),
        (call("view", path=None), KIND.MISSING_PARAMETER, "path"),
        (call("submit") + "\n" + call("submit"), KIND.AMBIGUOUS, "more than one call"),
        (call("submit") + '\n<tool_call>\n{"name"', KIND.AMBIGUOUS, "more than one call"),
        (f"<think>{call('submit')}</think>", KIND.INSIDE_THINK, "after </think>"),
        (f"{call('submit')}</think>", KIND.INSIDE_THINK, "after </think>"),
        (f"<think>{call('submit')}", KIND.INSIDE_THINK, "Close it"),
        ("<think>It is done.</think>", KIND.NO_CALL, "no function call"),
    ],
)
def test_whatever_is_not_one_whole_call_is_an_error(
    text: str, kind: FormatErrorKind, said: str
) -> None:
    turn = DIALECT.parse(text)
    assert turn.call is None
    assert turn.error is not None
    assert turn.error.kind is kind
    assert said in turn.error.message
    assert "Write exactly one call, in this form:\n<tool_call>\n{" in turn.error.message


def test_the_form_shown_is_that_of_the_tool_that_was_meant() -> None:
    turn = DIALECT.parse(call("str_replace", path="a"))
    assert turn.error is not None
    shown = turn.error.message.split("in this form:\n")[1]
    told = JsonCalls(FORMS).parse(shown).call
    assert told is not None
    assert list(told.arguments) == ["path", "old_str", "new_str"]


def test_a_call_after_a_thought_counts() -> None:
    text = f"<think>{call('dance')}</think>\n{call('submit')}"
    turn = DIALECT.parse(text)
    assert turn.call is not None
    assert turn.call.name == "submit"
    assert DIALECT.stop(text)
    assert not DIALECT.stop(text[: text.index("</think>")])


def test_a_prompt_that_opens_the_thought() -> None:
    dialect = JsonCalls(FORMS, opens_in_thought=True)
    inside = call("submit")
    assert dialect.parse(inside).error is not None
    assert not dialect.stop(inside)
    after = f"hm {inside}</think>\n{inside}"
    assert dialect.parse(after).call is not None
    assert dialect.stop(after)


def test_only_reads_a_reply_to_its_end() -> None:
    dialect = JsonCalls(FORMS, only=True)
    assert not dialect.stop(call("submit"))
    assert dialect.parse(call("submit")).call is not None


def test_deep_nesting_is_an_error_of_form() -> None:
    text = written('{"name": "view", "arguments": {"path": ' + "[" * 100_000 + "]" * 100_000 + "}}")
    assert DIALECT.parse(text).call is None


def test_names_are_unique_and_the_help_shows_a_call() -> None:
    with pytest.raises(ValueError, match="share a name"):
        JsonCalls([ToolForm("a"), ToolForm("a")])
    told = JsonCalls().parse(DIALECT.format_help.split("\n\n")[1]).call
    assert told is not None
    assert told.name == "NAME"
