# The kinds of servers by name; engines/http/dialects registers how each is asked.

from __future__ import annotations

from typing import Any

from servanda.registry import Registry, did_you_mean

BUILTIN_DIALECTS = ("vllm", "sglang", "llamacpp", "lmdeploy", "plain")
DIALECTS: Registry[Any] = Registry("dialect", plugins="servanda.dialects")
DIALECTS.reserve(*BUILTIN_DIALECTS)


def dialect_names() -> tuple[str, ...]:
    """Every name, with those of installed packages, which are not imported."""
    return tuple(dict.fromkeys((*BUILTIN_DIALECTS, *DIALECTS.names())))


def is_dialect(name: str) -> bool:
    """Whether there is such a dialect; packages are asked for a name that is not built in."""
    return name in BUILTIN_DIALECTS or name in DIALECTS


def dialect_hint(name: str) -> str:
    """The nearest name, or all of them."""
    return did_you_mean(name, dialect_names())
