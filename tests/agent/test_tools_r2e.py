"""The tools of the `r2e` set, word for word as a model sees them."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from toolbox import call

from agent.tools import ToolError, Workspace
from agent.tools.execute_bash import execute_bash
from agent.tools.file_editor import create, file_editor, str_replace
from agent.tools.search_counts import search_counts

SHOP = b'''\
"""Prices."""

RATE = 0.2


class Basket:
    """What is bought."""

    def __init__(self, prices):
        self.prices = list(prices)

    @property
    def total(self):
        amount = 0
        for price in self.prices:
            amount += price
        return amount

    def tax(self): return self.total * RATE
'''


@pytest.fixture
def shop(workspace: Workspace) -> Workspace:
    workspace.observation_chars, workspace.view_lines = 10_000, 110
    workspace.sandbox.write_file("shop/basket.py", SHOP)
    workspace.sandbox.write_file("shop/lib/deep/far.txt", b"far\n")
    workspace.sandbox.write_file("Makefile", b"all:\n\techo done\n")
    workspace.sandbox.write_file(".hidden/x", b"x\n")
    return workspace


def edited(workspace: Workspace, command: str, path: str = "shop/basket.py", **more: str) -> str:
    return call(file_editor, workspace, command=command, path=path, **more).text


def refused(workspace: Workspace, command: str, path: str = "shop/basket.py", **more: str) -> str:
    with pytest.raises(ToolError) as caught:
        edited(workspace, command, path, **more)
    return str(caught.value)


def content(workspace: Workspace, path: str = "shop/basket.py") -> bytes:
    return workspace.sandbox.read_file(path)


# view


def test_a_folder_is_shown_two_levels_deep(shop: Workspace) -> None:
    assert edited(shop, "view", ".") == ".:\nMakefile\nshop\nshop/basket.py\nshop/lib"
    assert edited(shop, "view", f"{shop.sandbox.workdir}/shop") == (
        "shop:\nshop/basket.py\nshop/lib\nshop/lib/deep"
    )
    assert "which has no lines" in refused(shop, "view", "shop", view_range="[1, 2]")


def test_a_short_file_is_shown_whole_and_a_range_as_asked(shop: Workspace) -> None:
    assert edited(shop, "view", "Makefile") == (
        "Makefile, lines 1 to 2 of 2:\n     1\tall:\n     2\t\techo done"
    )
    expected = "shop/basket.py, lines 9 to 10 of 19:\n     9\t    def __init__(self, prices):\n"
    expected += "    10\t        self.prices = list(prices)"
    for written in ("[9, 10]", "9, 10", "9 10", "(9,10)"):
        assert edited(shop, "view", view_range=written) == expected
    assert edited(shop, "view", view_range="[19, -1]") == (
        "shop/basket.py, lines 19 to 19 of 19:\n    19\t    def tax(self): return self.total * RATE"
    )
    assert edited(shop, "view", view_range="[19, 400]").startswith("shop/basket.py, lines 19 to 19")
    shop.sandbox.write_file("empty.py", b"")
    assert edited(shop, "view", "empty.py") == "empty.py is empty."


@pytest.mark.parametrize("written", ["[0, 3]", "[9, 3]", "[20, 21]", "[3, -2]"])
def test_a_range_that_does_not_fit_is_refused(shop: Workspace, written: str) -> None:
    assert "has 19 lines" in refused(shop, "view", view_range=written)


@pytest.mark.parametrize("written", ["[1]", "[1, 2, 3]", "one two", "[1.5, 2]", "[1, 2"])
def test_a_range_that_is_none(shop: Workspace, written: str) -> None:
    if written == "[1, 2":  # nothing else can be meant
        assert edited(shop, "view", view_range=written)
    else:
        assert "must be 2 whole numbers" in refused(shop, "view", view_range=written)


def test_a_long_python_file_seen_whole_is_a_skeleton(shop: Workspace) -> None:
    shop.view_lines = 18
    expected = """\
