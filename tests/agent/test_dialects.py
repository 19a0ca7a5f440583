"""Reading calls: exactly what was written, or an error that shows the right form."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent.dialects.base import Call, FormatError, FormatErrorKind, ParsedTurn, ToolForm
from agent.dialects.xml_calls import XmlCalls

FORMS = (
    ToolForm("view", ("path",), ("lines",)),
    ToolForm("edit", ("path", "text"), ("lines",)),
    ToolForm("submit"),
)
XML = XmlCalls(FORMS)
VIEW = "<function=view>\n<parameter=path>a.py</parameter>\n</function>"


def call_of(text: str, dialect: XmlCalls = XML) -> Call:
    turn = dialect.parse(text)
    assert turn.call is not None, turn.error
    assert dialect.stop(text)
    return turn.call


def error_of(text: str, kind: FormatErrorKind, dialect: XmlCalls = XML) -> FormatError:
    turn = dialect.parse(text)
    assert turn.error is not None, turn.call
    assert turn.error.kind is kind
    assert "in this form:\n<function=" in turn.error.message
    return turn.error


def edit(text: str) -> str:
    return (
        f"<function=edit>\n<parameter=path>a.py</parameter>\n"
        f"<parameter=text>{text}</parameter>\n</function>"
    )


def test_a_call_with_its_thought() -> None:
    turn = XML.parse(f"I look first.\n\n{VIEW}")
    assert turn == ParsedTurn("I look first.", Call("view", {"path": "a.py"}, VIEW))


def test_a_call_without_parameters() -> None:
    for text in ("<function=submit></function>", "<function=submit>\n</function>"):
        assert call_of(text) == Call("submit", {}, text)


# T17: at most one newline goes on each side; indentation and blanks stay.
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("    return x", "    return x"),
        ("\n    if x:\n        y\n", "    if x:\n        y"),
        ("\n\n  a  \n\n", "\n  a  \n"),
        ("\n", ""),
        ("", ""),
        ("\n\n", ""),
        ("\t", "\t"),
        ("a\r\n", "a\r"),
        ("\n    a\n    ", "    a\n    "),
    ],
)
def test_values_keep_all_but_one_newline_on_each_side(written: str, value: str) -> None:
    assert call_of(edit(written)).arguments == {"path": "a.py", "text": value}


# T18: what a value holds of the syntax is not cut.
@pytest.mark.parametrize(
    "value",
    [
        "x</parameter>y",
        'CLOSE = "</parameter>"\nOPEN = "<parameter="',
        "one</parameter></parameter>",
        'end = "</function>"\nmore',
        "</function>",
        "an example:\n" + VIEW + "\nand on",
        "an example:\n" + edit("    x = 1") + "\n" + VIEW,
        "<parameter=path>again, which is given already",
        "<parameter=color>no parameter of this function",
        "<think>thoughts</think>",
        "</think>",
        "<think>",
        "```python\ncode\n```",
        "<function=",
        '"<function=view>"',
        "&lt;tag&gt; & \\n",
    ],
)
def test_values_may_hold_parts_of_the_syntax(value: str) -> None:
    assert call_of(edit(value)).arguments["text"] == value
    assert call_of(edit(f"\n{value}\n")).arguments["text"] == value


@pytest.mark.parametrize("head", ["", "x\n"])
@pytest.mark.parametrize("tail", ["", "\ny"])
def test_a_close_that_ends_the_call_too_early_is_noticed(head: str, tail: str) -> None:
    text = edit(f"{head}a</parameter>\n</function>{tail}")
    error = error_of(text, FormatErrorKind.AMBIGUOUS)
    assert "</parameter> followed by </function>" in error.message
    # While decoding nothing has followed yet: only then the first close counts.
    assert XML.stop(text)


def test_what_follows_the_first_call_is_kept_apart_and_not_run() -> None:
    turn = XML.parse(f"{VIEW}\n{edit('x')}")
    assert turn.call == Call("view", {"path": "a.py"}, VIEW)
    assert turn.ignored == edit("x")
    assert XML.parse(f"{VIEW}\n<function=edit>\n<parameter=path>b").call == turn.call


# T19
@pytest.mark.parametrize("inside", [VIEW, f"maybe {VIEW} or\n{edit('x')}", "<function=view>"])
def test_nothing_inside_think_is_run(inside: str) -> None:
    error = error_of(f"<think>{inside}</think>\nSo.", FormatErrorKind.INSIDE_THINK)
    assert "after </think>" in error.message
    assert not XML.stop(f"<think>{inside}</think>\nSo.")
    submit = "<function=submit>\n</function>"
    turn = XML.parse(f"<think>{inside}</think>\n{submit}")
    assert turn.call == Call("submit", {}, submit)
    assert turn.thought == f"<think>{inside}</think>"


def test_a_thought_left_open_runs_nothing() -> None:
    text = f"<think>first {VIEW}\nand then"
    assert "Close it" in error_of(text, FormatErrorKind.INSIDE_THINK).message
    assert not XML.stop(text)


def test_what_stands_before_a_lone_end_of_thought_is_a_thought() -> None:
    submit = "<function=submit>\n</function>"
    assert call_of(f"I could {VIEW}\n</think>\n{submit}") == Call("submit", {}, submit)
    error_of(f"I could {VIEW}\n</think>\ndone", FormatErrorKind.INSIDE_THINK)


def test_a_prompt_that_opens_the_thought() -> None:
    dialect = XmlCalls(FORMS, opens_in_thought=True)
    text = f"Let me see {edit('x')}"
    assert not dialect.stop(text)
    error_of(text, FormatErrorKind.INSIDE_THINK, dialect)
    assert call_of(f"{text}\n</think>\n\n{VIEW}", dialect) == Call("view", {"path": "a.py"}, VIEW)


def test_thoughts_before_a_later_call_leave_it_alone() -> None:
    turn = XML.parse(f"{VIEW}\n<think>why</think>")
    assert turn.call is not None


@pytest.mark.parametrize("fence", ["```", "```xml", "   ```text"])
def test_a_fence_around_the_call_is_no_part_of_it(fence: str) -> None:
    turn = XML.parse(f"Look:\n{fence}\n{VIEW}\n```\n")
    assert turn == ParsedTurn("Look:", Call("view", {"path": "a.py"}, VIEW))
    assert XML.parse(f"{fence}\n{VIEW}\n```").thought == ""


def test_a_fence_in_the_thought_stays() -> None:
    assert XML.parse(f"```\ncode\n```\n{VIEW}").thought.startswith("```\ncode")


def test_a_mention_of_a_function_is_no_call() -> None:
    assert call_of(f"I use <function=edit> later.\n{VIEW}").name == "view"


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("Nothing to do.", FormatErrorKind.NO_CALL, "no function call"),
        ("", FormatErrorKind.NO_CALL, "no function call"),
        ("<function=view>", FormatErrorKind.UNCLOSED, "call of view stops after its name"),
        ("<function=view>\n", FormatErrorKind.UNCLOSED, "call of view stops after its name"),
        (VIEW.removesuffix("</function>"), FormatErrorKind.UNCLOSED, "the function is not"),
        (VIEW.removesuffix("\n</function>"), FormatErrorKind.UNCLOSED, "the function is not"),
        (VIEW.replace("</parameter>", ""), FormatErrorKind.UNCLOSED, "parameter path"),
        (f"{VIEW.replace('</parameter>', '')}\n{VIEW}", FormatErrorKind.UNCLOSED, "path"),
        (edit("x\n")[:-25], FormatErrorKind.UNCLOSED, "parameter text"),
        ("<function=view>\n<path>a.py</path>\n</function>", FormatErrorKind.MALFORMED, "view"),
        ('<function=view>{"path": "a.py"}</function>', FormatErrorKind.MALFORMED, "view"),
        ("<function name=view>\n</function>", FormatErrorKind.MALFORMED, "tags of a call"),
        ("<parameter=path>a.py</parameter>", FormatErrorKind.MALFORMED, "tags of a call"),
        ("<function=vieww>\n</function>", FormatErrorKind.UNKNOWN_TOOL, "view, edit, submit"),
        ("<function=submit>\n<parameter=path>a</parameter>\n</function>",
         FormatErrorKind.UNKNOWN_PARAMETER, "submit has no parameter path. It takes: no"),
        (VIEW.replace("=path", "=file"), FormatErrorKind.UNKNOWN_PARAMETER, "path, lines"),
        ("<function=view>\n</function>", FormatErrorKind.MISSING_PARAMETER, "parameter path"),
        (VIEW.replace("\n</f", "\n<parameter=path>b</parameter>\n</f"),
         FormatErrorKind.DUPLICATE_PARAMETER, "path more than once"),
        (VIEW.replace("a.py</parameter>", "a.py\n<parameter=lines>1-5</parameter>"),
         FormatErrorKind.AMBIGUOUS, "path of view is not closed before <parameter=lines>"),
        (VIEW.replace("</parameter>", "</parameter>\nhm\n<parameter=lines>1</parameter>"),
         FormatErrorKind.AMBIGUOUS, "path of view is not closed before <parameter=lines>"),
        (VIEW.replace("</parameter>", "</parameter>\n<parameter lines>1</parameter>"),
         FormatErrorKind.AMBIGUOUS, "next one is malformed"),
    ],
)  # fmt: skip
def test_malformed_calls_are_errors_that_say_what_is_wrong(
    text: str, kind: FormatErrorKind, says: str
) -> None:
    assert says in error_of(text, kind).message


def test_an_error_shows_the_form_of_the_function_that_was_meant() -> None:
    error = error_of("<function=edit>\n</function>", FormatErrorKind.MISSING_PARAMETER)
    assert error.message.endswith(
        "<function=edit>\n<parameter=path>VALUE</parameter>\n<parameter=text>VALUE</parameter>\n"
        "</function>\nedit may also take: lines."
    )


def test_no_forms_accept_every_name() -> None:
    text = "<function=any.thing-1>\n<parameter=k>v</parameter>\n</function>"
    assert call_of(text, XmlCalls()) == Call("any.thing-1", {"k": "v"}, text)


def test_decoding_stops_at_the_end_of_the_call_and_not_before() -> None:
    text = f"<think>{VIEW}</think> ok </function>\n" + edit(f"x</parameter>\n{VIEW}</function>\n y")
    stops = [n for n in range(len(text) + 1) if XML.stop(text[:n])]
    assert stops == [len(text)]


@pytest.mark.parametrize(
    "forms",
    [
        (ToolForm("a"), ToolForm("a")),
        (ToolForm("a b"),),
        (ToolForm("a", ("x",), ("x",)),),
        (ToolForm("a", ("x>",)),),
    ],
)
def test_forms_that_cannot_be_written_are_refused(forms: tuple[ToolForm, ...]) -> None:
    with pytest.raises(ValueError):
        XmlCalls(forms)


def test_a_turn_is_a_call_or_an_error() -> None:
    with pytest.raises(ValueError):
        ParsedTurn("thought")


fragments = st.lists(
    st.sampled_from(
        [
            "<function=edit>", "<function=view>", "</function>", "<parameter=path>",
            "<parameter=text>", "</parameter>", "<think>", "</think>", "\n", " ", "x", "```",
            "<parameter", "é", "    y",
        ]
    ),
    max_size=14,
).map("".join)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(fragments)
def test_what_can_be_written_is_read_back(value: str) -> None:
    call = Call("edit", {"path": "a.py", "text": value})
    try:
        text = XML.render(call)
    except ValueError:
        assume(False)
        return
    read = XML.parse(f"thought\n{text}").call
    assert read == Call("edit", call.arguments, text)


@settings(deadline=None)
@given(st.text())
def test_ordinary_text_can_always_be_written(value: str) -> None:
    assume("</parameter" not in value and "<function" not in value)
    call = Call("edit", {"path": value, "text": value})
    assert call_of(XML.render(call)).arguments == call.arguments


@pytest.mark.parametrize(
    "call",
    [
        Call("edit", {"text": "a</parameter>\n</function>"}),
        Call("edit it", {}),
        Call("edit", {"te xt": "a"}),
    ],
)
def test_what_the_syntax_cannot_hold_is_not_written(call: Call) -> None:
    with pytest.raises(ValueError, match="cannot be written in this syntax"):
        XML.render(call)


@settings(max_examples=300, deadline=None)
@given(fragments)
def test_any_text_gives_a_call_or_an_error(text: str) -> None:
    turn = XML.parse(text)
    if turn.call is None:
        assert turn.error is not None
        return
    assert XML.stop(text)
    assert turn.call.raw in text
    before, _, _ = text.partition(turn.call.raw)
    assert before.count("<think>") <= before.count("</think>")


def test_long_values_are_read_in_good_time() -> None:
    value = "</parameter>\n<function=view>\n</function>\n    x = 1\n" * 20_000
    assert call_of(edit(value)).arguments["text"] == value.removesuffix("\n")
