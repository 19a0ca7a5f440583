"""On which device each layer of a model computes, as `device_map` placed it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Place:
    """Consecutive layers that compute on one device."""

    layers: range
    device: torch.device


def places(model: PreTrainedModel) -> tuple[Place, ...]:
    """The layers of `model` in order, a place for each run of layers on one device."""
    return grouped(layer_devices(model))


def grouped(devices: Sequence[torch.device]) -> tuple[Place, ...]:
    """Places of layers whose devices these are."""
    found: list[Place] = []
    for layer, device in enumerate(devices):
        if found and found[-1].device == device:
            found[-1] = Place(range(found[-1].layers.start, layer + 1), device)
        else:
            found.append(Place(range(layer, layer + 1), device))
    return tuple(found)


def layer_devices(model: PreTrainedModel) -> list[torch.device]:
    """Where the attention of each layer computes: its keys arrive there."""
    attention: dict[int, str] = {}
    for name, module in model.named_modules():
        # The deepest module that knows its number: a decoder layer may know it as well.
        if isinstance(number := getattr(module, "layer_idx", None), int):
            attention[number] = name
    fallback = input_device(model)
    return [
        _device(model, attention[layer]) if layer in attention else fallback
        for layer in range(model.config.get_text_config().num_hidden_layers)
    ]


def input_device(model: PreTrainedModel) -> torch.device:
    """Where ids go in and logits come out: the device of the embedding."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    return _device(model, names.get(id(embedding), ""))


def all_devices(model: PreTrainedModel) -> tuple[torch.device, ...]:
    """Every device something of `model` computes on, that of the embedding first."""
    named = (_device(model, name) for name, module in model.named_modules() if _own(module))
    return tuple(dict.fromkeys((input_device(model), *named)))


def _own(module: torch.nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _device(model: PreTrainedModel, name: str) -> torch.device:
    """The device on which the module of that name computes."""
    module = model.get_submodule(name)
    for parameter in module.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    # Offloaded weights are brought, when they are needed, to where accelerate's hook says.
    for hook in _hooks(model, name):
        where = getattr(hook, "execution_device", None)
        if where is not None:
            return torch.device(where)
    return model.device


def _hooks(model: PreTrainedModel, name: str) -> Iterator[object]:
    """accelerate's hooks of a module, then of those it is part of."""
    while True:
        hook = getattr(model.get_submodule(name), "_hf_hook", None)
        yield from getattr(hook, "hooks", [hook])
        if not name:
            return
        name = name.rpartition(".")[0]