shop/basket.py has 19 lines. Bodies of functions are left out:
     1\t\"\"\"Prices.\"\"\"
     2\t
     3\tRATE = 0.2
     4\t
     5\t
     6\tclass Basket:
     7\t    \"\"\"What is bought.\"\"\"
     8\t
     9\t    def __init__(self, prices):
    10\t        self.prices = list(prices)
    11\t
    12\t    @property
    13\t    def total(self):
      \t... lines 14 to 17 ...
    18\t
    19\t    def tax(self): return self.total * RATE"""
    assert edited(shop, "view") == expected
    assert edited(shop, "view", concise="false").count("\n") == 19
    assert edited(shop, "view", view_range="[1, 19]").count("\n") == 19
    shop.view_lines = 110
    assert edited(shop, "view").count("\n") == 19
    assert edited(shop, "view", concise="True") == expected
    shop.view_lines = 18
    shop.sandbox.write_file("old.py", SHOP + b"print 'python 2'\n")
    assert edited(shop, "view", "old.py").count("\n") == 20  # it does not parse
    shop.sandbox.write_file("notes.txt", SHOP)
    assert edited(shop, "view", "notes.txt").count("\n") == 19


def test_what_is_too_long_is_clipped_and_says_so(shop: Workspace) -> None:
    shop.sandbox.write_file("long.txt", b"".join(b"line %d\n" % n for n in range(2000)))
    text = edited(shop, "view", "long.txt")
    assert len(text) < 10_200
    shown, note = text.rsplit("\n", 1)
    assert note.startswith("[clipped: ")
    assert shown.splitlines()[-1].split("\t")[1].startswith("line ")
    shop.sandbox.write_file("wide.txt", b"x" * 50_000)
    assert len(edited(shop, "view", "wide.txt")) < 10_200


def test_what_cannot_be_shown(shop: Workspace) -> None:
    shop.sandbox.write_file("blob", b"\0\1")
    assert "not a text file" in refused(shop, "view", "blob")
    assert refused(shop, "view", "basket.py") == (
        "There is no basket.py. Did you mean shop/basket.py?"
    )
    assert refused(shop, "view", "none.py") == "There is no none.py."
    assert refused(shop, "view", " ") == "path is missing."
    assert refused(shop, "open") == (
        "There is no command 'open'. The commands: view, create, str_replace, insert, undo_edit."
    )
    assert refused(shop, "insert", new_str="x") == "insert needs the parameter insert_line."
    assert refused(shop, "create", "new.py") == "create needs the parameter file_text."


# create, str_replace, insert


def test_create(shop: Workspace) -> None:
    found = call(file_editor, shop, command="create", path="a/b.py", file_text="x = 1\ny = 2")
    assert (found.text, found.changed) == ("a/b.py was created with 2 lines.", True)
    assert content(shop, "a/b.py") == b"x = 1\ny = 2\n"
    assert refused(shop, "create", file_text="") == (
        "shop/basket.py exists already. Change it with str_replace, or choose another name."
    )
    assert content(shop) == SHOP
    assert edited(shop, "create", "bad.py", file_text="def f(:\n").endswith(
        "Note: bad.py does not parse now: line 1, SyntaxError: invalid syntax."
    )
    assert edited(shop, "create", "empty/__init__.py", file_text="") == (
        "empty/__init__.py was created with 0 lines."
    )
    assert "cannot be written" in refused(shop, "create", "Makefile/x", file_text="x")


def test_str_replace_shows_four_lines_on_each_side(shop: Workspace) -> None:
    found = call(
        file_editor,
        shop,
        command="str_replace",
        path="shop/basket.py",
        old_str="        amount = 0\n        for price in self.prices:\n"
        "            amount += price\n        return amount",
        new_str="        return sum(self.prices)",
    )
    assert found.changed
    assert (
        found.text
        == """\
