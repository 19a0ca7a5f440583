"""What kvpress computes, asked in a process of its own: kvpress_driver.py JOB.json OUT.safetensors

kvpress is another project's code (Apache-2.0, `make oracles` puts it into a folder that git
ignores). Its hooks do not run on the transformers installed here, and its package patches that
library when imported. So its modules are imported past the package's `__init__` (which would also
want tools for data sets), and their methods are called directly, on what a plain eager forward
pass of transformers gives. Nothing here imports `cache`.

The job: {"models": [{"name", "folder", "ids", "asks": [{"name", "what", "press"}]}],
"budgets": [{"name", "press", "layers", "length"}]}; a press is {"kind", ...its arguments}. `what`
is "scores" (of `score`) or "kept" (bool, what `compress` leaves). The answers: MODEL/ASK, [L, H_kv,
T]; and NAME, int64 [L], for budgets.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

VERSION = "0.5.5"
MODULES = {
    "AdaKVPress": "adakv_press",
    "ChunkKVPress": "chunkkv_press",
    "ObservedAttentionPress": "observed_attention_press",
    "PyramidKVPress": "pyramidkv_press",
    "SnapKVPress": "snapkv_press",
    "StreamingLLMPress": "streaming_llm_press",
}


def import_past_init() -> None:
    """Make `kvpress.presses.NAME` importable without running the package's `__init__`."""
    found = importlib.metadata.version("kvpress")
    if found != VERSION:
        sys.exit(f"kvpress {found} is installed, but {VERSION} is what we compare with")
    spec = importlib.util.find_spec("kvpress")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = types.ModuleType("kvpress")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["kvpress"] = package


def make_press(arguments: dict[str, Any]) -> Any:
    given = {
        name: make_press(value) if isinstance(value, dict) else value
        for name, value in arguments.items()
        if name != "kind"
    }
    module = importlib.import_module(f"kvpress.presses.{MODULES[arguments['kind']]}")
    return getattr(module, arguments["kind"])(**given)


@dataclass
class Layer:
    """What a press's methods take, for one attention layer."""

    module: Any
    hidden_states: torch.Tensor
    position_embeddings: Any
    attentions: torch.Tensor
    keys: torch.Tensor  # [1, H_kv, T, D], rotated


@torch.no_grad()
def prefill(model: Any, ids: list[int]) -> list[Layer]:
    layers: list[Layer] = []

    def note(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        layers.append(
            Layer(
                module,
                kwargs["hidden_states"],
                kwargs["position_embeddings"],
                output[1],
                torch.empty(0),
            )
        )

    hooks = [
        layer.self_attn.register_forward_hook(note, with_kwargs=True)
        for layer in model.model.layers
    ]
    cache = DynamicCache()
    model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        layer.keys = cache.layers[layer.module.layer_idx].keys
    return layers


@torch.no_grad()
def answer(press: Any, what: str, layer: Layer) -> torch.Tensor:
    """[H_kv, T], float32 scores or bool."""
    kind = type(press).__name__
    _, heads, length, _ = layer.keys.shape
    # In the place of the values, which none of these presses looks at: what is kept then says from
    # where it came.
    positions = torch.arange(length, dtype=torch.float32)[:, None].expand_as(layer.keys)
    arguments = (
        layer.module,
        layer.hidden_states,
        layer.keys,
        positions.contiguous(),
        layer.attentions if kind == "ObservedAttentionPress" else None,
        {"position_embeddings": layer.position_embeddings},
    )
    if what == "scores":
        return press.score(*arguments)[0]
    keys, values = press.compress(*arguments)
    kept = torch.zeros(heads, length, dtype=torch.bool)
    if kind == "AdaKVPress":
        _, head, slot = layer.module.masked_key_indices
        kept[head, slot] = True
        return ~kept
    indices = values[0, ..., 0].long()
    kept.scatter_(-1, indices, True)
    assert int(kept.sum()) == indices.numel()
    assert torch.equal(keys[0], layer.keys[0].gather(1, indices[..., None].expand_as(keys[0])))
    return kept


def budgets(press: Any, layers: int, length: int) -> torch.Tensor:
    config = types.SimpleNamespace(num_hidden_layers=layers)
    modules = [types.SimpleNamespace(config=config, layer_idx=i) for i in range(layers)]
    return torch.tensor([press.get_layer_budget(module, length) for module in modules])


def main(job_file: str, out_file: str) -> None:
    torch.set_num_threads(1)
    import_past_init()
    job = json.loads(Path(job_file).read_text())
    out: dict[str, torch.Tensor] = {}
    for entry in job["models"]:
        model = AutoModelForCausalLM.from_pretrained(
            entry["folder"], dtype=torch.float32, attn_implementation="eager"
        ).eval()
        layers = prefill(model, entry["ids"])
        model.set_attn_implementation("sdpa")  # AdaKVPress refuses to be called under eager
        for ask in entry["asks"]:
            press = make_press(ask["press"])
            parts = [answer(press, ask["what"], layer) for layer in layers]
            out[f"{entry['name']}/{ask['name']}"] = torch.stack(parts)
    for ask in job["budgets"]:
        out[ask["name"]] = budgets(make_press(ask["press"]), ask["layers"], ask["length"])
    save_file(out, out_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
