# How kinds of servers are asked for token ids and logprobs, and the gaps in their responses.
#
# They were verified on vLLM 0.32 and llama-server b1-0c1e570.  SGLang is based on its source of
# September 2026; its top-k tokens are given as texts, which do not identify ids.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from servanda.gateway.proxy.config import Dialect

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class ServerKind:
    """How one kind of server is asked for logprobs, and the gaps in its responses.

    Args:
        ids: fields that request token ids; streamed: those of a streamed chat, if different.
        named: additional fields that make it name top-k tokens by ids.
        least: smallest number of top-k logprobs with which logprobs are returned at all.
        best: whether top-k tokens come with ids.
        nulls: whether ids that were not requested are null instead of missing.
        quiet: whether it omits stream events that would contain only added fields.
        bare: whether a chat without requested logprobs lacks the field, instead of null.
        by_step: whether ids are next to the logprobs; then prompt ids are not returned, only the
            token counts.
        completion: default max_tokens of a completion; None: the rest of the context.
        either: whether max_completion_tokens also applies to a completion.
        stops: whether it reports which of `stop` and `stop_token_ids` ended a response, and returns
            all tokens up to there.
        tools: whether optional tools leave all tokens possible.
        filters: whether its logprobs reflect top_k, top_p and min_p.
        template: path that renders a chat to text for /tokenize; "": /tokenize takes chats.
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
        # stop reasons and limits are unknown
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
        # it removes stop tokens from logprobs, and restricts tool calls by a grammar
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
