# Which requests are evidence: by what they ask, of which kind of server, before anything is sent.

import json

import pytest

from servanda.gateway.proxy.config import Upstream
from servanda.gateway.proxy.logprob_request import REASONS, NoEvidence, logprob_request_of
from servanda.gateway.proxy.request import CompletionRequest

ALL = ("vllm", "sglang", "llamacpp", "plain")
STREAMED = {"stream": True}


def test_a_reason_is_short_enough_for_the_page_and_has_a_series():
    """Which shows the first forty characters of what a gateway says."""
    assert len({*REASONS}) == len(REASONS) and max(map(len, REASONS)) <= 40


def wish(dialect, chat, more, mirrored=False, **pool):
    words = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    one = CompletionRequest(json.dumps({**words, "max_tokens": 4, **more}).encode(), chat=chat)
    return logprob_request_of(
        one, Upstream("http://x", dialect=dialect, defaults={}, **pool), 8, mirrored=mirrored
    )


def why(*given, **more):
    """Why it is no evidence; "" where it is."""
    try:
        wish(*given, **more)
    except NoEvidence as no:
        assert no.why in REASONS
        return no.why
    return ""


UNSAID = {"max_tokens": None}


@pytest.mark.parametrize(
    ("dialect", "chat", "said", "pool", "most"),
    [
        ("vllm", True, UNSAID, {"context": 63}, 63),
        ("vllm", True, UNSAID, {"context": 63, "limit": 20}, 20),
        ("vllm", True, {"max_tokens": 999}, {"context": 63, "limit": 20}, 999),
        ("vllm", True, {"max_tokens": None, "max_completion_tokens": 5}, {}, 5),
        ("vllm", True, UNSAID, {}, "no max_tokens"),
        ("vllm", False, UNSAID, {"context": 63}, 16),
        ("vllm", False, {"max_tokens": None, "max_completion_tokens": 5}, {"context": 63}, 16),
        ("sglang", True, UNSAID, {"context": 63}, 63),
        ("sglang", False, UNSAID, {"context": 63}, 16),
        ("llamacpp", True, UNSAID, {"context": 63}, 63),
        ("llamacpp", False, UNSAID, {"context": 63}, 63),
        ("llamacpp", False, UNSAID, {"context": 63, "limit": 32}, 32),
        ("llamacpp", False, {"max_tokens": None, "max_completion_tokens": 5}, {}, 5),
        ("plain", True, UNSAID, {}, "no max_tokens"),
        ("plain", False, UNSAID, {}, "no max_tokens"),
    ],
)
def test_a_request_that_names_no_number_gets_what_its_server_allows(
    dialect, chat, said, pool, most
):
    if isinstance(most, str):
        assert why(dialect, chat, said, **pool) == most
    else:
        assert wish(dialect, chat, said, **pool).sampling["max_new_tokens"] == most


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "more",
    [{"stop": "x"}, {"stop": ["x", "y"]}, {"stop_token_ids": [3]}],
    ids=str,
)
def test_a_stop_is_evidence_where_the_server_tells_it_from_the_models_end(chat, more):
    (name,) = more
    found = {dialect: why(dialect, chat, more) for dialect in ALL}

    assert found == {"vllm": "", "sglang": "", "llamacpp": name, "plain": name}
    # the text is cut before the stop or behind it, and the tokens are the same
    assert not why("vllm", chat, {**more, "include_stop_str_in_output": True})


def test_the_tokens_that_a_client_stops_at_are_known():
    assert wish("vllm", False, {"stop_token_ids": [3, 4]}).stop_ids == {3, 4}
    assert wish("vllm", False, {"stop_token_ids": [[3], None]}).stop_ids == frozenset()


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize(("n", "no"), [(2, ""), (1, ""), (0, "n"), ("2", "n"), (True, "n")])
def test_one_of_several_choices_is_a_draw(dialect, n, no):
    assert why(dialect, False, {"n": n}) == no
    assert why(dialect, False, {"n": 2, "best_of": 3}) == "best_of"


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
STRICT = [*TOOLS, {"type": "function", "function": {"name": "g", "strict": True}}]


