"""Code that goes with an issue in a tree that is not Python's."""

from __future__ import annotations

import re

import pytest

from agent.tools.context import issue_code
from agent.tools.workspace import Workspace
from environments import Sandbox

FILES = {
    "src/parse.c": """#include "parse.h"

/* parse_size reads a size */
static int
unit_of(char c)
{
    return c == 'k' ? 1024 : 1;
}

long parse_size(const char *text)
{
    char *end;
    long n = strtol(text, &end, 10);
    if (*end == '}') { return -1; }
    return n * unit_of(*end);
}

int main(void) { return parse_size("1k") != 1024; }
""",
    "src/parse.h": "long parse_size(const char *text);\n",
    "lib/label.js": """'use strict';
const padded = (text, width) => {
  return text.padEnd(width);
};
class Label {
  constructor(name) { this.name = name; }
  initials() {
    const parts = this.name.split(' ');
    return parts.map((p) => p[0]).join('');
  }
}
exports.shorten = function (text) {
  return text.slice(0, 10);
};
module.exports = { Label, padded };
""",
    "cmd/main.go": """package main

func (s *Server) Close() error {
\treturn s.x
}

func other() {}
""",
    "core/lib.rs": """pub fn take_all<T>(
    a: T,
) -> Vec<T> {
    vec![a]
}

fn rest() {}
""",
    "tool.sh": "greet() {\n  echo hi\n}\ngreet\n",
    "lib/thing.rb": """class Thing
  def upper_all(xs)
    xs.map(&:upcase)
  end

  def rest
  end
end
""",
    "node_modules/x/label.js": "function initials() {}\n",
    "node_modules/x/setup.py": "def initials():\n    pass\n\n\ndef padded():\n    pass\n",
    "test/label_test.js": "initials();\n",
    "docs.txt": "parse_size initials\n",
    "big.min.js": "function initials(){}\n",
}


@pytest.fixture
def workspace(one_sandbox: Sandbox) -> Workspace:
    for name, text in FILES.items():
        one_sandbox.write_file(name, text.encode())
    return Workspace(one_sandbox, test_paths=("test",))


CASES = {
    "a function of C": ("parse_size('3k') gives 3", "src/parse.c", (10, 16)),
    "an older style": ("`unit_of` is wrong for K", "src/parse.c", (4, 8)),
    "a method of JavaScript": ("Label.initials() throws", "lib/label.js", (7, 10)),
    "an arrow": ("`padded` pads too much", "lib/label.js", (2, 4)),
    "an export": ("shorten() cuts", "lib/label.js", (12, 14)),
    "a method of Go": ("Close() leaks", "cmd/main.go", (3, 5)),
    "Rust over lines": ("take_all(x) is slow", "core/lib.rs", (1, 5)),
    "a shell function": ("`greet` says hi", "tool.sh", (1, 3)),
    "Ruby, by indentation": ("upper_all([]) fails", "lib/thing.rb", (2, 4)),
    "a plain word": ("the initials of a name are wrong", "lib/label.js", (7, 10)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_definition_is_shown_whole(workspace: Workspace, name: str) -> None:
    issue, path, (start, end) = CASES[name]
    text = issue_code(workspace, issue, max_chars=2000).text
    first = text.partition("\n\n")[0].splitlines()
    lines = FILES[path].splitlines()
    assert first[0] == f"{path} ({len(lines)} lines):"
    numbers = [int(row.partition("|")[0]) for row in first[1:] if re.match("[0-9]", row)]
    wanted = list(range(start, end + 1))
    assert [number for number in numbers if number in wanted] == wanted
    assert all(
        row.partition("|")[2] == lines[int(row.partition("|")[0]) - 1]
        for row in first[1:]
        if row != "..."
    )
    assert len(numbers) <= len(wanted) + 3
    assert "node_modules" not in text
    assert "min.js" not in text
    assert "test/" not in text


def test_a_path_in_the_issue_is_shown_though_it_names_nothing(workspace: Workspace) -> None:
    text = issue_code(
        workspace, "Something in src/parse.h or thing.rb is off.", max_chars=3000
    ).text
    assert text.splitlines()[0].startswith(("src/parse.h", "lib/thing.rb"))
    assert "src/parse.h (1 lines):\n1|long parse_size" in text
    assert "lib/thing.rb (8 lines):\n1|class Thing" in text


def test_no_more_than_was_asked_for_and_nothing_for_nothing(workspace: Workspace) -> None:
    issue = (
        "parse_size(), unit_of(), Label.initials(), padded(), shorten() and take_all() are wrong"
    )
    for most in (100, 300, 1000):
        assert len(issue_code(workspace, issue, max_chars=most).text) <= most
    assert issue_code(workspace, issue, max_chars=0).text == ""
    assert issue_code(workspace, "It does not work", max_chars=1000).text == ""
