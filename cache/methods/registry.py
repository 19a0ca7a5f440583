"""Methods by name."""

from __future__ import annotations

from typing import Any, TypeVar

from cache.config import AnyConfig, DenseConfig, EvictingConfig
from cache.methods.base import Method

MethodT = TypeVar("MethodT", bound=type[Method[Any]])

_METHODS: dict[str, type[Method[Any]]] = {}


def method_name(config: type[EvictingConfig] | type[DenseConfig]) -> str:
    """The value of `method` that a config class stands for."""
    return str(config.model_fields["method"].default)


def register(method: MethodT) -> MethodT:
    """Class decorator: make a method known by the default of its config's field `method`.

    Raises ValueError when another class has that name.
    """
    name = method_name(method.Config)
    if _METHODS.setdefault(name, method) is not method or name == method_name(DenseConfig):
        raise ValueError(f"a method called {name!r} is there already")
    return method


def methods() -> tuple[str, ...]:
    """Names that the field `method` takes."""
    return (method_name(DenseConfig), *_METHODS)


def make_method(config: EvictingConfig) -> Method[Any]:
    """The method that a config describes. Raises ValueError for one that is not registered."""
    return _found(config.method)(config)


def parse_config(data: dict[str, Any]) -> AnyConfig:
    """Config from plain data (YAML, JSON).

    Raises ValueError for an unknown method, pydantic.ValidationError (a ValueError) naming the
    field for anything else.
    """
    name = str(data.get("method"))
    if name == method_name(DenseConfig):
        return DenseConfig.model_validate(data)
    return _found(name).Config.model_validate(data)


def _found(name: str) -> type[Method[Any]]:
    if name not in _METHODS:
        raise ValueError(f"unknown method {name!r}; there are: {', '.join(methods())}")
    return _METHODS[name]
