"""The texts a model is given: the templates of a tool set, filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2

from agent.dialects.base import Call, Dialect, ToolForm
from agent.dialects.fenced import FencedCalls
from agent.dialects.json_calls import JsonCalls
from agent.dialects.xml_calls import XmlCalls
from agent.settings import AgentSettings, ParameterSettings, SettingsError, ToolSettings
from agent.tools import TOOLS, Tool
from tasks.instance import Instance

_ENVIRONMENT = jinja2.Environment(
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=False,
    autoescape=False,  # the output is a prompt, not a page
)

_DIALECTS = (FencedCalls.name, XmlCalls.name, JsonCalls.name)


def render(template: str, **values: Any) -> str:
    """Fill a template. Raises SettingsError when it names a value that it is not given."""
    try:
        return _ENVIRONMENT.from_string(template).render(**values)
    except jinja2.TemplateError as error:
        raise SettingsError(f"template {template[:60]!r}: {error}") from error


def offered_tools(settings: AgentSettings, instance: Instance) -> dict[str, ToolSettings]:
    """The tools of the set that the task can use: `test` only where it names a test command, and
    `define` only in Python."""
    tools = dict(settings.tools)
    if not instance.test_command:
        tools.pop("test", None)
    if not instance.python:
        tools = {name: tool for name, tool in tools.items() if (tool.uses or name) != "define"}
    return tools


def tool_functions(settings: AgentSettings, instance: Instance) -> dict[str, Tool]:
    """What each offered tool does when it is called."""
    tools = offered_tools(settings, instance)
    return {name: TOOLS[tool.uses or name] for name, tool in tools.items()}


def tool_schemas(settings: AgentSettings, instance: Instance) -> list[dict[str, Any]]:
    """The tools as a chat template takes them: OpenAI's JSON schemas of functions."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": tool.description,
                "parameters": {
                    "type": "object",
                    "properties": {
                        key: _property(value)
                        for key, value in tool.parameters.items()
                        if value.told
                    },
                    "required": [key for key, value in tool.parameters.items() if value.required],
                },
            },
        }
        for name, tool in offered_tools(settings, instance).items()
    ]


def _property(parameter: ParameterSettings) -> dict[str, Any]:
    told: dict[str, Any] = {"type": parameter.type, "description": parameter.description}
    if parameter.type == "array":
        told["items"] = {"type": "integer"}
    if parameter.choices:
        told["enum"] = list(parameter.choices)
    return told


def tool_forms(tools: Mapping[str, ToolSettings]) -> list[ToolForm]:
    """The tools as a dialect has to know them."""
    return [
        ToolForm(
            name=name,
            required=tuple(key for key, value in tool.parameters.items() if value.required),
            optional=tuple(key for key, value in tool.parameters.items() if not value.required),
        )
        for name, tool in tools.items()
    ]


def make_dialect(
    settings: AgentSettings, instance: Instance, *, opens_in_thought: bool = False
) -> Dialect:
    """The dialect of a tool set, told which tools there are. Raises SettingsError."""
    if settings.dialect not in _DIALECTS:
        known = ", ".join(_DIALECTS)
        raise SettingsError(f"dialect: there is no {settings.dialect!r}; there are: {known}")
    tools = offered_tools(settings, instance)
    forms = tool_forms(tools)
    only = settings.calls == "only"
    if settings.dialect == FencedCalls.name:
        tags = {name: tool.tags for name, tool in tools.items()}
        return FencedCalls(forms, tags=tags, only=only, opens_in_thought=opens_in_thought)
    if settings.dialect == JsonCalls.name:
        return JsonCalls(forms, only=only, opens_in_thought=opens_in_thought)
    return XmlCalls(forms, only=only, opens_in_thought=opens_in_thought)


def system_prompt(
    settings: AgentSettings, instance: Instance, dialect: Dialect, *, workdir: str
) -> str:
    """The system message: role, tools, syntax, worked example."""
    tools = offered_tools(settings, instance)
    turns = [turn for turn in settings.example if turn.call.name in tools]
    if not instance.python and len(turns) < len(settings.example):
        turns = []  # without its `define` an example shows nothing
    example = [
        {
            "thought": turn.thought.strip(),
            "call": dialect.render(Call(turn.call.name, turn.call.arguments)),
            "observation": turn.observation.strip("\n"),
        }
        for turn in turns
    ]
    return render(
        settings.system,
        tools=tools,
        format_help=dialect.format_help,
        example=example,
        workdir=workdir,
        limits=settings.limits,
        python=instance.python,
    ).strip()


def user_prompt(
    settings: AgentSettings, instance: Instance, *, code: str, workdir: str
) -> tuple[str, str]:
    """The first user message in two parts: the issue, and the code it is about."""
    values = {
        "problem": instance.problem.strip(),
        "package": instance.package or "",
        "test_command": instance.test_command or "",
        "python": instance.python,
        "code": code,
        "workdir": workdir,
        "limits": settings.limits,
    }
    issue = render(settings.user, **values).strip()
    rest = render(settings.code, **values).strip()
    return issue, f"\n\n{rest}" if rest else ""
