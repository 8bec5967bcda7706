# Fields of a reply as raw bytes, so that unread fields stay unchanged.

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

_objects = msgspec.json.Decoder(dict[str, Raw]).decode
_lists = msgspec.json.Decoder(list[dict[str, Raw]]).decode


def parts_of(data: bytes) -> dict[str, Raw]:
    try:
        return _objects(data)
    except msgspec.DecodeError:
        return _fields_of(json.loads(data))  # some servers write NaN, which is not JSON


def choices_of(data: Raw) -> list[dict[str, Raw]]:
    try:
        return _lists(data)
    except msgspec.DecodeError:
        return [_fields_of(choice) for choice in json.loads(bytes(data))]


def _fields_of(fields: Any) -> dict[str, Raw]:
    if not isinstance(fields, dict):
        raise ValueError("no object")
    return {name: Raw(json.dumps(value).encode()) for name, value in fields.items()}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def value_of(part: Mapping[str, Raw], name: str) -> Any:
    raw = part.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return json.loads(bytes(raw))
