"""`view`, `search`, `run` and the code shown with an issue, in a real sandbox."""

from __future__ import annotations

import pytest
from toolbox import call

from agent.tools import ToolError, Workspace
from agent.tools.context import issue_code
from agent.tools.definitions import definitions
from agent.tools.names import names_in
from agent.tools.run import run
from agent.tools.run import test as run_tests
from agent.tools.search import search
from agent.tools.text import SourceText
from agent.tools.view import view

KETTLE = b'''\
"""Kettles."""

import re

BOILING = 100
UNUSED = 7


class Kettle:
    """Boils.

    Long words about kettles that nobody needs to read to correct the code.
    """

    _PATTERN = re.compile(
        "[0-9]+"
    )

    def __init__(self, size):
        self.size = size

    def boil(self, degrees):
        """Heat up.

        Long words.
        """
        return _heat(degrees) >= BOILING

    def label(self):
        return self._PATTERN.sub("", "kettle")


def _heat(degrees):
    return degrees * 2


def unrelated(a, b):
    return a + b
'''


@pytest.fixture
def kitchen(workspace: Workspace) -> Workspace:
    workspace.sandbox.write_file("kitchen/kettle.py", KETTLE)
    workspace.sandbox.write_file("kitchen/other.py", b"def spoon():\n    return 1\n")
    workspace.sandbox.write_file("tests/test_kettle.py", b"def boil():\n    pass\n")
    workspace.test_paths = ("tests",)
    return workspace


def test_a_range_is_shown_with_its_numbers(kitchen: Workspace) -> None:
    text = call(view, kitchen, path="kitchen/kettle.py", start="33", end="34").text
    assert text.endswith("33|def _heat(degrees):\n34|    return degrees * 2")
    assert "lines 33 to 34 of 38" in text


def test_a_long_file_is_shown_as_an_outline(kitchen: Workspace) -> None:
    kitchen.view_lines = 20
    text = call(view, kitchen, path="kitchen/kettle.py").text
    assert "9-30|class Kettle:" in text
    assert "22-27|  def boil(self, degrees):" in text
    assert "33-34|def _heat(degrees):" in text


def test_a_range_is_never_longer_than_the_limit(kitchen: Workspace) -> None:
    kitchen.view_lines = 5
    text = call(view, kitchen, path="kitchen/kettle.py", start="1", end="40").text
    assert text.count("\n") == 5


