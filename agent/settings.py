"""What a run is made of besides task and model: prompts, tools, limits. Read from YAML.

A tool set is one YAML file of `agent/config/` or of the user's own; every value of it can be
overridden by a dotted key (`limits.steps=30`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.tools import TOOLS


class SettingsError(ValueError):
    """A tool set that cannot be read, or an override that does not fit it."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ParameterSettings(_Strict):
    """One parameter of a tool, as the model is told of it."""

    description: str
    required: bool = True
    type: Literal["string", "integer", "array", "boolean"] = Field(
        "string", description="for sets whose tools are described as JSON schemas"
    )
    choices: tuple[str, ...] = Field((), description="all values there are, for JSON schemas")
    told: bool = Field(True, description="false: accepted, but the model does not hear of it")


class ToolSettings(_Strict):
    """One tool, as the model is told of it."""

    description: str
    uses: str = Field("", description="the implementation, where it is called otherwise")
    parameters: dict[str, ParameterSettings] = Field(default_factory=dict)
    tags: tuple[str, ...] = Field((), description="further names in the fenced dialect")


class ExampleCall(_Strict):
    """A call of the worked example."""

    name: str
    arguments: dict[str, str] = Field(default_factory=dict)


class ExampleTurn(_Strict):
    """One step of the worked example; it is written in the tool set's own dialect."""

    thought: str = ""
    call: ExampleCall
    observation: str = ""


class SamplingSettings(_Strict):
    """How replies are drawn, unless the run says otherwise."""

    temperature: float = Field(0.6, ge=0)
    top_p: float = Field(0.95, gt=0, le=1)


class Limits(_Strict):
    """When a run ends, and how much it may do and show."""

    steps: int = Field(20, ge=1, description="replies of the model")
    new_tokens: int = Field(512, ge=1, description="tokens of one reply")
    total_tokens: int = Field(16_000, ge=1, description="tokens of the whole run")
    wall_time: float = Field(600.0, gt=0, description="seconds")
    command_timeout: float = Field(60.0, gt=0, description="seconds of one command")
    observation_chars: int = Field(3_000, ge=200, description="characters of one observation")
    view_lines: int = Field(80, ge=5, description="lines shown at once")
    test_time: float = Field(
        60.0, ge=0, description="seconds for the project's tests after an edit; 0 runs none"
    )
    repeats: int = Field(3, ge=2, description="equal calls with equal results that end as stuck")
    format_errors: int = Field(4, ge=1, description="malformed replies in a row that end the run")


class ContextSettings(_Strict):
    """The code shown with the issue."""

    code_chars: int = Field(5_000, ge=0, description="characters of source shown up front")
    share: float = Field(
        0.75,
        gt=0,
        description="of a token budget that turn 0 may take, 2 for twice the budget; code is cut "
        "to fit",
    )


class Messages(_Strict):
    """What the model is told besides the tools' own output. Jinja templates; empty says nothing.

    `observation` frames a tool's output: it knows `tool`, `output`, `exit_code`. With an empty
    `nothing_changed` a submission is accepted whatever was done.
    """

    observation: str = ""
    format_error: str = "{{ message }}"
    cut_off: str = "Your reply was cut off at {{ limit }} tokens. {{ message }}"
    repeated: str = "You made this very call before, with the same result."
    after_edit: str = ""
    after_error: str = ""
    tests_pass: str = "The tests of the project pass."
    tests_fail: str = "Tests of the project fail:\n{{ output }}"
    after_test: str = ""
    tests_still_fail: str = ""  # said to the first submission after a failed test run
    nothing_changed: str = "No file was changed so far, so there is nothing to submit."
    steps_left: str = ""


class AgentSettings(_Strict):
    """A tool set: who the model is told it is, what it can call, and when it has to stop."""

    name: str
    dialect: str = "xml_calls"
    calls: Literal["first", "only"] = Field(
        "first",
        description="first: a reply ends with its first call. only: a reply is read to its end, "
        "and two calls in it are an error",
    )
    observation_role: Literal["user", "tool"] = "user"
    thinking: bool | None = Field(
        None,
        description="false switches off the thoughts of a model whose template can; null asks "
        "for nothing",
    )
    history: Literal["raw", "template"] = Field(
        "raw",
        description="raw: what was said stays as it was said. template: thoughts of past turns are "
        "dropped as the model's template drops them, under full_context only",
    )
    pin_system: bool = True
    pin_user: bool = True
    pin_code: bool = False
    system: str
    user: str  # the issue
    code: str  # what follows it in the same message
    tools: dict[str, ToolSettings]
    example: tuple[ExampleTurn, ...] = ()
    sampling: SamplingSettings = SamplingSettings.model_validate({})
    limits: Limits = Limits.model_validate({})
    context: ContextSettings = ContextSettings.model_validate({})
    messages: Messages = Messages()


def load_settings(name: str = "compact", overrides: Iterable[str] = ()) -> AgentSettings:
    """A tool set by name or by the path of a YAML file, with `key.key=value` overrides.

    Values are read as YAML. Raises SettingsError naming the file or key and what is wrong.
    """
    data = _read(name)
    for override in overrides:
        _apply(data, override)
    try:
        settings = AgentSettings.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"tool set {name!r}: {where}: {first['msg']}") from error
    for tool, told in settings.tools.items():
        if (told.uses or tool) not in TOOLS:
            there = ", ".join(TOOLS)
            raise SettingsError(
                f"tool set {name!r}: tools.{tool}: there is no tool {told.uses or tool!r}; "
                f"`uses` takes one of: {there}"
            )
    return settings


def tool_sets() -> list[str]:
    """Names of the tool sets that come with the package."""
    folder = resources.files("agent") / "config"
    return sorted(
        item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")
    )


def _read(name: str) -> dict[str, Any]:
    if name in tool_sets():
        text = (resources.files("agent") / "config" / f"{name}.yaml").read_text(encoding="utf-8")
    elif name.endswith((".yaml", ".yml")):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"tool set {name!r} cannot be read: {error}") from error
    else:
        raise SettingsError(
            f"there is no tool set {name!r}: give one of {', '.join(tool_sets())}, or a YAML file"
        )
    try:
        data = copy.deepcopy(_loaded(text))
    except yaml.YAMLError as error:
        raise SettingsError(f"tool set {name!r} is no valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise SettingsError(f"tool set {name!r} must be a mapping, not {type(data).__name__}")
    return data


@lru_cache(maxsize=16)
def _loaded(text: str) -> Any:
    """YAML is slow to read, and a batch reads one file once for each of its runs."""
    return yaml.safe_load(text)


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise SettingsError(f"override {override!r} must be written key.key=value")
    *folders, last = key.strip().split(".")
    place: Any = data
    for folder in folders:
        place = place.setdefault(folder, {})
        if not isinstance(place, Mapping):
            raise SettingsError(f"override {override!r}: {folder!r} holds no further keys")
    if isinstance(place.get(last), str):
        place[last] = text  # a text stays as it is, colons and braces included
        return
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"override {override!r}: no valid YAML value: {error}") from error
