"""`edit` in a real sandbox: ranges, new files, mended indentation, refused syntax errors."""

from __future__ import annotations

import pytest
from toolbox import call

from agent.tools import ToolError, Workspace
from agent.tools.edit import edit

MODULE = b"""\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        if item is not None:
            self.items.append(item)
        return self

    def top(self):
        return self.items[0]
"""


@pytest.fixture
def stack(workspace: Workspace) -> Workspace:
    workspace.sandbox.write_file("pkg/stack.py", MODULE)
    return workspace


def content(workspace: Workspace, path: str = "pkg/stack.py") -> bytes:
    return workspace.sandbox.read_file(path)


@pytest.mark.parametrize("text", ["        return self.items[-1]", "return self.items[-1]"])
def test_a_line_is_replaced_at_its_indentation(stack: Workspace, text: str) -> None:
    shown = call(edit, stack, path="pkg/stack.py", start="11", end="11", text=text)
    assert content(stack) == MODULE.replace(b"items[0]", b"items[-1]")
    assert shown.changed
    assert "11|        return self.items[-1]" in shown.text
    assert "10|    def top(self):" in shown.text


def test_end_left_out_means_one_line(stack: Workspace) -> None:
    call(edit, stack, path="pkg/stack.py", start="11", text="        return self.items[-1]")
    assert content(stack) == MODULE.replace(b"items[0]", b"items[-1]")


def test_end_before_start_inserts(stack: Workspace) -> None:
    call(
        edit,
        stack,
        path="pkg/stack.py",
        start="11",
        end="10",
        text="if not self.items:\n    return None",
    )
    assert content(stack) == MODULE.replace(
        b"        return self.items[0]",
        b"        if not self.items:\n            return None\n        return self.items[0]",
    )


def test_an_empty_text_deletes(stack: Workspace) -> None:
    call(edit, stack, path="pkg/stack.py", start="8", end="8", text="")
    assert content(stack) == MODULE.replace(b"        return self\n", b"")


def test_only_the_first_line_lost_its_indentation(stack: Workspace) -> None:
    text = "if item is None:\n            raise ValueError(item)\n        self.items.append(item)"
    call(edit, stack, path="pkg/stack.py", start="6", end="7", text=text)
    assert content(stack) == MODULE.replace(
        b"        if item is not None:\n            self.items.append(item)\n",
        b"        if item is None:\n            raise ValueError(item)\n"
        b"        self.items.append(item)\n",
    )


def test_a_syntax_error_is_refused_with_its_line(stack: Workspace) -> None:
    with pytest.raises(ToolError) as refused:
        call(
            edit, stack, path="pkg/stack.py", start="6", end="6", text="        if item is not None"
        )
    message = str(refused.value)
    assert "Nothing was changed" in message
    assert "expected ':'" in message
    assert "6|        if item is not None\n" in message
    assert content(stack) == MODULE


def test_a_file_that_never_parsed_can_be_edited(workspace: Workspace) -> None:
    workspace.sandbox.write_file("old.py", b"print 'a'\nx = 1\n")
    call(edit, workspace, path="old.py", start="2", end="2", text="x = 2")
    assert content(workspace, "old.py") == b"print 'a'\nx = 2\n"


def test_any_language_is_edited_as_written(workspace: Workspace) -> None:
    workspace.sandbox.write_file("main.go", b"func main() {\n\tprintln(1)\n}\n")
    call(edit, workspace, path="main.go", start="2", end="2", text="\tprintln(2")
    assert content(workspace, "main.go") == b"func main() {\n\tprintln(2\n}\n"


def test_crlf_and_a_missing_final_newline_are_kept(workspace: Workspace) -> None:
    workspace.sandbox.write_file(
        "dos.py", b"def f():\r\n    return 1\r\n\r\ndef g():\r\n    return 2"
    )
    call(edit, workspace, path="dos.py", start="5", end="5", text="x = 3\nreturn x")
    assert content(workspace, "dos.py") == (
        b"def f():\r\n    return 1\r\n\r\ndef g():\r\n    x = 3\r\n    return x"
    )