shop/basket.py was changed. Lines 10 to 16 are now:
    10\t        self.prices = list(prices)
    11\t
    12\t    @property
    13\t    def total(self):
    14\t        return sum(self.prices)
    15\t
    16\t    def tax(self): return self.total * RATE"""
    )
    assert b"        return sum(self.prices)\n\n    def tax" in content(shop)


def test_str_replace_within_a_line_and_to_nothing(shop: Workspace) -> None:
    edited(shop, "str_replace", old_str="RATE = 0.2", new_str="RATE = 0.25")
    assert content(shop) == SHOP.replace(b"0.2", b"0.25")
    edited(shop, "str_replace", old_str="\nRATE = 0.25\n")
    assert content(shop) == SHOP.replace(b"\nRATE = 0.2\n", b"")


def test_old_text_that_is_not_unique_or_not_there(shop: Workspace) -> None:
    assert refused(shop, "str_replace", old_str="self.prices", new_str="x") == (
        "Nothing was changed: old_str stands 2 times in shop/basket.py, from lines 10, 15 on. "
        "Take more of the lines around it, so that it is unique."
    )
    assert refused(shop, "str_replace", old_str="def total(self):\n    amount = 0", new_str="") == (
        "Nothing was changed: old_str is not in shop/basket.py as it is written, but lines 13 to "
        "14 differ from it by blanks only. They are:\n"
        "    13\t    def total(self):\n    14\t        amount = 0"
    )
    assert refused(shop, "str_replace", old_str="nowhere", new_str="x") == (
        "Nothing was changed: old_str is not in shop/basket.py. View the lines and copy them as "
        "they are, without their numbers."
    )
    assert "old_str is empty" in refused(shop, "str_replace", old_str="", new_str="x")
    assert "are equal" in refused(shop, "str_replace", old_str="RATE = 0.2", new_str="RATE = 0.2")
    assert content(shop) == SHOP
    assert shop.undo == {}


def test_a_change_that_breaks_the_file_is_told(shop: Workspace) -> None:
    text = edited(shop, "str_replace", old_str="RATE = 0.2", new_str="RATE = (0.2")
    assert text.splitlines()[-1].startswith("Note: shop/basket.py does not parse now: line ")
    again = edited(shop, "str_replace", old_str="RATE = (0.2", new_str="RATE = ((0.2")
    assert "does not parse" not in again  # nor did it before


def test_bytes_that_are_not_touched_stay(shop: Workspace) -> None:
    mixed = b"a = 1\r\nb = '\xe9'\r\n\x0cc = 3\nd = 4"
    shop.sandbox.write_file("mixed.txt", mixed)
    edited(shop, "str_replace", "mixed.txt", old_str="d = 4", new_str="d = 5")
    assert content(shop, "mixed.txt") == mixed.replace(b"4", b"5")
    shop.sandbox.write_file("dos.txt", b"a\r\nb\r\nc\r\n")
    edited(shop, "str_replace", "dos.txt", old_str="a\nb", new_str="x\ny\nz")
    assert content(shop, "dos.txt") == b"x\r\ny\r\nz\r\nc\r\n"
    edited(shop, "insert", "dos.txt", insert_line="1", new_str="new")
    assert content(shop, "dos.txt") == b"x\r\nnew\r\ny\r\nz\r\nc\r\n"


def test_insert(shop: Workspace) -> None:
    shop.sandbox.write_file("list.txt", b"one\ntwo")
    assert edited(shop, "insert", "list.txt", insert_line="1", new_str="    half\n") == (
        "list.txt was changed. Lines 1 to 3 are now:\n     1\tone\n     2\t    half\n     3\ttwo"
    )
    edited(shop, "insert", "list.txt", insert_line="0", new_str="zero\n\n")
    edited(shop, "insert", "list.txt", insert_line="5", new_str="end")
    assert content(shop, "list.txt") == b"zero\n\none\n    half\ntwo\nend"
    for wrong in ("7", "-1", "x", ""):
        assert "insert_line must be" in refused(
            shop, "insert", "list.txt", insert_line=wrong, new_str="x"
        )


def test_a_large_change_is_shown_by_its_ends(shop: Workspace) -> None:
    shop.sandbox.write_file("big.txt", b"start\nend\n")
    new = "\n".join(f"line {n}" for n in range(3000))
    text = edited(shop, "insert", "big.txt", insert_line="1", new_str=new)
    assert "[... 2882 lines left out ...]" in text
    assert "     2\tline 0" in text
    assert text.endswith("  3002\tend")
    assert len(text) < 10_200


# undo_edit


def test_edits_are_undone_newest_first(shop: Workspace) -> None:
    edited(shop, "str_replace", old_str="0.2", new_str="0.3")
    edited(shop, "insert", insert_line="0", new_str="# top")
    edited(shop, "create", "new.py", file_text="x")
    assert edited(shop, "undo_edit") == (
        "shop/basket.py is as it was before its last edit; it has 19 lines."
    )
    assert content(shop) == SHOP.replace(b"0.2", b"0.3")
    edited(shop, "undo_edit", f"{shop.sandbox.workdir}/shop/basket.py")
    assert content(shop) == SHOP
    assert refused(shop, "undo_edit") == "There is no edit of shop/basket.py to be undone."
    assert edited(shop, "undo_edit", "new.py") == (
        "new.py was removed: it had been created by the edit that is undone."
    )
    assert "There is no new.py" in refused(shop, "view", "new.py")


def test_undo_survives_in_another_process(shop: Workspace) -> None:
    odd = b"a = '\xff\xfe'\r\nb = 1"
    shop.sandbox.write_file("odd.txt", odd)
    edited(shop, "str_replace", "odd.txt", old_str="b = 1", new_str="b = 2")
    edited(shop, "create", "new.txt", file_text="x")
    saved = json.dumps({"undo": shop.undo, "shown": shop.shown})
    resumed = Workspace(shop.sandbox, undo=json.loads(saved)["undo"])
    edited(resumed, "undo_edit", "odd.txt")
    assert content(shop, "odd.txt") == odd
    edited(resumed, "undo_edit", "new.txt")
    assert shop.sandbox.run("test ! -e new.txt").exit_code == 0


def test_what_can_be_undone_is_bounded(shop: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(25):
        edited(shop, "str_replace", "Makefile", old_str="all:", new_str=f"all: {number}")
        edited(shop, "str_replace", "Makefile", old_str=f"all: {number}", new_str="all:")
    assert len(shop.undo["Makefile"]) == 20
    module = importlib.import_module("agent.tools.file_editor")  # its name is the tool's too
    monkeypatch.setattr(module, "_UNDO_CHARS", 3 * len(SHOP))
    for number in range(8):
        edited(shop, "insert", insert_line="0", new_str=f"# {number}")
    spent = sum(len(text or "") for texts in shop.undo.values() for text in texts)
    assert spent <= 3 * len(SHOP)
    edited(shop, "undo_edit")
    assert content(shop).startswith(b"# 6\n")


def test_two_of_the_commands_are_tools_of_their_own(shop: Workspace) -> None:
    call(create, shop, path="n.py", file_text="n = 1")
    call(str_replace, shop, path="n.py", old_str="1", new_str="2")
    assert content(shop, "n.py") == b"n = 2\n"


# execute_bash


def ran(workspace: Workspace, command: str, key: str = "command") -> Any:
    return call(execute_bash, workspace, **{key: command})


def test_both_outputs_are_shown_apart(shop: Workspace) -> None:
    found = ran(shop, "echo out; echo err >&2; echo more")
    assert found.text == "[STDOUT]\nout\nmore\n\n[STDERR]\nerr"
    assert (found.exit_code, found.changed) == (0, True)
    assert ran(shop, "true").text == "[STDOUT]\n\n\n[STDERR]"
    assert ran(shop, "ls -A /tmp").text == "[STDOUT]\n.stderr\n\n[STDERR]"
    assert shop.sandbox.run("ls -A /tmp").text == ""


def test_a_failure_is_said_first(shop: Workspace) -> None:
    found = ran(shop, "echo a\nfalse || { echo no >&2; exit 3; }\necho b", key="cmd")
    assert found.text == "The command failed: exit code 3.\n[STDOUT]\na\n\n[STDERR]\nno"
    assert found.exit_code == 3
    syntax = ran(shop, "for x in; do")
    assert syntax.exit_code != 0
    # what the shell itself says is an error like any other, and no file of ours is named
    assert "syntax error" in syntax.text.partition("[STDERR]")[2]
    assert "[STDOUT]\n\n" in syntax.text
    assert ".stderr" not in syntax.text


@pytest.mark.parametrize(
    ("command", "out"),
    [
        ("cat <<'EOF'\nit's \"quoted\" $x\nEOF", 'it\'s "quoted" $x'),
        ("# a comment\necho 1", "1"),
        ("(echo 1; echo 2 >&2) 2>&1", "1\n2"),
        ("cd shop && ls", "basket.py\nlib"),
        ("cat", ""),
        ("tty", "not a tty"),
        ("FOO=1 bash -c 'echo $FOO'", "1"),
    ],
)
def test_commands_are_run_as_they_are(shop: Workspace, command: str, out: str) -> None:
    assert ran(shop, command).text.endswith(f"[STDOUT]\n{out}\n\n[STDERR]".rstrip("\n"))


def test_long_outputs_keep_both_ends(shop: Workspace) -> None:
    text = ran(shop, "seq 1 200; seq 1001 1200 >&2").text
    out, err = text.split("\n\n[STDERR]\n")
    lines = out.splitlines()[1:]
    assert lines[:40] == [str(n) for n in range(1, 41)]
    assert lines[40] == "[... 120 lines left out ...]"
    assert lines[41:] == [str(n) for n in range(161, 201)]
    assert err.splitlines()[0] == "1001"
    assert err.splitlines()[-1] == "1200"
    assert len(err.splitlines()) == 81
    assert "left out" not in ran(shop, "seq 1 80").text


def test_one_huge_line_does_not_pass_whole(shop: Workspace) -> None:
    for where in ("", " >&2"):
        text = ran(shop, f"head -c 30000000 /dev/zero | tr '\\0' x{where}").text
        assert len(text) < 10_500
        assert "left out" in text


def test_time_is_limited_and_what_was_said_until_then_is_kept(shop: Workspace) -> None:
    shop.command_timeout = 1
    text = ran(shop, "echo begun; echo trouble >&2; sleep 60").text
    assert "stopped after 1 s, the time limit" in text.splitlines()[0]
    assert "[STDOUT]\nbegun\n\n[STDERR]\ntrouble" in text


@pytest.mark.parametrize(
    "command", ["ipython", "jupyter notebook", "nohup sleep 9 &", " ipython -c 1"]
)
def test_what_needs_a_terminal_is_refused(shop: Workspace, command: str) -> None:
    with pytest.raises(ToolError, match="is not run here"):
        ran(shop, command)


def test_exactly_one_command(shop: Workspace) -> None:
    for arguments in ({}, {"command": " "}, {"command": "a", "cmd": "b"}):
        with pytest.raises(ToolError, match="Give one command"):
            call(execute_bash, shop, **arguments)


# search


def test_counts_by_file(shop: Workspace) -> None:
    shop.sandbox.write_file("a b/notes.txt", b"price, price\nprice\n")
    shop.sandbox.write_file(".git/price", b"price\n")
    shop.sandbox.write_file("bin", b"price\0")
    assert call(search_counts, shop, search_term="price").text == (
        "Files in . that have 'price', with the number of lines that do:\n"
        "a b/notes.txt: 2\nshop/basket.py: 4"
    )
    assert call(search_counts, shop, search_term="price", path="shop").text == (
        "Files in shop that have 'price', with the number of lines that do:\nshop/basket.py: 4"
    )
    assert call(search_counts, shop, search_term="[a-z]+").text == "No file in . has '[a-z]+'."
    assert "Makefile: 1" in call(search_counts, shop, search_term="\techo").text


def test_lines_of_one_file(shop: Workspace) -> None:
    found = call(search_counts, shop, search_term="def t", path="/workspace/shop/basket.py")
    assert found.text == (
        "Lines of shop/basket.py that have 'def t':\n"
        "13:    def total(self):\n19:    def tax(self): return self.total * RATE"
    )
    assert call(search_counts, shop, search_term="-x", path="Makefile").text == (
        "No line of Makefile has '-x'."
    )
    with pytest.raises(ToolError, match="There is no file or folder none"):
        call(search_counts, shop, search_term="x", path="none")


def test_above_a_hundred_files_it_is_to_be_narrowed(shop: Workspace) -> None:
    shop.sandbox.run("mkdir many; for n in $(seq 100); do echo needle > many/$n; done")
    assert call(search_counts, shop, search_term="needle").text.count("\n") == 100
    shop.sandbox.write_file("one/more", b"needle\n")
    with pytest.raises(ToolError, match=r"in more than 100 files of \.\. Narrow"):
        call(search_counts, shop, search_term="needle")
    assert call(search_counts, shop, search_term="needle", path="one").text.endswith("one/more: 1")
