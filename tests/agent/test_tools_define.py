"""`define` in a real sandbox: code replaced by name, everything else left as it was."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toolbox import call

from agent.tools import ToolError, Workspace
from agent.tools.define import define

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


def written(workspace: Workspace, text: str, path: str = "") -> str:
    """What the tool shows, for a text."""
    return call(define, workspace, text=text, **({"path": path} if path else {})).text


def test_the_docstring_is_kept_when_the_new_code_has_none(box: Workspace) -> None:
    shown = written(box, "def plain(x):\n    return 2 * x")
    assert content(box) == MODULE.replace(b"    return x\n", b"    return 2 * x\n")
    assert shown == 'pkg/box.py changed:\n...\n     """\n-    return x\n+    return 2 * x\n '


def test_a_new_docstring_replaces_the_old(box: Workspace) -> None:
    written(box, 'def plain(x):\n    """New."""\n    return x + 1')
    assert content(box) == MODULE.replace(
        b'"""Give x.\n\n    Twice.\n    """\n    return x', b'"""New."""\n    return x + 1'
    )


@pytest.mark.parametrize(
    "text",
    [
        "def width():\n    return 2",
        "    def width():\n        return 2",
        "def width():\n        return 2",
        "class Box:\n    def width():\n        return 2",
        "class Box(B):\n    size = 1\n\n    def width():\n        return 2\n\n    # the rest stays",
        "class Box:\n    ...\n    def width():\n        return 2\n    ...",
        "```python\ndef width():\n    return 2\n```",
        "23|    def width():\n24|        return 2",
        "# pkg/box.py\ndef width():\n    return 2",
        "@property\n@staticmethod\ndef width():\n    return 2",
    ],
)
def test_decorators_and_docstring_of_a_method_are_kept(box: Workspace, text: str) -> None:
    written(box, text)
    assert content(box) == MODULE.replace(b"        return 1\n", b"        return 2\n")


def test_new_decorators_replace_the_old(box: Workspace) -> None:
    written(box, "@staticmethod\ndef width():\n    return 7")
    assert content(box) == MODULE.replace(b"    @property\n", b"").replace(b"return 1", b"return 7")


def test_an_async_method(box: Workspace) -> None:
    written(box, "async def load(self, path):\n    return await read(path)")
    assert b"    async def load(self, path):\n        return await read(path)\n\n" in content(box)
    assert b"async with" not in content(box)


def test_a_nested_class_is_found(box: Workspace) -> None:
    written(box, "class Lid:\n    def shut(self):\n        return True")
    assert content(box) == MODULE.replace(b"return False", b"return True")


def test_an_excerpt_of_a_class_leaves_its_other_members(box: Workspace) -> None:
    text = (
        "class Box(object):\n    size = 5\n\n"
        "    def width():\n        return 9\n\n"
        "    async def load(self, path):\n        async with open_(path) as file:\n"
        "            return await file.read()\n\n"
        "    def depth(self):\n        return 3\n"
    )
    written(box, text)
    assert content(box) == MODULE.replace(b"        return 1\n", b"        return 9\n").replace(
        b"    size = 1\n", b"    size = 5\n"
    ).replace(
        b"            return False\n",
        b"            return False\n\n    def depth(self):\n        return 3\n",
    )


def test_several_functions_at_once(box: Workspace) -> None:
    written(box, "def plain(x):\n    return 5\n\ndef width():\n    return 6")
    assert content(box) == MODULE.replace(b"    return x\n", b"    return 5\n").replace(
        b"        return 1\n", b"        return 6\n"
    )


def test_a_name_with_several_meanings_goes_to_the_most_similar(box: Workspace) -> None:
    written(box, "def shut(self):\n    if not self.open:\n        return None\n    return None")
    assert content(box) == MODULE.replace(
        b"        return None\n",
        b"        if not self.open:\n            return None\n        return None\n",
    )


def test_a_name_shown_with_the_issue_comes_before_similarity(box: Workspace) -> None:
    box.shown = (("pkg/box.py", "Box.Lid.shut"),)
    written(box, "def shut(self):\n    return None")
    assert content(box) == MODULE.replace(b"return False", b"return None")


def test_a_tie_is_refused_with_all_that_could_be_meant(box: Workspace) -> None:
    method = b"    def f(self):\n        return 1\n"
    text = b"class A:\n" + method + b"\nclass B:\n" + method
    box.sandbox.write_file("pkg/twins.py", text)
    with pytest.raises(ToolError) as refused:
        written(box, "def f(self):\n    return 2")
    assert "A.f (pkg/twins.py line 2), B.f (pkg/twins.py line 6)" in str(refused.value)
    assert content(box, "pkg/twins.py") == text
    written(box, "class B:\n    def f(self):\n        return 2")
    assert content(box, "pkg/twins.py") == text[:-2] + b"2\n"


def test_a_path_limits_the_search(box: Workspace) -> None:
    box.sandbox.write_file("pkg/other.py", b"def plain(x):\n    return x\n")
    written(box, "def plain(x):\n    return -x", path="pkg/other.py")
    assert content(box, "pkg/other.py") == b"def plain(x):\n    return -x\n"
    written(box, "# box.py\ndef plain(x):\n    return +x")
    assert content(box) == MODULE.replace(b"    return x\n", b"    return +x\n")


