# Names of models on the Hugging Face Hub: hf://ORGANISATION/NAME or hf://ORGANISATION/NAME@REVISION.

from __future__ import annotations

import re
from collections.abc import Callable

HUB = "hf://"
_NAME = re.compile(r"hf://(?!.*\.\.)(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[^\s@\\]*))?")


def is_hub_name(model: str | None) -> bool:
    """Whether a model is named on the Hub, and not by a path."""
    return model is not None and model.startswith(HUB)


def hub_parts(model: str) -> tuple[str, str | None] | None:
    """Repository and revision of a name; None if it is not written so.

    >>> hub_parts("hf://org/name@main"), hub_parts("hf://org/name"), hub_parts("hf://name")
    (('org/name', 'main'), ('org/name', None), None)
    """
    match = _NAME.fullmatch(model)
    return (match["repo"], match["revision"]) if match else None


def moved_path(move: Callable[[str], str], model: str) -> str:
    """A path that is moved; a name of the Hub stays."""
    return model if is_hub_name(model) else move(model)