@pytest.mark.parametrize(
    ("more", "no"),
    [
        ({"tools": TOOLS}, ""),
        ({"tools": TOOLS, "tool_choice": "auto"}, ""),
        ({"tools": TOOLS, "tool_choice": "none"}, ""),
        ({"tools": TOOLS, "parallel_tool_calls": True}, ""),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": STRICT}, "strict tools"),
        ({"tools": {"f": 1}}, "tools"),
        ({"tools": [], "tool_choice": "none", "parallel_tool_calls": False}, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_chat_that_may_call_tools_is_evidence_and_one_that_must_is_not(dialect, more, no):
    assert why(dialect, True, more) == no


def test_tools_that_a_server_holds_to_a_grammar_are_no_evidence():
    assert why("vllm", True, {"tools": TOOLS}, masks=True) == "tools that infer holds to a grammar"
    assert why("llamacpp", True, {"tools": TOOLS}) == "tools"
    assert not why("llamacpp", True, {"tools": []})


def test_nobody_is_asked_for_evidence_of_tools_that_waits_for_no_answer():
    assert why("vllm", True, {"tools": TOOLS}, mirrored=True) == "tools"


@pytest.mark.parametrize(
    "field",
    [
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("json_schema", "regex", "ebnf", "grammar", "structural_tag", "response_format"),
    ],
)
def test_a_grammar_is_a_reason_by_its_own_name(field):
    """It masks tokens, and no report says what mass was left."""
    assert why("vllm", True, {field: {"type": "json_object"}}) == field


def test_filters_that_logprobs_do_not_show_are_no_evidence():
    no = "filters that its logprobs do not show"
    for more in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        assert [why(dialect, False, more) for dialect in ALL] == ["", no, "", ""]
    for more in ({"top_p": 1.0}, {"top_k": -1}, {"min_p": 0.0}, {"temperature": 0.7}):
        assert not why("sglang", False, more)


def test_a_default_that_no_client_can_undo_is_the_servers():
    """llama-server reads no repetition_penalty; its own is called otherwise."""
    body = json.dumps({"prompt": "a", "max_tokens": 4, "repetition_penalty": 1.0}).encode()
    pool = Upstream("http://x", dialect="llamacpp", defaults={"repeat_penalty": 1.1})

    with pytest.raises(NoEvidence, match=r"^sampling left to the server$"):
        logprob_request_of(CompletionRequest(body, chat=False), pool, 8)


def test_an_answer_that_comes_without_token_ids_is_no_evidence():
    mute, no = frozenset(("completions", "streamed chats")), "answered without token ids"

    assert why("sglang", False, {}, mute=mute) == no
    assert why("sglang", True, STREAMED, mute=mute) == no
    assert not why("sglang", True, {}, mute=mute)
    # what nobody waits for is not streamed
    assert not why("sglang", True, STREAMED, mute=mute, mirrored=True)


VLLM = {"return_token_ids": True, "return_tokens_as_token_ids": True}
FRAMED = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}


@pytest.mark.parametrize(
    ("dialect", "chat", "more", "beside", "best"),
    [
        ("vllm", False, {}, {**VLLM, "logprobs": 8}, 8),
        ("vllm", True, STREAMED, {**VLLM, "logprobs": True, "top_logprobs": 8}, 8),
        ("sglang", False, STREAMED, {"return_token_ids": True, "logprobs": 0}, 0),
        ("sglang", True, {}, {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}, 0),
        ("sglang", True, STREAMED, {**FRAMED, "logprobs": True, "top_logprobs": 0}, 0),
        ("llamacpp", False, STREAMED, {"logprobs": 8}, 8),
        ("llamacpp", True, {}, {"logprobs": True, "top_logprobs": 8}, 8),
        ("llamacpp", False, {"logprobs": 3}, {}, 3),
        ("llamacpp", True, {"logprobs": True, "top_logprobs": 2}, {}, 2),
        ("llamacpp", True, {"logprobs": True}, {}, 0),
    ],
)
def test_each_kind_of_server_is_asked_in_its_own_words(dialect, chat, more, beside, best):
    found = wish(dialect, chat, more)

    sent = json.loads(found.body)
    kept = {"prompt", "messages", "max_tokens", *more} & sent.keys()
    assert {name: value for name, value in sent.items() if name not in kept} == beside
    assert found.best == best


def test_llama_server_that_is_asked_for_no_likeliest_token_lists_none_at_all():
    assert why("llamacpp", False, {"logprobs": 0}) == "logprobs asked for in an odd way"
