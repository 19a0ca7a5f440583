"""`replace_function` in a real sandbox."""

from __future__ import annotations

import pytest
from toolbox import call

from agent.tools import ToolError, Workspace
from agent.tools.replace_function import replace_function

MODULE = b'''\
"""Things."""

import os


def plain(x):
    """Give x.

    Twice.
    """
    return x


class Box:
    size = 1

    @property
    @staticmethod
    def width():
        """The width."""
        return 1

    async def load(self, path):
        async with open_(path) as file:
            return await file.read()

    class Lid:
        def shut(self):
            return False


class Other:
    def shut(self):
        return None
'''


@pytest.fixture
def box(workspace: Workspace) -> Workspace:
    workspace.sandbox.write_file("pkg/box.py", MODULE)
    return workspace


def content(workspace: Workspace, path: str = "pkg/box.py") -> bytes:
    return workspace.sandbox.read_file(path)


def test_the_docstring_is_kept_when_the_new_code_has_none(box: Workspace) -> None:
    shown = call(
        replace_function,
        box,
        path="pkg/box.py",
        name="plain",
        text="def plain(x):\n    return 2 * x",
    )
    assert content(box) == MODULE.replace(b"    return x\n", b"    return 2 * x\n")
    assert shown.changed
    assert "|    return 2 * x" in shown.text


def test_a_new_docstring_replaces_the_old(box: Workspace) -> None:
    text = 'def plain(x):\n    """New."""\n    return x'
    call(replace_function, box, path="pkg/box.py", name="plain", text=text)
    assert content(box) == MODULE.replace(b'"""Give x.\n\n    Twice.\n    """', b'"""New."""')


@pytest.mark.parametrize(
    "text",
    [
        "def width():\n    return 2",
        "    def width():\n        return 2",
        "def width():\n        return 2",
        "class Box:\n    def width():\n        return 2",
        "```python\ndef width():\n    return 2\n```",
        "10|    def width():\n11|        return 2",
    ],
)
def test_decorators_and_docstring_of_a_method_are_kept(box: Workspace, text: str) -> None:
    call(replace_function, box, path="pkg/box.py", name="Box.width", text=text)
    assert content(box) == MODULE.replace(b"        return 1\n", b"        return 2\n")


def test_new_decorators_replace_the_old(box: Workspace) -> None:
    text = "@staticmethod\ndef width():\n    return 1"
    call(replace_function, box, path="pkg/box.py", name="width", text=text)
    assert content(box) == MODULE.replace(b"    @property\n", b"")


def test_an_async_method(box: Workspace) -> None:
    text = "async def load(self, path):\n    return await read(path)"
    call(replace_function, box, path="pkg/box.py", name="Box.load", text=text)
    assert b"    async def load(self, path):\n        return await read(path)\n\n" in content(box)
    assert b"async with" not in content(box)


def test_the_name_alone_is_enough_where_it_is_the_only_one(box: Workspace) -> None:
    call(replace_function, box, name="plain", text="def plain(x):\n    return -x")
    assert b"return -x" in content(box)


def test_a_nested_method_is_found_by_its_class(box: Workspace) -> None:
    text = "def shut(self):\n    return True"
    call(replace_function, box, path="pkg/box.py", name="Lid.shut", text=text)
    assert content(box) == MODULE.replace(b"return False", b"return True")


def test_a_name_with_several_meanings_is_refused_with_all_of_them(box: Workspace) -> None:
    with pytest.raises(ToolError) as refused:
        call(
            replace_function, box, path="pkg/box.py", name="shut", text="def shut(self):\n    pass"
        )
    assert "Box.Lid.shut" in str(refused.value)
    assert "Other.shut" in str(refused.value)
    assert content(box) == MODULE


def test_a_wrong_class_before_a_name_that_is_there_once_is_forgiven(box: Workspace) -> None:
    text = "def plain(x):\n    return -x"
    call(replace_function, box, path="pkg/box.py", name="Box.plain", text=text)
    assert b"return -x" in content(box)


def test_imports_written_above_go_to_the_imports(box: Workspace) -> None:
    text = "import math\nimport os\n\ndef plain(x):\n    return math.floor(x)"
    call(replace_function, box, path="pkg/box.py", name="plain", text=text)
    assert content(box) == MODULE.replace(b"import os\n", b"import os\nimport math\n").replace(
        b"    return x\n", b"    return math.floor(x)\n"
    )


def test_a_long_function_is_refused_with_its_lines(box: Workspace) -> None:
    body = "".join(f"    x += {number}\n" for number in range(80))
    box.sandbox.write_file("pkg/long.py", f"def long(x):\n{body}    return x\n".encode())
    with pytest.raises(ToolError, match=r"Use edit on the lines.*1 to 82"):
        call(replace_function, box, name="long", text="def long(x):\n    return x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(x):\n    return x", "holds other"),
        ("return x", "no function"),
        ("def plain(x):\n    return (x", "never closed"),
        ("def plain(x):\n    return x\n\nprint(plain(1))", "and other statements"),
        ("def plain(x):\n    # ... existing code\n    return x", "in full"),
        ("   ", "text is missing"),
    ],
)
def test_other_texts_are_refused(box: Workspace, text: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        call(replace_function, box, path="pkg/box.py", name="plain", text=text)
    assert content(box) == MODULE


def test_what_does_not_exist_is_named(box: Workspace) -> None:
    with pytest.raises(ToolError, match="no function 'nothing'"):
        call(replace_function, box, name="nothing", text="def nothing():\n    pass")


def test_crlf_tabs_and_a_missing_final_newline(box: Workspace) -> None:
    box.sandbox.write_file(
        "pkg/dos.py", b'class A:\r\n\tdef f(self):\r\n\t\t"""Doc."""\r\n\t\treturn 1'
    )
    text = "def f(self):\n    if self:\n        return 2\n    return 3"
    call(replace_function, box, path="pkg/dos.py", name="A.f", text=text)
    assert content(box, "pkg/dos.py") == (
        b'class A:\r\n\tdef f(self):\r\n\t\t"""Doc."""\r\n'
        b"\t\tif self:\r\n\t\t\treturn 2\r\n\t\treturn 3"
    )


def test_a_class_takes_the_methods_that_are_given(box: Workspace) -> None:
    text = (
        "class Box(object):\n    size = 5\n\n"
        "    def width():\n        return 9\n\n"
        "    async def load(self, path):\n        async with open_(path) as file:\n"
        "            return await file.read()\n\n"
        "    def depth(self):\n        return 3\n"
    )
    call(replace_function, box, path="pkg/box.py", name="Box", text=text)
    assert content(box) == MODULE.replace(b"        return 1\n", b"        return 9\n").replace(
        b"            return False\n",
        b"            return False\n\n    def depth(self):\n        return 3\n",
    )


def test_a_class_whose_methods_are_all_the_same_is_no_change(box: Workspace) -> None:
    with pytest.raises(ToolError, match="Nothing was changed"):
        call(
            replace_function, box, name="Box", text="class Box:\n    def width():\n        return 1"
        )
    with pytest.raises(ToolError, match="is a class"):
        call(replace_function, box, name="Box", text="class Box:\n    size = 2")


def test_a_path_that_is_not_there_counts_for_nothing(box: Workspace) -> None:
    text = "def plain(x):\n    return -x"
    call(replace_function, box, path="other/box.py", name="plain", text=text)
    assert b"return -x" in content(box)
