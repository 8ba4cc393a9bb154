"""Frozen dataclasses to JSON and back, strictly: a missing, unknown or ill-typed key is refused."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigurationError

T = TypeVar("T")


def to_json(value: object) -> Any:  # Any: plain JSON of whatever shape `value` has
    """Plain dicts, lists, strings, numbers, booleans and None; keys in the order of the fields."""
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    assert value is None or isinstance(value, (bool, int, float, str)), f"{value!r} has no JSON"
    return value


def from_json(kind: type[T], data: object, where: str = "") -> T:
    """A `kind` made of `data`; ConfigurationError names the place inside `data`."""
    where = where or kind.__name__
    if not isinstance(data, Mapping):
        raise ConfigurationError(f"{where} is {type(data).__name__}; it must be an object")
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}  # pyright: ignore[reportArgumentType]
    unknown = sorted(str(key) for key in data if key not in known)
    if unknown:
        raise ConfigurationError(
            f"{where} has unknown keys {', '.join(unknown)}; it knows {', '.join(known)}"
        )
    missing = [
        name
        for name, f in known.items()
        if name not in data and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ConfigurationError(f"{where} lacks {', '.join(missing)}")
    values = {name: _parse(hints[name], data[name], f"{where}.{name}") for name in data}
    return kind(**values)


def _parse(hint: Any, data: Any, where: str) -> Any:  # Any: `hint` is any annotation of a field
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _parse_union(arguments, data, where)
    if origin is Literal:
        return _expect(data in arguments, data, where, " or ".join(map(repr, arguments)))
    if origin is tuple:
        return _parse_tuple(arguments, data, where)
    if origin in (dict, Mapping):
        _expect(isinstance(data, Mapping), data, where, "an object")
        key_hint, item_hint = arguments
        return {
            _parse(key_hint, key, f"{where} key"): _parse(item_hint, item, f"{where}.{key}")
            for key, item in data.items()
        }
    if is_dataclass(hint):
        return from_json(hint, data, where)  # pyright: ignore[reportArgumentType]
    return _parse_plain(hint, data, where)


def _parse_union(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in arguments:
        return None
    rest = [argument for argument in arguments if argument is not type(None)]
    assert len(rest) == 1, f"{where} is a union that JSON cannot tell apart"
    return _parse(rest[0], data, where)


def _parse_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(data, (list, tuple)), data, where, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_parse(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    _expect(len(data) == len(arguments), data, where, f"a list of {len(arguments)}")
    pairs = zip(arguments, data, strict=True)
    return tuple(_parse(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(pairs))


def _parse_plain(hint: Any, data: Any, where: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        names = [member.value for member in hint]
        return hint(_expect(data in names, data, where, " or ".join(map(str, names))))
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    assert hint in (str, int, float, bool), f"{where} has the unsupported type {hint}"
    is_right = isinstance(data, hint) and (hint is bool or not isinstance(data, bool))
    return _expect(is_right, data, where, f"a {hint.__name__}")


def _expect(holds: bool, data: Any, where: str, wanted: str) -> Any:
    if not holds:
        raise ConfigurationError(f"{where} is {data!r}; it must be {wanted}")
    return data
