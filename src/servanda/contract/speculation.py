# The option speculative_config of a vLLM kernel: where it names a draft model, and how it reads.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

OPTION = "speculative_config"


def draft_of(options: Mapping[str, Any] | None) -> str | None:
    """The folder or file of the draft model, if the option names one."""
    config = (options or {}).get(OPTION)
    model = config.get("model") if isinstance(config, Mapping) else None
    return model if isinstance(model, str) else None


def moved_options(
    options: Mapping[str, Any] | None, move: Callable[[str], str]
) -> dict[str, Any] | None:
    """The options of a kernel, with the place of its draft model moved."""
    place = draft_of(options)
    if options is None or place is None:
        return None if options is None else dict(options)
    return {**options, OPTION: {**options[OPTION], "model": move(place)}}


def brief(value: Any) -> Any:
    """An option in a line of output: how drafts are made, and how many tokens they have.

    >>> brief({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2})
    'ngram of 3'
    """
    if not isinstance(value, Mapping) or "method" not in value:
        return value
    return f"{value['method']} of {value.get('num_speculative_tokens', '?')}"
