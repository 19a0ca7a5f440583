"""What `agent run` was asked to do, checked before anything is loaded."""

from __future__ import annotations

from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent.load_options import read_device_map, read_quantization
from agent.settings import AgentSettings, SamplingSettings, SettingsError, load_settings
from agent.tool_choice import AUTO, choose_tools

DEFAULT_MODEL = "qwen2.5-coder-1.5b"
DEFAULT_BUDGET = 8192  # resident tokens
DEFAULT_SEED = 0

# What `agent run` does when it is given no task: the cache holds less than the first prompt.
DEMO_INSTANCE = "tinydb-4.8.2"
DEMO_BUDGET = 768
DEMO_SEED = 2


class OptionError(ValueError):
    """Options that do not go together, or a value that no run can have."""


class RunOptions(BaseModel):
    """A run as its report records it: enough to start it again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: Literal["repo_issue"] = "repo_issue"
    instance: str | None = None  # ID or ID@FILE
    repo: str | None = None
    issue: str | None = None  # text, or a file that holds it
    image: str | None = None  # a Docker image; without `repo` it holds the project itself
    test_command: str | None = None
    env: str | None = None  # an environment of the host for `repo`
    setup: str | None = None  # a command that is run once, with network
    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None  # how layers are spread over devices: a way, or a file
    quantize: str | None = None  # how linear layers are held: a name, or a file
    tools: str = AUTO  # what that comes to takes its place at once
    tools_reason: str | None = None  # why `tools` was chosen, where it was not named
    method: str = "nexus"
    protocol: Literal["true_eviction", "full_context"] = "true_eviction"
    scope: Literal["prefill", "prefill+decode"] | None = None
    budget: int | None = Field(None, ge=1)
    density: float | None = Field(None, gt=0, le=1)
    cache_gib: float | None = Field(None, gt=0)  # a budget in bytes; tokens go by the model
    prefill_eviction: Literal["chunk", "end"] | None = None
    chunk: int = Field(256, ge=1)
    temperature: float | None = Field(None, ge=0)  # None: the tool set's, see `sampling`
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0)
    attempts: int = Field(1, ge=1)
    until_resolved: bool = False
    parallel: bool = False
    sandbox: str = "auto"
    apply: bool = False
    branch: str | None = None  # a new branch of `repo` for the patch
    snapshot_turns: int = Field(5, ge=0)  # the cache is saved after so many turns
    snapshot_seconds: float = Field(60.0, ge=0)  # or after so long
    overrides: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _chosen(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("tools", AUTO) != AUTO:
            return data
        choice = choose_tools(str(data.get("model", DEFAULT_MODEL)))
        return {**data, "tools": choice.name, "tools_reason": choice.reason}

    @model_validator(mode="after")
    def _fits(self) -> RunOptions:
        if self.instance and self.repo:
            raise ValueError("--instance and --repo name two different tasks; give one of them")
        if self.repo and not self.issue:
            raise ValueError("--repo needs --issue: a text, or a file that holds it")
        if self.instance and self.image:
            raise ValueError("--image and --instance name two different tasks; give one")
        if self.image and not self.issue:
            raise ValueError("--image needs --issue: a text, or a file that holds it")
        if self.image and self.sandbox == "bubblewrap":
            raise ValueError("--image needs Docker; --sandbox bubblewrap uses the host's programs")
        if self.issue and not self.repo and not self.image:
            raise ValueError(
                "--issue belongs to --repo or --image; an instance has an issue of its own"
            )
        if self.apply and not self.repo:
            raise ValueError("--apply changes the folder named by --repo; there is none")
        if self.apply and self.attempts > 1:
            raise ValueError("--apply needs one patch; leave --attempts at 1")
        self._fits_own()
        if self.parallel and self.attempts < 2:
            raise ValueError("--parallel needs several attempts at once; give --attempts K")
        if self.parallel and self.until_resolved:
            raise ValueError(
                "--until-resolved makes one attempt after another; not with --parallel"
            )
        if self.until_resolved and (self.repo or self.image):
            raise ValueError("--until-resolved needs hidden tests; a task of your own has none")
        if self.budget is not None and self.density is not None:
            raise ValueError("--budget and --density are two ways to say one thing; give one")
        if self.cache_gib is not None:
            if self.budget is not None or self.density is not None:
                raise ValueError("--cache-gib is a budget too; not with --budget or --density")
            if self.method == "dense":
                raise ValueError("--cache-gib: dense evicts nothing, so that no size would hold")
        if self.device_map is not None:
            if self.device != "auto":
                raise ValueError("--device names one device, --device-map several; give one")
            read_device_map(self.device_map)
        if self.quantize is not None:
            read_quantization(self.quantize)
        return self

    def _fits_own(self) -> None:
        """What only a repository or an image of the user's can have."""
        if self.env is not None and not self.repo:
            raise ValueError(
                "--env is an environment for the folder named by --repo; there is none"
            )
        if self.env is not None and self.image:
            raise ValueError("--env and --image are two environments; give one")
        if self.setup is not None and not (self.repo or self.image):
            raise ValueError("--setup prepares --repo or --image; an instance comes prepared")
        if self.setup is not None and not self.setup.strip():
            raise ValueError("--setup is empty; give a command, or leave it out")
        if self.branch is not None and not self.repo:
            raise ValueError("--branch is made in the folder named by --repo; there is none")
        if self.branch is not None and self.attempts > 1:
            raise ValueError("--branch needs one patch; leave --attempts at 1")

    @property
    def demo(self) -> bool:
        """Whether no task was given, so that the demo's is taken with its seed and budget."""
        return self.instance is None and self.repo is None and self.image is None

    @property
    def first_seed(self) -> int:
        """The seed of the first attempt."""
        if self.seed is not None:
            return self.seed
        return DEMO_SEED if self.demo else DEFAULT_SEED

    def settings(self) -> AgentSettings:
        """The tool set with the overrides that are not the cache's.

        Raises SettingsError, and OptionError where the run cannot do what it asks for.
        """
        own = [item for item in self.overrides if not item.strip().startswith("cache.")]
        settings = load_settings(self.tools, own)
        if settings.history == "template" and self.protocol == "true_eviction":
            raise OptionError(
                f"tool set {self.tools!r}: history=template drops thoughts of past turns, and what "
                "a persistent cache was fed cannot be taken back; give --protocol full_context, or "
                "--set history=raw"
            )
        return settings

    def sampling(self, settings: AgentSettings | None = None) -> SamplingSettings:
        """How replies are drawn: the options, where they say so, else the tool set."""
        own = (settings or self.settings()).sampling
        given = {"temperature": self.temperature, "top_p": self.top_p}
        return own.model_copy(update={key: v for key, v in given.items() if v is not None})

    def cache_data(self, seed: int, tokens: int | None = None) -> dict[str, Any]:
        """The fields of the eviction config that differ from the preset's.

        tokens: what `cache_gib` comes to, which `agent.planner.budget_tokens` knows.
        """
        data: dict[str, Any] = {}
        if self.scope is not None:
            data["scope"] = self.scope
        if self.prefill_eviction is not None:
            data["prefill_eviction"] = self.prefill_eviction
        if self.density is not None:
            data["budget"] = {"kind": "density", "density": self.density}
        elif self.budget is not None:
            data["budget"] = {"kind": "tokens", "tokens": self.budget}
        elif self.cache_gib is not None:
            data["budget"] = {"kind": "tokens", "tokens": tokens or DEFAULT_BUDGET}
        for item in self.overrides:
            key, _, text = item.strip().partition("=")
            if key.startswith("cache."):
                data[key.removeprefix("cache.")] = yaml.safe_load(text)
        if self.method == "dense":
            return data
        if not self.method.endswith("-paper"):  # which have a budget and schedule of their own
            tokens = DEMO_BUDGET if self.demo else DEFAULT_BUDGET
            data.setdefault("budget", {"kind": "tokens", "tokens": tokens})
            # A cache that is made afresh each turn is compressed as the paper does: at the end.
            fresh = self.protocol == "full_context"
            data.setdefault("prefill_eviction", "end" if fresh else "chunk")
        data.setdefault("seed", seed)
        return data


def parse_options(values: dict[str, Any]) -> RunOptions:
    """Options from the command line's values. Raises OptionError with the first fault."""
    try:
        options = RunOptions.model_validate(values)
        settings = options.settings()
        options.cache_data(0)
        if options.attempts > 1 and options.sampling(settings).temperature == 0:
            raise OptionError("attempts at temperature 0 are all the same; give a --temperature")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]).replace("_", "-")
        message = str(first["msg"]).removeprefix("Value error, ")
        raise OptionError(f"--{where}: {message}" if where else message) from error
    except (SettingsError, yaml.YAMLError) as error:
        raise OptionError(str(error)) from error
    return options
