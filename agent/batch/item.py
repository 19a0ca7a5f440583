"""One run of a batch: an instance, the options that decide what comes out, an attempt.

Its key tells results apart. Whatever could change a result is in the key, so that a result is
never taken for that of another config, row or attempt; where the row was read from is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from agent.load_options import read_device_map, read_quantization
from agent.run_options import OptionError, RunOptions

FORMAT = 1  # a new number makes all results that there are those of other items

# The fields of RunOptions that a result depends on, the instance aside.
DECIDING = (
    "model",
    "dtype",
    "device",
    "device_map",
    "quantize",
    "tools",
    "method",
    "protocol",
    "scope",
    "budget",
    "density",
    "cache_gib",
    "prefill_eviction",
    "chunk",
    "temperature",
    "top_p",
    "seed",
    "overrides",
    "sandbox",
)


class Item(BaseModel):
    """One run. `options` holds the DECIDING fields of RunOptions, as JSON has them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str  # what tasks.source.open_source takes
    instance_id: str = Field(min_length=1)
    digest: str  # of the instance's row
    cell: str = ""  # name of the grid's cell; none for `agent eval`
    options: dict[str, Any]
    config: str = ""  # digest of what the options come to here: tool set, cache, local model
    attempt: int = Field(1, ge=1)  # the seed grows with it

    @cached_property
    def key(self) -> str:
        """sha256 over all but `source`."""
        return digest_of({"format": FORMAT, **self.model_dump(mode="json", exclude={"source"})})

    @property
    def seed(self) -> int:
        """The seed of this attempt."""
        return int(self.options.get("seed") or 0) + self.attempt - 1

    def run_options(self) -> RunOptions:
        """The options of this one run, its own seed among them.

        As with `agent run --attempts`, attempts differ in what they sample; the cache's seed is
        the first one's for all.
        """
        overrides = list(self.options.get("overrides") or ())
        own = any(text.strip().startswith("cache.seed=") for text in overrides)
        if self.attempt > 1 and not own and self.options.get("method") != "dense":
            overrides.append(f"cache.seed={self.seed - self.attempt + 1}")
        changed = {"instance": self.instance_id, "seed": self.seed, "overrides": overrides}
        return RunOptions.model_validate({**self.options, **changed})


class Row(Protocol):
    """What an item needs to know of a `tasks.source.Entry`."""

    @property
    def instance_id(self) -> str: ...

    @property
    def digest(self) -> str: ...


def make_items(
    source: str,
    entries: Iterable[Row],
    options: RunOptions,
    *,
    cell: str = "",
    attempts: int = 1,
    config: str | None = None,
) -> list[Item]:
    """A run for each entry and attempt: all first attempts, then all second ones.

    `options` should be settled; `config` is worked out where it is not given. Raises OptionError
    for a cache config that cannot be, and ModelError for a local model that is not there.
    """
    if Path(source).exists():  # workers, and a later call, may stand in another folder
        source = str(Path(source).resolve())
    config = config if config is not None else config_digest(options)
    deciding = options.model_dump(mode="json", include=set(DECIDING))
    deciding |= options.sampling().model_dump()
    # Without a task the options would be the demo's, which has a seed of its own.
    deciding["seed"] = options.seed or 0
    rows = list(entries)
    return [
        Item(
            source=source,
            instance_id=row.instance_id,
            digest=row.digest,
            cell=cell,
            options=deciding,
            config=config,
            attempt=attempt,
        )
        for attempt in range(1, attempts + 1)
        for row in rows
    ]


def settled(options: RunOptions) -> RunOptions:
    """The options with each `auto` replaced by what it comes to on this machine, and with the
    tool set's sampling where they name none.

    Otherwise runs of one key could differ in sandbox or precision. Raises SandboxError where no
    sandbox can be used, and OptionError for a dtype or device that is not there.
    """
    from environments import choose

    kind = choose(options.sandbox).kind

    import torch

    from agent.models import choose_device, choose_precision

    try:
        auto = options.device == "auto"
        where = choose_device() if auto else torch.device(options.device)
        plain = options.device_map is not None or options.quantize is not None
        dtype = choose_precision(options.dtype, where, plain=plain)
    except (ValueError, RuntimeError) as error:
        raise OptionError(str(error).partition("\n")[0]) from error
    # Asked for by count: to try it would take memory of it for as long as this process lives.
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"--device {where}: there are {torch.cuda.device_count()} such devices")
    update = {"sandbox": kind, "device": str(where), "dtype": dtype}
    if options.device_map is not None:  # which says where
        del update["device"]
    for name in ("device_map", "quantize"):  # workers may stand in another folder
        value = getattr(options, name)
        if value is not None and (file := Path(value).expanduser()).is_file():
            update[name] = str(file.resolve())
    return options.model_copy(update=update | options.sampling().model_dump())


def config_digest(options: RunOptions) -> str:
    """One sum over what the options come to: a tool set that was edited, a preset whose values
    changed and a local model with other weights are another config, whatever they are called."""
    return digest_of(config_data(options))


def config_data(options: RunOptions) -> dict[str, Any]:
    """Tool set and cache config in full, what files say of how the model is loaded, and the sum of
    a model that lies in a local folder.

    Raises OptionError and ModelError.
    """
    from agent import digests
    from agent.attempt import cache_config
    from agent.models import resolve

    options = options.model_copy(update={"instance": options.instance or "any"})  # not the demo's
    model = resolve(options.model)
    sum_: str | None = None
    if model.kind == "folder" and model.path is not None:
        sum_ = digests.of_folder(model.path)
    elif model.kind == "gguf" and model.path is not None:
        sum_ = digests.of_file(model.path)
    files: dict[str, Any] = {}
    if options.device_map is not None:
        files["device_map"] = read_device_map(options.device_map)
    if options.quantize is not None:
        files["quantization"] = read_quantization(options.quantize)
    return {
        **files,
        "tool_set": options.settings().model_dump(mode="json"),
        "cache": cache_config(options, options.seed or 0).model_dump(mode="json"),
        "local_model": sum_,
    }


def digest_of(data: Any) -> str:
    """sha256 of data as JSON, however its mappings are ordered."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