def test_a_folder_is_listed(kitchen: Workspace) -> None:
    text = call(view, kitchen, path=".").text
    assert text.split("\n")[1:] == [
        "kitchen", "kitchen/kettle.py", "kitchen/other.py", "tests", "tests/test_kettle.py",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "kitchen/none.py"}, r"none\.py"),
        ({"path": "kitchen/kettle.py", "start": "99"}, "has 38 lines"),
        ({"path": "kitchen/kettle.py", "start": "9", "end": "3"}, "before start"),
        ({"path": " "}, "path is missing"),
    ],
)
def test_what_cannot_be_shown_is_said(
    kitchen: Workspace, arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(ToolError, match=message):
        call(view, kitchen, **arguments)


def test_search_takes_text_not_patterns(kitchen: Workspace) -> None:
    text = call(search, kitchen, text="re.compile(", path="kitchen").text
    assert text == "kitchen/kettle.py:15:    _PATTERN = re.compile("
    assert "nowhere" in call(search, kitchen, text="re.comp.*").text
    assert call(search, kitchen, text="-e", path="kitchen/other.py").text.startswith(
        "'-e' is nowhere"
    )


def test_a_command_shows_exit_code_and_output(kitchen: Workspace) -> None:
    shown = call(run, kitchen, command="echo out; echo err >&2; exit 4")
    assert shown.text == "(exit code 4)\nout\nerr"
    assert shown.changed


def test_a_command_that_takes_too_long_is_stopped(kitchen: Workspace) -> None:
    kitchen.command_timeout = 0.5
    text = call(run, kitchen, command="echo early; sleep 60").text
    assert "stopped after" in text
    assert "early" in text


def test_no_command_runs_past_the_end_of_the_run(kitchen: Workspace) -> None:
    kitchen.clock, kitchen.deadline = (lambda: 100.0), 100.5
    text = call(run, kitchen, command="sleep 60").text
    assert "stopped after 1 s" in text


def test_the_tests_are_run_by_the_projects_command(kitchen: Workspace) -> None:
    with pytest.raises(ToolError, match="no test command"):
        call(run_tests, kitchen)
    kitchen.test_command = "echo 3 passed"
    assert call(run_tests, kitchen).text == "(exit code 0)\n3 passed"


# The code an issue is about


def test_identifiers_are_told_from_words() -> None:
    names = names_in("Kettle.boil() fails: `label` and a_name, see HTTP and RFC. It boils over.")
    assert set(names.code) == {"Kettle.boil", "label", "a_name"}
    assert "boils" in names.plain
    assert "HTTP" in names.plain


def test_the_named_function_is_shown_with_what_it_uses(kitchen: Workspace) -> None:
    code = issue_code(kitchen, "Kettle.boil(50) is False, it should be True", max_chars=5_000).text
    assert code.startswith("kitchen/kettle.py (38 lines):\n")
    lines = code.split("\n")
    assert "5|BOILING = 100" in lines
    assert "9|class Kettle:" in lines
    assert "22|    def boil(self, degrees):" in lines
    assert "27|        return _heat(degrees) >= BOILING" in lines
    assert "33|def _heat(degrees):" in lines
    assert not any("Long words" in line for line in lines)
    assert not any("unrelated" in line or "UNUSED" in line for line in lines)
    assert "test_kettle" not in code


def test_the_functions_shown_are_known_by_name(kitchen: Workspace) -> None:
    shown = issue_code(kitchen, "Kettle.boil(50) is False", max_chars=5_000).shown
    assert ("kitchen/kettle.py", "Kettle.boil") in shown
    assert ("kitchen/kettle.py", "unrelated") not in shown


def test_every_line_shown_is_the_line_of_that_number(kitchen: Workspace) -> None:
    code = issue_code(kitchen, "`Kettle.label` keeps _PATTERN", max_chars=5_000).text
    source = KETTLE.decode().split("\n")
    shown = [line.split("|", 1) for line in code.split("\n")[1:] if line != "..."]
    assert shown
    for number, text in shown:
        assert source[int(number) - 1] == text
    assert ["16", '        "[0-9]+"'] in shown  # a binding of several lines, whole


def test_the_size_is_kept(kitchen: Workspace) -> None:
    many = "\n".join(f"def boil_{n}(x):\n    return x + {n}\n" for n in range(400))
    kitchen.sandbox.write_file("kitchen/many.py", many.encode())
    names = " ".join(f"boil_{n}()" for n in range(400))
    code = issue_code(kitchen, names, max_chars=1_000).text
    assert 500 < len(code) < 1_800


def test_without_python_what_the_issue_names_is_shown(workspace: Workspace) -> None:
    workspace.sandbox.write_file("main.go", b"func boil() {}\n")
    code = issue_code(workspace, "boil() fails", max_chars=5_000)
    assert code.text == "main.go (1 lines):\n1|func boil() {}"
    assert code.shown == ()
    assert issue_code(workspace, "", max_chars=5_000).text == ""


def test_files_that_do_not_parse_are_left_out(kitchen: Workspace) -> None:
    kitchen.sandbox.write_file("kitchen/old.py", b"def boil():\n    print 'x'\n")
    code = issue_code(kitchen, "Kettle.boil()", max_chars=5_000).text
    assert "old.py" not in code
    assert "kettle.py" in code


def test_definitions_know_their_lines() -> None:
    text = (
        b"import a\n\n@a.b\n@c\nclass K:\n    async def f(self):\n        '''Doc.'''\n        g()\n"
    )
    found = {item.name: item for item in definitions("p/q.py", SourceText.decode(text))}
    assert (found["K"].start, found["K"].header, found["K"].end) == (3, 5, 8)
    assert found["K.f"].docstring == (7, 7)
    assert found["K.f"].calls == ("g",)
    assert found["K.f"].answers_to("q.K.f")
    assert not found["K.f"].answers_to("f.K")
