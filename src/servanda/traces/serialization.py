# Frozen values as plain data for JSON, and back, without loss.
#
# A missing number is null, never 0; an infinite one is the string "inf" or "-inf".  The type of the
# field decides how a string is read.

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from servanda.errors import EvidenceError
from servanda.registry import cut

T = TypeVar("T")
_hints = lru_cache(maxsize=64)(get_type_hints)


def to_plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as dicts and lists; no NaN, no infinity."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def from_plain(kind: type[T], data: Any, place: str = "") -> T:
    """A value of a dataclass from the result of `to_plain`.

    Unknown keys are ignored; a missing one has the field's default, if there is one.

    Raises:
        EvidenceError: a key is missing, or a value has the wrong type.
    """
    return _read(kind, data, place)


@lru_cache(maxsize=256)
def _apart(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def _read(kind: Any, data: Any, place: str) -> Any:
    if type(data) is kind and kind in (str, int, float, bool):
        return data
    origin, args = _apart(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return _read(next(a for a in args if a is not type(None)), data, place)
    if origin is Literal:
        return data if data in args else _refuse(data, " or ".join(map(repr, args)), place)
    if is_dataclass(kind):
        return _record(kind, data, place)
    if origin is tuple:
        return _tuple(args, data, place)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            _refuse(data, "a mapping", place)
        return {k: _read(args[1], v, f"{place}.{k}") for k, v in data.items()}
    if kind is float:
        return _float(data, place)
    right = isinstance(data, kind) and (kind is bool or not isinstance(data, bool))
    return data if right else _refuse(data, f"a {kind.__name__}", place)


def _record(kind: Any, data: Any, place: str) -> Any:
    if not isinstance(data, Mapping):
        _refuse(data, "a mapping", place)
    hints, values = _hints(kind), {}
    for field in fields(kind):
        inner = f"{place}.{field.name}" if place else field.name
        if field.name in data:
            values[field.name] = _read(hints[field.name], data[field.name], inner)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise EvidenceError(f"{inner} is missing", hint="is this a verdict.json of servanda?")
    return kind(**values)


def _tuple(args: tuple[Any, ...], data: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        _refuse(data, "a list", place)
    kinds = [args[0]] * len(data) if args[-1] is Ellipsis else [*args]
    if len(kinds) != len(data):
        _refuse(data, f"a list of {len(kinds)}", place)
    parts = zip(kinds, data, strict=True)
    return tuple(_read(kind, part, f"{place}[{i}]") for i, (kind, part) in enumerate(parts))


def _float(data: Any, place: str) -> float:
    if data is None:
        return math.nan
    if data in ("inf", "-inf") or (isinstance(data, int | float) and not isinstance(data, bool)):
        return float(data)
    return _refuse(data, "a number", place)


def _refuse(data: Any, wanted: str, place: str) -> Any:
    raise EvidenceError(
        f"{place or 'the file'} is {cut(repr(data), 40)}, not {wanted}",
        hint="is this a verdict.json of servanda, and of this version?",
    )
