# Kinds of servers: what differs in how a user's answer of theirs is read back as token ids.
#
# Seen on vLLM 0.32 and on llama-server b1-0c1e570.  SGLang is written from its source of
# September 2026; its likeliest tokens are named by texts, which do not tell ids.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from servanda.gateway.proxy.config import Dialect

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class ServerKind:
    """How one kind of server is asked for evidence, and what its answers leave open.

    Args:
        ids: fields that ask for token ids; streamed: of a streamed chat, where they are others.
        named: fields that have likeliest tokens named by ids, beside those that ask for logprobs.
        least: likeliest tokens that have to be asked for, so that there are logprobs at all.
        best: whether likeliest tokens come with ids.
        nulls: whether ids that no one asked for are null, and not left out.
        quiet: whether no event of a stream is sent that would have nothing but what is asked for
            beside.
        bare: whether a chat that asked for no logprobs has none, and not null.
        by_step: whether ids stand beside the logprobs; no prompt's ids are told then, only how many
            tokens there were of both.
        completion: tokens that a completion gets which names no max_tokens; None: what there is
            room for.
        either: whether max_completion_tokens counts in a completion, too.
        stops: whether it tells what of `stop` and `stop_token_ids` ended an answer, and returns all
            tokens up to there.
        tools: whether tools that a chat may call leave every token possible.
        filters: whether its logprobs show what top_k, top_p and min_p left.
        template: where a chat becomes the text that its /tokenize takes; "": that takes chats.
    """

    ids: Fields = field(default_factory=dict)
    streamed: Fields | None = None
    named: Fields = field(default_factory=dict)
    least: int = 0
    best: bool = True
    nulls: bool = False
    quiet: bool = False
    bare: bool = False
    by_step: bool = False
    completion: int | None = None
    either: bool = False
    stops: bool = False
    tools: bool = True
    filters: bool = True
    template: str = ""


_IDS, _NAMED = {"return_token_ids": True}, {"return_tokens_as_token_ids": True}
KINDS: Mapping[Dialect, ServerKind] = MappingProxyType(
    {
        "vllm": ServerKind(_IDS, named=_NAMED, nulls=True, quiet=True, completion=16, stops=True),
        # nobody knows what ended an answer of it, nor what it allows
        "plain": ServerKind(_IDS, named=_NAMED),
        "sglang": ServerKind(
            _IDS,
            # where return_token_ids is refused
            {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True},
            best=False,
            quiet=True,
            completion=16,
            stops=True,
            filters=False,
        ),
        # it cuts the tokens of a stop off its logprobs, and holds calls of tools to a grammar
        "llamacpp": ServerKind(
            least=1,
            bare=True,
            by_step=True,
            either=True,
            tools=False,
            template="/apply-template",
        ),
    }
)
