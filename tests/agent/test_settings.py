"""Tool sets: read from YAML, overridden by key, checked, and what the prompts are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from agent.dialects.base import Call
from agent.prompts import make_dialect, system_prompt, user_prompt
from agent.settings import AgentSettings, SettingsError, load_settings, tool_sets
from agent.tools import TOOLS
from tasks.instance import Instance
from tasks.release_pair import read

ISSUE = Instance("x-1", "Title\n{{ text }} with {% braces %}", test_command="pytest")


def prompt(settings: AgentSettings) -> str:
    return system_prompt(settings, ISSUE, make_dialect(settings, ISSUE), workdir="/workspace")


@pytest.mark.parametrize("name", tool_sets())
def test_every_tool_set_can_be_used(name: str) -> None:
    settings = load_settings(name)
    assert {tool.uses or name for name, tool in settings.tools.items()} <= set(TOOLS)
    text = prompt(settings)
    dialect = make_dialect(settings, ISSUE)
    for turn in settings.example:
        assert turn.call.name in settings.tools
        assert set(turn.call.arguments) <= set(settings.tools[turn.call.name].parameters)
        # The example is written as calls have to be written.
        written = dialect.render(Call(turn.call.name, turn.call.arguments))
        assert written in text
        assert dialect.parse(written).call is not None
    issue, _ = user_prompt(settings, ISSUE, code="", workdir="/workspace")
    assert "{{ text }} with {% braces %}" in issue


@pytest.mark.parametrize("name", tool_sets())
def test_every_tool_set_can_be_used_in_another_language(name: str) -> None:
    settings, other = load_settings(name), replace(ISSUE, python=False)
    dialect = make_dialect(settings, other)
    text = system_prompt(settings, other, dialect, workdir="/workspace")
    if name == "compact":  # whose example has a tool that is for Python only
        assert "```edit shelf/labels.js 28 28" in text
    else:
        for turn in settings.example:
            assert dialect.render(Call(turn.call.name, turn.call.arguments)) in text
    assert "```python" not in text


@pytest.mark.parametrize("name", tool_sets())
def test_the_worked_example_is_of_none_of_the_packages(name: str) -> None:
    text = prompt(load_settings(name)).lower()
    for pair in read():
        assert pair.package.lower() not in text.split()
        assert pair.issue_title.lower() not in text
        for path in pair.changed_files:
            assert path not in text


def test_the_compact_prompt_is_short() -> None:
    assert len(prompt(load_settings("compact"))) < 2_500


def test_an_issue_is_not_taken_for_a_template() -> None:
    issue, code = user_prompt(load_settings(), ISSUE, code="1|{{ x }}", workdir="/w")
    assert "{{ text }} with {% braces %}" in issue
    assert "1|{{ x }}" in code


def test_overrides_by_dotted_key() -> None:
    settings = load_settings(
        "compact", ["limits.steps=3", "messages.after_edit=Go on: now", "example=[]"]
    )
    assert settings.limits.steps == 3
    assert settings.messages.after_edit == "Go on: now"
    assert settings.example == ()
    assert settings.limits.new_tokens == load_settings().limits.new_tokens


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("limits.stepz=3", "limits.stepz"),
        ("limits.steps=none", "limits.steps"),
        ("limits.steps=0", "greater than or equal to 1"),
        ("limits.steps", "key.key=value"),
        ("name.x=1", "holds no further keys"),
        ("limits.steps=[1", "no valid YAML"),
    ],
)
def test_overrides_that_do_not_fit_are_named(override: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings("compact", [override])


def test_a_tool_set_of_ones_own(tmp_path: Path) -> None:
    data = load_settings("compact").model_dump(mode="json")
    data["name"], data["system"] = "mine", "You are {{ nobody }}."
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(data))
    settings = load_settings(str(file))
    assert settings.name == "mine"
    with pytest.raises(SettingsError, match="nobody"):
        prompt(settings)


@pytest.mark.parametrize("dialect", ["fenced", "xml_calls", "json_calls"])
def test_the_prompts_fit_every_dialect(dialect: str) -> None:
    settings = load_settings("compact", [f"dialect={dialect}"])
    text = prompt(settings)
    parsed = make_dialect(settings, ISSUE).parse(text.split("ANSWER:")[1])
    assert parsed.call is not None
    assert dict(parsed.call.arguments) == settings.example[0].call.arguments
    with pytest.raises(SettingsError, match="there are: fenced, xml_calls, json_calls"):
        prompt(load_settings("compact", ["dialect=morse"]))


def test_unknown_and_unreadable_tool_sets(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="compact"):
        load_settings("nothing")
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings(str(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(SettingsError, match="must be a mapping"):
        load_settings(str(tmp_path / "list.yaml"))
