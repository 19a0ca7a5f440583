"""What to evict, when, and down to how much: what the configs of all methods have in common.

Terms are those of "Nexus Sampling" (arXiv 2606.23961). Each method's own config is a subclass of
`EvictingConfig` in its file under `cache/methods/`, told apart by the field `method`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Scope = Literal["prefill", "prefill+decode"]
Phase = Literal["prefill", "decode"]
Selection = Literal["reservoir", "top_k"]


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
    ragged: ClassVar[bool] = False
    method: Literal["dense"] = "dense"
    block_size: int = Field(32, ge=1, description="tokens per block; only the unit of allocation")


class EvictingConfig(_Frozen):
    """Options that every evicting method has. What a method scores is one choice among several:

    how blocks are chosen by their weights (`selection`), in what units (`block_size`, 1 for single
    tokens), when (`scope`, `prefill_eviction`), down to what (`budget`), and what is not up for
    choice (`sinks`, `recent`, pins).
    """

    evicts: ClassVar[bool] = True

    method: str
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
    window: int = Field(0, ge=0, description="W, newest queries that are observed; 0: none")
    recent: int | None = Field(
        None,
        ge=1,
        description="newest tokens whose blocks always stay; None takes max(window, block_size)",
    )
    selection: Selection = Field(
        "top_k",
        description="top_k: the blocks of largest weight stay; reservoir: weighted sampling "
        "without replacement (Nexus, Eq. 6)",
    )
    samples: int = Field(5, ge=1, description="n, uniforms averaged per block in the reservoir")
    layer_budgets: Literal["uniform", "pyramid"] = Field(
        "uniform",
        description="uniform: every layer keeps as much; pyramid: an arithmetic progression, the "
        "first layer most (PyramidKV); the sum is the same",
    )
    pyramid_beta: float = Field(
        20, ge=1, description="the last layer's share beyond what is forced is the mean over this"
    )
    head_budgets: Literal["uniform", "adaptive"] = Field(
        "uniform",
        description="uniform: every KV head of a layer keeps as much; adaptive: by how many of the "
        "layer's best blocks it has (Ada-KV); the sum is the same",
    )
    head_floor: float = Field(
        0.2, ge=0, le=1, description="alpha, the share of a layer's blocks that is spread evenly"
    )
    head_normalize: bool = Field(
        False,
        description="before heads are compared, scale each one's scores by the share of their sum "
        "that its best ones have (an option of KVCache-Factory)",
    )
    seed: int = Field(0, ge=0, lt=2**64, description="key of the counter-based generator")

    @model_validator(mode="after")
    def _recent_holds_the_window(self) -> EvictingConfig:
        if self.recent is not None and self.recent < self.window:
            raise ValueError(
                f"recent={self.recent} is below window={self.window}: the observed queries' own "
                "keys must stay; raise recent or lower window"
            )
        return self

    @property
    def recent_tokens(self) -> int:
        """Newest tokens whose blocks are never evicted."""
        return self.recent if self.recent is not None else max(self.window, self.block_size)

    @property
    def ragged(self) -> bool:
        """Whether layers or heads can hold different numbers of tokens."""
        return self.layer_budgets != "uniform" or self.head_budgets != "uniform"


AnyConfig = DenseConfig | EvictingConfig
