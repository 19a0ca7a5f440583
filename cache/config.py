"""What to evict, when, and down to how much: one frozen pydantic class per method.

Terms are those of "Nexus Sampling" (arXiv 2606.23961), section numbers in the field descriptions.
`EvictionConfig` is the union of all methods, told apart by the field `method`; `preset()` gives the
named settings.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

Scope = Literal["prefill", "prefill+decode"]
Phase = Literal["prefill", "decode"]
Heads = Literal["layer_mean", "layer_attention", "kv_head"]
WalkRows = Literal["even", "newest", "all"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenBudget(_Frozen):
    """A fixed number of resident tokens, forced ones included."""

    kind: Literal["tokens"] = "tokens"
    tokens: int = Field(8192, ge=1, description="resident tokens per layer and KV head")


class DensityBudget(_Frozen):
    """A share of a base count of tokens; B = max(floor(density * ceil(base / b) + 1/2), floor)."""

    kind: Literal["density"] = "density"
    density: float = Field(0.2, gt=0, le=1, description="share of the base's blocks that stays")
    density_base: Literal["seen", "present", "first_prompt"] = Field(
        "seen",
        description="seen: all tokens the stream has had; present: those in the cache now; "
        "first_prompt: those of the first prefill",
    )
    min_free: int = Field(4, ge=0, description="blocks left to choose beyond the forced ones")
    min_tokens: int = Field(0, ge=0, description="never fewer resident tokens than this")


Budget = Annotated[TokenBudget | DensityBudget, Field(discriminator="kind")]


class DenseConfig(_Frozen):
    """Nothing is evicted: the reference that the others are measured against."""

    evicts: ClassVar[bool] = False
    method: Literal["dense"] = "dense"
    block_size: int = Field(32, ge=1, description="tokens per block; only the unit of allocation")


class _Evicting(_Frozen):
    """Options that every evicting method has."""

    evicts: ClassVar[bool] = True

    scope: Scope = Field(
        "prefill+decode",
        description="prefill: evict only after a prompt or observation has been read; "
        "prefill+decode: also while generating",
    )
    prefill_eviction: Literal["end", "chunk"] = Field(
        "end",
        description="end: once after the last chunk of the new tokens; chunk: after each chunk, "
        "so that the budget holds throughout (the chunk size is then part of the result)",
    )
    budget: Budget = TokenBudget.model_validate({})
    block_size: int = Field(32, ge=1, description="b, tokens per block")
    sinks: int = Field(1, ge=0, description="blocks at the start that always stay")
    recent: int | None = Field(
        None,
        ge=1,
        description="newest tokens whose blocks always stay; None takes max(window, block_size)",
    )
    seed: int = Field(0, ge=0, lt=2**64, description="key of the counter-based generator")

    @property
    def recent_tokens(self) -> int:
        """Newest tokens whose blocks are never evicted."""
        return self.recent if self.recent is not None else self.block_size


class NexusConfig(_Evicting):
    """Nexus Sampling: direct attention plus a short walk over blocks, then a weighted reservoir."""

    method: Literal["nexus"] = "nexus"
    window: int = Field(16, ge=1, description="W, newest queries that are observed")
    walk_steps: int = Field(3, ge=0, description="H, steps of the walk (Eq. 4); 0 turns it off")
    walk_weight: float = Field(0.5, ge=0, description="lambda, weight of the walk term (Eq. 5)")
    walk_rows: WalkRows = Field(
        "even",
        description="which rows the walk takes: even (spread over the window, oldest first), "
        "newest (the last H), all",
    )
    recency_tiebreak: float = Field(1e-6, ge=0, description="epsilon, times the rank in age")
    heads: Heads = Field(
        "kv_head",
        description="layer_mean: queries and keys averaged over heads, one decision per layer; "
        "layer_attention: attention averaged over heads, one decision per layer; "
        "kv_head: one decision per KV head",
    )
    selection: Literal["reservoir", "top_k"] = Field(
        "reservoir", description="reservoir: weighted sampling (Eq. 6); top_k: the largest weights"
    )
    samples: int = Field(5, ge=1, description="n, uniforms averaged per block in the reservoir")

    @model_validator(mode="after")
    def _window_holds(self) -> NexusConfig:
        if self.walk_steps > self.window:
            raise ValueError(
                f"walk_steps={self.walk_steps} exceeds window={self.window}: each step of the walk "
                "takes one row of the window; lower walk_steps or raise window"
            )
        if self.recent is not None and self.recent < self.window:
            raise ValueError(
                f"recent={self.recent} is below window={self.window}: the observed queries' own "
                "keys must stay; raise recent or lower window"
            )
        return self

    @property
    def recent_tokens(self) -> int:
        return self.recent if self.recent is not None else max(self.window, self.block_size)


EvictionConfig = Annotated[DenseConfig | NexusConfig, Field(discriminator="method")]
AnyConfig = DenseConfig | NexusConfig
_ADAPTER: TypeAdapter[AnyConfig] = TypeAdapter(EvictionConfig)

_PAPER: dict[str, Any] = {
    "budget": {"kind": "density", "density": 0.2},
    "prefill_eviction": "end",
}
PRESETS: dict[str, dict[str, Any]] = {
    "dense": {"method": "dense"},
    "nexus": {"method": "nexus"},
    "nexus-paper": {
        "method": "nexus",
        "heads": "layer_mean",
        "walk_rows": "newest",
        **_PAPER,
    },
}


def methods() -> tuple[str, ...]:
    """Names that the field `method` takes."""
    union = get_args(EvictionConfig)[0]
    return tuple(get_args(c.model_fields["method"].annotation)[0] for c in get_args(union))


def parse_config(data: dict[str, Any]) -> AnyConfig:
    """Config from plain data (YAML, JSON). Raises pydantic.ValidationError naming the field."""
    return _ADAPTER.validate_python(data)


def preset(name: str, **changes: Any) -> AnyConfig:
    """The named preset with `changes` on top.

    Raises ValueError for an unknown name, pydantic.ValidationError for an unknown or bad field.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown method {name!r}; there are: {', '.join(PRESETS)}")
    return parse_config({**PRESETS[name], **changes})
