"""Each tool set with a scripted model in a real sandbox: every tool, every malformed call of the
list in `reference/agents.md`, every way out. What the model reads is kept whole in `golden/`;
`GOLDEN=write` in the environment writes it anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripted import xml
from test_loop import FIXED, Rig, applied, rig

from agent.batch.item import config_digest
from agent.exits import ExitReason
from agent.prompts import make_dialect, offered_tools, tool_schemas
from agent.run_options import parse_options
from agent.settings import load_settings, tool_sets
from agent.tools import Workspace
from environments import Sandbox
from environments.base import ExecResult

__all__ = ["rig"]  # the fixture

GOLDEN = Path(__file__).parent / "golden"
OLD = "    return sum(prices) * (1 - discount)"
NEW = "    return sum(prices) * (1 - discount / 100)"
CHECK = "python3 -c 'from shop.money import total; print(total([100], 10))'"


def fenced(command: str) -> str:
    return f"```bash\n{command}\n```"


def called(name: str, **arguments: Any) -> str:
    data = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(data, ensure_ascii=False)}\n</tool_call>"


@dataclass(frozen=True)
class Language:
    """How one set says the things that every set can say."""

    name: str
    fix: str
    finish: str
    run: Callable[[str], str]
    write: Callable[[str, str], str]  # a new file, by path and text


EDIT = {"path": "shop/money.py", "old_str": OLD, "new_str": NEW}
SETS = {
    "r2e": Language(
        "r2e",
        xml("file_editor", command="str_replace", **EDIT),
        xml("finish", command="submit"),
        lambda command: xml("execute_bash", command=command),
        lambda path, text: xml("file_editor", command="create", path=path, file_text=text),
    ),
    "bash": Language(
        "bash",
        fenced("sed -i 's/1 - discount)/1 - discount \\/ 100)/' shop/money.py"),
        "```submit\n```",
        fenced,
        lambda path, text: fenced(f"cat > {path} <<'END'\n{text}\nEND"),
    ),
    "native": Language(
        "native",
        called("str_replace", **EDIT),
        called("submit"),
        lambda command: called("run", command=command),
        lambda path, text: called("create", path=path, file_text=text),
    ),
}


@pytest.fixture(params=SETS)
def said(request: pytest.FixtureRequest, rig: Rig) -> tuple[Rig, Language]:
    """A run under each set."""
    use(rig, request.param)
    return rig, SETS[request.param]


def use(rig: Rig, name: str, *overrides: str) -> Rig:
    rig.settings = load_settings(name, ["limits.test_time=0", *overrides])
    return rig


def transcript(rig: Rig) -> str:
    """All that model and tools said to each other."""
    start = rig.lines("start")[0]
    rows = ["== system", start["system"], "== user", start["user"]]
    for step in rig.lines("step"):
        reply = rig.chat.text(step["sampled"])
        rows += [f"== reply {step['step']}", reply, "== observation", step["observation"]]
    return "\n".join([*rows, f"== {rig.outcome.reason}", ""])


def check_golden(rig: Rig) -> None:
    file = GOLDEN / f"{rig.settings.name}.txt"
    text = transcript(rig)
    if os.environ.get("GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def assert_all_tools_called(rig: Rig) -> None:
    names = {step["call"]["name"] for step in rig.lines("step") if step["call"]}
    assert names == set(offered_tools(rig.settings, rig.instance))


# Every tool


def test_r2e_through_every_tool(rig: Rig, tmp_path: Path) -> None:
    def editor(command: str, **more: str) -> str:
        return xml("file_editor", command=command, **more)

    long = "\n".join(
        f"def f{n}():\n    a = {n}\n    b = a\n    c = b\n    return c" for n in range(30)
    )
    rig.sandbox.write_file("shop/long.py", f"{long}\n".encode())
    rig.sandbox.mark_base()
    use(rig, "r2e").run(
        editor("view", path="/workspace"),
        "<think>\nWhere is it?\n</think>\n\nI search.\n" + xml("search", search_term="discount"),
        xml("search", search_term="discount", path="shop/money.py"),
        editor("view", path="shop/money.py"),
        editor("view", path="shop/long.py", view_range="[4, 6]"),
        editor("create", path="reproduce_issue.py", file_text="from shop.money import total\n"
               "print(total([100], 10))"),
        xml("execute_bash", command="python3 reproduce_issue.py"),
        xml("execute_bash", cmd="python3 -c 'import sys; print(1); sys.exit(\"bad\")'"),
        editor("str_replace", **EDIT | {"old_str": "1 - discounts"}),
        SETS["r2e"].fix,
        xml("execute_bash", command="python3 reproduce_issue.py && rm reproduce_issue.py"),
        editor("insert", path="shop/money.py", insert_line="2", new_str="    # percent"),
        editor("undo_edit", path="shop/money.py"),
        editor("undo_edit", path="shop/long.py"),
        xml("execute_bash", command="seq 100"),
        xml("finish", "Done.", command="submit", result="Percent."),
    )  # fmt: skip
    assert rig.outcome.reason is ExitReason.SUBMITTED
    assert_all_tools_called(rig)
    check_golden(rig)
    assert applied(rig, tmp_path) == FIXED


def test_bash_through_every_tool(rig: Rig, tmp_path: Path) -> None:
    use(rig, "bash").run(
        "I look around.\n\n" + fenced("ls; cat shop/money.py"),
        "```submit\n```",
        fenced("cat > try.py <<'END'\nfrom shop.money import total\nprint(total([100], 10))\nEND"),
        "```sh\npython3 try.py; exit 3\n```",
        SETS["bash"].fix,
        fenced("python3 try.py && rm try.py && git diff --stat 2>/dev/null | cat"),
        "It is fixed.\n\n```submit\n```",
    )
    assert rig.outcome.reason is ExitReason.SUBMITTED
    assert_all_tools_called(rig)
    check_golden(rig)
    assert applied(rig, tmp_path) == FIXED


def test_native_through_every_tool(rig: Rig, tmp_path: Path) -> None:
    use(rig, "native", "limits.test_time=60").run(
        called("view", path="."),
        "<think>\nHm.\n</think>\n\n" + called("view", path="shop/money.py", start=1, end=2),
        called("search", text="discount", path=None),
        called("run", command=CHECK),
        called("submit"),
        called("create", path="shop/rates.py", file_text="RATES = {\n    'a': 1,\n}"),
        SETS["native"].fix,
        called("test"),
        called("run", command=CHECK + " && rm shop/rates.py"),
        called("submit"),
    )
    assert rig.outcome.reason is ExitReason.SUBMITTED
    assert_all_tools_called(rig)
    check_golden(rig)
    assert applied(rig, tmp_path) == FIXED


def test_observations_have_the_role_of_their_set(said: tuple[Rig, Language]) -> None:
    rig, words = said
    rig.run(words.fix, words.finish)
    roles = {s.role for s in rig.loop.log.segments if s.turn == 2 and s.kind == "injected"}
    assert roles == {"assistant", "tool" if words.name == "native" else "user"}


def test_the_prompt_of_native_leaves_the_tools_to_the_template(rig: Rig) -> None:
    use(rig, "native").run(called("submit"))
    start = rig.lines("start")[0]
    for schema in tool_schemas(rig.settings, rig.instance):
        assert schema["function"]["description"] not in start["system"] + start["user"]
    assert "<tool_call>" not in start["system"] + start["user"]


@pytest.mark.parametrize("name", tool_sets())
def test_schemas_say_what_the_dialects_take(rig: Rig, name: str) -> None:
    settings = load_settings(name)
    tools = offered_tools(settings, rig.instance)
    schemas = tool_schemas(settings, rig.instance)
    json.dumps(schemas)
    assert [schema["function"]["name"] for schema in schemas] == list(tools)
    for schema in schemas:
        assert schema["type"] == "function"
        told = schema["function"]["parameters"]
        own = tools[schema["function"]["name"]].parameters
        assert set(told["properties"]) == {key for key, value in own.items() if value.told}
        assert set(told["required"]) <= set(told["properties"])
    if name == "r2e":
        editor = schemas[0]["function"]["parameters"]["properties"]
        assert editor["command"]["enum"][0] == "view"
        assert editor["view_range"]["items"] == {"type": "integer"}
        assert "cmd" not in schemas[1]["function"]["parameters"]["properties"]


def test_the_issue_between_marks_is_all_that_r2e_shows(rig: Rig) -> None:
    from dataclasses import replace

    rig.instance = replace(rig.instance, problem="noise\n[ISSUE]\nIt is slow.\n[/ISSUE]\nmore")
    use(rig, "r2e").run(SETS["r2e"].finish)
    assert "<github_issue>\nIt is slow.\n</github_issue>" in rig.lines("start")[0]["user"]


# Malformed calls (T17 to T19), and what runs without a terminal (T20, T21)


def broken(words: Language) -> dict[str, tuple[str, str]]:
    """Replies that must not be run, and what has to be said of each."""
    touch = words.run("touch ran")
    many = {
        "talk": ("I am not sure.", "no"),
        "inside think": (f"<think>\n{touch}\n</think>\nWell.", "inside <think>"),
        "open think": (f"<think>\n{touch}", "<think>"),
        "never opened think": (f"{touch}\n</think>\nWell.", "inside <think>"),
    }
    if words.name == "bash":
        many |= {
            "two calls": (f"{touch}\nand\n{touch}", "more than one call"),
            "call and submission": (f"{touch}\n{words.finish}", "more than one call"),
            "unclosed": ("```bash\ntouch ran\n", "not closed"),
            "two, one unclosed": (f"{touch}\n```bash\ntouch ran", "more than one call"),
            "unknown": ("```python\nopen('ran', 'w')\n```", "block of python"),
            "arguments": ("```bash -x\ntouch ran\n```", "too much"),
        }
    elif words.name == "r2e":
        many |= {
            "unclosed call": (touch.removesuffix("</function>"), "is not closed"),
            "unclosed value": (
                touch.replace("</parameter>\n</function>", ""), "command is not closed",
            ),
            "missing tag": (
                "<function=file_editor>\n<parameter=command>create\n<parameter=path>ran"
                "</parameter>\n</function>",
                "is not closed before <parameter=path>",
            ),
            "cut by its value": (
                xml("execute_bash", command="touch ran\n</parameter>\n</function>\n"),
                "ends it too early",
            ),
            "unknown": (touch.replace("execute_bash", "shell"), "no function 'shell'"),
            "unknown parameter": (touch.replace("=command>", "=script>"), "no parameter script"),
            "twice": (
                xml("execute_bash", command="touch ran").replace(
                    "</function>", "<parameter=command>ls</parameter>\n</function>"
                ),
                "more than once",
            ),
            "missing": (xml("search", path="shop"), "needs the parameter search_term"),
        }  # fmt: skip
    else:
        many |= {
            "two calls": (f"{touch}\n{touch}", "more than one call"),
            "unclosed": (touch.removesuffix("</tool_call>"), "no </tool_call>"),
            "cut": (touch[:40], "not complete"),
            "quotes": (touch.replace('"', "'"), "no valid JSON"),
            "line end": (touch.replace("touch ran", "touch\nran"), "no valid JSON"),
            "unknown": (touch.replace('"run"', '"shell"'), "no function 'shell'"),
            "unknown parameter": (touch.replace('"command"', '"cmd"'), "no parameter cmd"),
            "missing": (called("view", start=1), "needs the parameter path"),
        }
    return many


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, words in SETS.items() for fault in broken(words)]
)
def test_what_is_malformed_is_never_run(name: str, fault: str) -> None:
    settings = load_settings(name)
    from test_loop import ISSUE

    text, expected = broken(SETS[name])[fault]
    turn = make_dialect(settings, ISSUE).parse(text)
    assert turn.call is None
    assert turn.error is not None
    assert expected in turn.error.message


@pytest.mark.parametrize("name", SETS)
def test_where_decoding_ends(name: str) -> None:
    from test_loop import ISSUE

    text = SETS[name].run("echo 1") + "\n"
    ends = [
        make_dialect(load_settings(name, [f"calls={calls}"]), ISSUE).stop(text)
        for calls in ("first", "only")
    ]
    assert ends == [True, False]
    assert load_settings(name).calls == ("first" if name == "native" else "only")


def test_malformed_replies_are_answered_and_leave_no_trace(said: tuple[Rig, Language]) -> None:
    rig, words = said
    faults = list(broken(words).items())
    if words.name == "native":  # decoding ends with the first whole call: these are never written
        faults = [
            (name, f) for name, f in faults if name not in ("two calls", "never opened think")
        ]
    rig.limits(format_errors=len(faults) + 1)
    outcome = rig.run(*(text for _, (text, _) in faults), words.fix, words.finish)
    assert outcome.reason is ExitReason.SUBMITTED
    problems = [step["problem"] for step in rig.lines("step")]
    for (name, (_, expected)), problem in zip(faults, problems, strict=False):
        assert problem, name
        assert expected in problem
    assert rig.sandbox.run("test -e ran").exit_code == 1
    assert rig.observation(1).startswith("The reply holds no")


def test_indentation_and_tags_inside_values_are_kept(said: tuple[Rig, Language]) -> None:
    rig, words = said
    text = "    if x:\n\t</parameter> and </tool_call>\n  <think>\n        <parameter=a>\n    end"
    rig.run(words.write("kept.txt", text), words.finish, words.finish, words.finish)
    assert rig.sandbox.read_file("kept.txt").decode() == text + "\n"


def test_nothing_waits_for_somebody(said: tuple[Rig, Language]) -> None:
    rig, words = said
    began = [words.run(command) for command in ("cat", "python3", "git commit", "read x; echo $?")]
    assert rig.run(*began, words.fix, words.finish).reason is ExitReason.SUBMITTED
    assert all(step["tool_seconds"] < 10 for step in rig.lines("step"))


def test_a_program_without_end_is_stopped(said: tuple[Rig, Language]) -> None:
    rig, words = said
    rig.limits(command_timeout=1).run(words.run("sleep 99"), words.fix, words.finish)
    assert "stopped after 1 s" in rig.observation(1)
    assert rig.outcome.reason is ExitReason.SUBMITTED


def test_r2e_counts_its_steps_in_new_messages_only(rig: Rig) -> None:
    use(rig, "r2e", "limits.steps=6").run(
        SETS["r2e"].run("echo 1"), "no call", SETS["r2e"].run("echo 2"), xml("search"),
        SETS["r2e"].run("echo 3"), SETS["r2e"].run("echo 4"),
    )  # fmt: skip
    assert rig.outcome.reason is ExitReason.STEP_LIMIT
    said = [text.count("Steps Remaining: ") for text in rig.model.fed]
    assert said == [1] * 6
    for left, text in zip(range(6, 0, -1), rig.model.fed, strict=True):
        assert f"Steps Remaining: {left}" in text
    assert "Call finish NOW" in rig.model.fed[-1]
    assert "Call finish NOW" not in rig.model.fed[-2]
    # What was fed once is what the log holds, to the last id.
    log = rig.chat.text(rig.loop.log.ids)
    assert log.count("Steps Remaining: ") == 6


def test_r2e_says_when_tokens_run_out(rig: Rig) -> None:
    use(rig, "r2e", "system=Go.", "user=Fix it.", "limits.total_tokens=6100").run(
        SETS["r2e"].run("seq 1 300"), SETS["r2e"].finish
    )
    assert "Call finish NOW" in rig.model.fed[1]


def test_reminders_prompts_and_history_are_settings_and_recorded(rig: Rig) -> None:
    changes = ["messages.steps_left=left: {{ left }}", "messages.observation=<{{ output }}>"]
    use(rig, "r2e", *changes).run(SETS["r2e"].run("echo 1"), SETS["r2e"].finish)
    assert rig.observation(1) == "<[STDOUT]\n1\n\n[STDERR]>\nleft: 99"
    base = {"instance": "x", "tools": "r2e", "protocol": "full_context"}
    digests = {
        config_digest(parse_options({**base, "overrides": overrides}))
        for overrides in ((), (changes[0],), ("history=template",), ("user=Do it.",))
    }
    assert len(digests) == 4
    recorded = parse_options({**base, "overrides": changes}).settings().model_dump()
    assert recorded["messages"]["steps_left"] == "left: {{ left }}"
    assert recorded["history"] == "raw"


# Every way out, and the patch in all of them


def test_submitted(said: tuple[Rig, Language], tmp_path: Path) -> None:
    rig, words = said
    assert rig.run(words.fix, words.finish).reason is ExitReason.SUBMITTED
    assert applied(rig, tmp_path) == FIXED


def test_finish_ends_r2e_whatever_was_done_and_the_others_ask_for_a_change(
    said: tuple[Rig, Language],
) -> None:
    rig, words = said
    outcome = rig.limits(repeats=5).run(words.finish, words.finish, words.fix, words.finish)
    assert outcome.reason is ExitReason.SUBMITTED
    assert outcome.steps == (1 if words.name == "r2e" else 4)


def ends(words: Language, rig: Rig) -> dict[ExitReason, tuple[Callable[[], None], list[Any]]]:
    """For each reason but `submitted`: what is set up, and what follows the fix."""
    now = [0.0]

    def clock() -> None:
        rig.clock = lambda: now[0]

    def late() -> str:
        now[0] = 1e6
        return words.run("echo late")

    def lose() -> str:
        rig.sandbox.close()
        return words.run("true")

    def interrupt() -> str:
        raise KeyboardInterrupt

    def fail() -> str:
        raise ValueError("no logits")

    changing = words.run("date +%N")
    return {
        ExitReason.STEP_LIMIT: (lambda: rig.limits(steps=3) and None, [changing]),
        ExitReason.TOKEN_LIMIT: (
            lambda: (
                use(rig, words.name, "system=Go.", "user=Fix it.").limits(total_tokens=2_000)
                and None
            ),
            [words.run("seq 1 400; date +%N")],
        ),
        ExitReason.WALL_TIME: (clock, [late]),
        ExitReason.STUCK: (lambda: None, [words.run("echo same")]),
        ExitReason.FORMAT_ERRORS: (lambda: None, ["no"]),
        ExitReason.SANDBOX_LOST: (lambda: None, [lose]),
        ExitReason.INTERRUPTED: (lambda: None, [interrupt]),
        ExitReason.ERROR: (lambda: None, [fail]),
    }


@pytest.mark.parametrize("reason", [r for r in ExitReason if r is not ExitReason.SUBMITTED])
def test_every_other_way_out(
    said: tuple[Rig, Language], reason: ExitReason, tmp_path: Path
) -> None:
    rig, words = said
    prepare, rest = ends(words, rig)[reason]
    prepare()
    outcome = rig.run(words.fix, *rest)
    assert outcome.reason is reason
    assert applied(rig, tmp_path) == FIXED


# Other languages, and sandboxes without Python


PROGRAMS = ("bash", "cat", "find", "grep", "ls", "rm", "sh", "sort", "test")


def test_a_project_and_a_sandbox_without_python(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "sum.sh").write_text("#!/bin/sh\n# adds\necho $(( $1 - $2 ))\n")
    (tree / "main.go").write_text('package main\n\nfunc main() {\n\tprintln("a")\n}\n')
    sandbox.put_tree(tree)
    sandbox.mark_base()
    links = "; ".join(f"ln -s $(type -P {name}) /var/tmp/bin/{name}" for name in PROGRAMS)
    assert sandbox.run(f"mkdir /var/tmp/bin; {links}").exit_code == 0
    run = Workspace.run

    def few(self: Workspace, command: Any, **how: Any) -> ExecResult:
        """As `Workspace.run`, with these few programs on the path."""
        before = self.sandbox.run
        with monkeypatch.context() as patch:
            patch.setattr(
                self.sandbox, "run", lambda *a, **k: before(*a, **k, env={"PATH": "/var/tmp/bin"})
            )
            return run(self, command, **how)

    monkeypatch.setattr(Workspace, "run", few)
    rig = Rig(sandbox, tmp_path / "run")
    use(rig, "r2e").run(
        xml("file_editor", command="view", path="main.go"),
        xml("search", search_term="println"),
        xml("file_editor", command="str_replace", path="sum.sh", old_str="- $2", new_str="+ $2"),
        xml("execute_bash", command="sh sum.sh 2 3"),
        xml("file_editor", command="view", path="."),
        xml("file_editor", command="create", path="x/y.rs", file_text="fn main() {}"),
        xml("file_editor", command="undo_edit", path="x/y.rs"),
        xml("file_editor", command="view", path="y.rs"),
        xml("execute_bash", command="python3 -c 1"),
        xml("finish"),
    )
    assert rig.outcome.reason is ExitReason.SUBMITTED
    assert '     4\t\tprintln("a")' in rig.observation(1)
    assert "main.go: 1" in rig.observation(2)
    assert "[STDOUT]\n5\n" in rig.observation(4)
    assert "main.go\nsum.sh" in rig.observation(5)
    assert "was removed" in rig.observation(7)
    assert "There is no y.rs." in rig.observation(8)
    assert "command not found" in rig.observation(9)
    assert "+echo $(( $1 + $2 ))" in rig.patch()