def test_bytes_that_are_no_utf8_survive(workspace: Workspace) -> None:
    workspace.sandbox.write_file("l1.py", b"# -*- coding: latin-1 -*-\nx = '\xe9'\ny = 1\n")
    call(edit, workspace, path="l1.py", start="3", end="3", text="y = 2")
    assert content(workspace, "l1.py") == b"# -*- coding: latin-1 -*-\nx = '\xe9'\ny = 2\n"


def test_lines_around_the_range_that_were_repeated_are_not_doubled(stack: Workspace) -> None:
    text = "    def top(self):\n        return self.items[-1]"
    call(edit, stack, path="pkg/stack.py", start="11", end="11", text=text)
    assert content(stack) == MODULE.replace(b"items[0]", b"items[-1]")


def test_a_text_for_left_out_code_is_refused(stack: Workspace) -> None:
    text = "        # ... rest of the code\n        return self"
    with pytest.raises(ToolError, match="in full"):
        call(edit, stack, path="pkg/stack.py", start="6", end="8", text=text)
    assert content(stack) == MODULE


def test_an_ellipsis_that_was_there_may_stay(workspace: Workspace) -> None:
    workspace.sandbox.write_file("stub.py", b"def f():\n    ...\n")
    call(edit, workspace, path="stub.py", start="1", end="2", text="def f(x):\n    ...")
    assert content(workspace, "stub.py") == b"def f(x):\n    ...\n"


def test_a_new_file_is_made_and_an_old_one_not_overwritten(stack: Workspace) -> None:
    call(edit, stack, path="repro.py", text="import pkg\nprint(1)")
    assert content(stack, "repro.py") == b"import pkg\nprint(1)\n"
    with pytest.raises(ToolError, match="11 lines: give start and end"):
        call(edit, stack, path="pkg/stack.py", text="x = 1")


def test_absolute_and_quoted_paths_are_understood(stack: Workspace) -> None:
    path = f"`{stack.sandbox.workdir}/pkg/../pkg/stack.py`"
    call(edit, stack, path=path, start="11", end="11", text="return self.items[-1]")
    assert content(stack) == MODULE.replace(b"items[0]", b"items[-1]")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": "3", "end": "99", "text": "x"}, "11 lines"),
        ({"start": "5", "end": "3", "text": "x"}, "before start"),
        ({"start": "two", "text": "x"}, "must be a line number"),
        ({"start": "0", "end": "1", "text": "x"}, "must be a line number"),
        (
            {"start": "11", "end": "11", "text": "        return self.items[0]"},
            "equals what is there",
        ),
    ],
)
def test_calls_that_cannot_be_done_say_why(
    stack: Workspace, arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(ToolError, match=message):
        call(edit, stack, path="pkg/stack.py", **arguments)
    assert content(stack) == MODULE


def test_a_missing_file_and_a_folder_are_named(stack: Workspace) -> None:
    with pytest.raises(ToolError, match=r"nothing\.py"):
        call(edit, stack, path="nothing.py", start="1", text="x")
    with pytest.raises(ToolError, match="pkg"):
        call(edit, stack, path="pkg", start="1", text="x")


def test_200_kilobytes_are_written(workspace: Workspace) -> None:
    text = "\n".join(f"value_{number} = {'x' * 80!r}" for number in range(2_300))
    assert len(text) > 200_000
    shown = call(edit, workspace, path="big.py", text=text)
    assert content(workspace, "big.py").decode() == text + "\n"
    assert len(shown.text) < 500
    shown = call(edit, workspace, path="big.py", start="1", end="2300", text=text.replace("x", "y"))
    assert content(workspace, "big.py").decode() == text.replace("x", "y") + "\n"
    assert len(shown.text) < 6_000


def test_a_wrong_folder_is_mended_where_the_file_name_is_the_only_one(stack: Workspace) -> None:
    shown = call(edit, stack, path="src/stack.py", start="11", text="return self.items[-1]")
    assert content(stack) == MODULE.replace(b"items[0]", b"items[-1]")
    assert shown.text.startswith("pkg/stack.py now reads:")
    stack.sandbox.write_file("other/stack.py", b"x = 1\n")
    with pytest.raises(ToolError, match=r"src/stack\.py"):
        call(edit, stack, path="src/stack.py", start="11", text="return 1")


def test_a_range_in_one_word(stack: Workspace) -> None:
    call(edit, stack, path="pkg/stack.py", start="6-7", text="self.items.append(item)")
    assert b"if item" not in content(stack)