def test_property_and_setter_are_told_apart(box: Workspace) -> None:
    text = b"""\
class P:
    @property
    def v(self):
        return self._v

    @v.setter
    def v(self, value):
        self._v = value
"""
    box.sandbox.write_file("pkg/p.py", text)
    written(
        box, "def v(self, value):\n    if value < 0:\n        raise ValueError\n    self._v = value"
    )
    assert content(box, "pkg/p.py") == text.replace(
        b"        self._v = value\n",
        b"        if value < 0:\n            raise ValueError\n        self._v = value\n",
    )


def test_assignments_are_replaced_where_they_stand(box: Workspace) -> None:
    text = (
        b"import re\n\nclass A:\n    RE = re.compile(\n        'a'\n    )\n\n"
        b"    def f(self):\n        return 1\n"
    )
    box.sandbox.write_file("pkg/a.py", text)
    box.shown = (("pkg/a.py", "A.f"),)
    written(box, "class A:\n    RE = re.compile('b$')")
    assert content(box, "pkg/a.py") == text.replace(
        b"    RE = re.compile(\n        'a'\n    )\n", b"    RE = re.compile('b$')\n"
    )
    written(box, "RE = re.compile('c')")
    assert b"    RE = re.compile('c')\n" in content(box, "pkg/a.py")


def test_a_new_helper_goes_above_what_calls_it(box: Workspace) -> None:
    written(box, "def helper(x):\n    return x\n\ndef plain(x):\n    return helper(x)")
    assert content(box) == MODULE.replace(
        b"def plain(x):", b"def helper(x):\n    return x\n\n\ndef plain(x):"
    ).replace(b'    """\n    return x\n', b'    """\n    return helper(x)\n')


def test_a_file_that_cannot_be_parsed_is_said_to_be_one(workspace: Workspace) -> None:
    workspace.sandbox.write_file("old.py", b"def f():\n    print 'x'\n")
    with pytest.raises(ToolError, match="cannot be parsed: change its lines"):
        written(workspace, "def f():\n    return 1", "old.py")


def test_examples_of_use_are_left_out(box: Workspace) -> None:
    written(box, "def plain(x):\n    return 5\n\nresult = plain(1)\nprint(result)")
    assert content(box) == MODULE.replace(b"    return x\n", b"    return 5\n")


def test_imports_written_above_go_to_the_imports(box: Workspace) -> None:
    written(box, "import math\nimport os\n\ndef plain(x):\n    return math.floor(x)")
    assert content(box) == MODULE.replace(b"import os\n", b"import os\nimport math\n").replace(
        b"    return x\n", b"    return math.floor(x)\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(x):\n    return x", "there is no function other"),
        ("class Box:\n    x.y = 1", "holds no function"),
        ("return x", "no valid Python|holds no function"),
        ("def plain(x):\n    return (x", "never closed"),
        ("def plain(x):\n    # ... existing code\n    return -x", "in full"),
        ("def plain(x):\n    # a comment\n    return x", "reads exactly like this"),
        ("   ", "text is missing"),
        ("def plain(x):\n    return -x\n\nclass None_:\n    def f(self):\n        pass", "None_.f"),
    ],
)
def test_other_texts_are_refused(box: Workspace, text: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        written(box, text)
    assert content(box) == MODULE


def test_what_is_there_is_named_where_nothing_fits(box: Workspace) -> None:
    box.shown = (("pkg/box.py", "Box.width"), ("pkg/box.py", "plain"))
    with pytest.raises(ToolError, match=r"The code above has: Box\.width, plain"):
        written(box, "def nothing():\n    pass")


def test_crlf_tabs_and_a_missing_final_newline(box: Workspace) -> None:
    box.sandbox.write_file(
        "pkg/dos.py", b'class A:\r\n\tdef f(self):\r\n\t\t"""Doc."""\r\n\t\treturn 1'
    )
    written(box, "def f(self):\n    if self:\n        return 2\n    return 3")
    assert content(box, "pkg/dos.py") == (
        b'class A:\r\n\tdef f(self):\r\n\t\t"""Doc."""\r\n'
        b"\t\tif self:\r\n\t\t\treturn 2\r\n\t\treturn 3"
    )


NAMES = st.sampled_from(["alpha", "beta", "gamma"])


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.dictionaries(NAMES, st.integers(0, 9), min_size=1),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["    ", "\t"]),
)
def test_only_the_functions_written_change(
    box: Workspace, new: dict[str, int], depth: int, in_class: bool, unit: str
) -> None:
    outer, inner = (unit, unit * 2) if in_class else ("", unit)
    old = "".join(
        f"{outer}def {name}(a):\n{inner}return {n + 10}\n\n"
        for n, name in enumerate(["alpha", "beta", "gamma"])
    )
    source = f"X = 1\n\nclass C:\n{old}Y = 2\n" if in_class else f"X = 1\n\n{old}Y = 2\n"
    box.sandbox.write_file("pkg/g.py", source.encode())
    text = "".join(
        f"{'    ' * depth}def {name}(a):\n{'    ' * (depth + 1)}return {value}\n"
        for name, value in new.items()
    )
    written(box, text, path="pkg/g.py")
    # The oracle rewrites line by line, knowing the layout it made.
    expected = source.split("\n")
    for name, value in new.items():
        at = next(i for i, line in enumerate(expected) if f"def {name}(" in line)
        expected[at + 1] = expected[at + 1].split("return")[0] + f"return {value}"
    assert content(box, "pkg/g.py").decode().split("\n") == expected
