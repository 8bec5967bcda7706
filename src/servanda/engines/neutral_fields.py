# Neutral: fields of a request for a completion, and the values of each that change no draw.
#
# A server of ours refuses any other value, and a gateway takes no such request for evidence.

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# what decides how a token is drawn, and has a default that a server may have changed
DECIDING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "logit_bias": ({},),
        "stop": ("", []),
        "stop_token_ids": ([],),
        "bad_words": ([],),
        "min_tokens": (0,),
        "best_of": (1,),
        "suffix": ("",),
        "ignore_eos": (False,),
        "use_beam_search": (False,),
        "include_stop_str_in_output": (False,),
        "response_format": ({"type": "text"},),
    }
)
