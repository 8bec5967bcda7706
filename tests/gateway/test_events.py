# Events of a sampled stream: whatever the parts are that they come in.

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.gateway.proxy import logprob_capture as wire
from servanda.gateway.proxy.logprob_capture import LogprobCapture
from servanda.gateway.proxy.logprob_request import LogprobRequest
from servanda.gateway.proxy.server_kinds import KINDS

VLLM, SGLANG, LLAMA = (KINDS[name] for name in ("vllm", "sglang", "llamacpp"))
KIND = {True: VLLM, False: KINDS["plain"]}  # whether it writes null for ids that nobody asked for
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINES = st.sampled_from(
    [b"data: x", b"data:", b"data", b": comment", b"event: e", b"id: 7", b"data: [DONE]", b"odd"]
)


def parts_of(data, cuts):
    at = sorted({min(cut, len(data)) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


CUTS = st.lists(st.integers(0, 400), max_size=12)


def events_of(text):
    """Events by the definition: decode line by line, and end one at every empty line."""
    lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    found, held = [], []
    for line in lines:
        if line:
            held.append(line)
        elif held:
            found.append(held)
            held = []
    return found


@given(st.lists(st.tuples(st.lists(LINES, max_size=3), ENDS), max_size=5), CUTS)
def test_what_comes_out_is_what_came_in(events, cuts):
    stream = b"".join(b"".join(line + end for line in lines) + end for lines, end in events)
    split = wire.EventSplitter()

    found = [event for part in parts_of(stream, cuts) for event in split.feed(part)]
    rest = split.rest()

    assert b"".join(found) + rest == stream
    assert [one for event in (*found, rest) for one in events_of(event)] == events_of(stream)
    assert all(len(events_of(event)) <= 1 for event in found)
    capture = LogprobCapture(LogprobRequest(b"", {"max_new_tokens": 4}), 10_000)
    told = b"".join(map(capture.feed, parts_of(stream, cuts))) + capture.rest()
    assert told == stream


def test_an_event_without_an_end_is_not_kept():
    event, long = b'data: {"choices":[]}\n\n', b"data: " + b"x" * 200
    capture = LogprobCapture(LogprobRequest(b"", {"max_new_tokens": 4}), line_bytes=100)

    assert [capture.feed(part) for part in (event + long[:50], long[50:], b"x" * 999)] == [
        event,
        long,
        b"x" * 999,
    ]
    assert (capture.rest(), capture.answer()) == (b"", {"lost": "overlong"})
    assert not capture.odd


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\r\n\r\n", b"a"),
        (b"data:  a\n\n", b" a"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data\n\n", b""),
        (b": c\nid: 1\n\n", None),
        (b"database: x\n\n", None),
        (b"event: e\rdata: a\r\r", b"a"),
    ],
)
def test_the_text_of_an_event(event, data):
    assert wire.data_of(event) == data


def test_another_text_leaves_the_other_lines_as_they_were():
    event = b": c\r\ndata: {\r\nid: 7\r\ndata: }\r\n\r\n"

    assert wire.with_data(event, b"[]") == b": c\r\ndata: []\r\nid: 7\r\n\r\n"


def chunk(text, ids=None, logprobs=None, prompt=None, finish=None, chat=False, nulls=False, **more):
    """An event of a reply; with what was asked for beside it, or without.

    Args:
        nulls: what was not asked for is null, as vLLM writes it.
    """
    choice = {"index": 0, "finish_reason": finish, "logprobs": logprobs}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    if ids is not None or nulls:
        choice["token_ids"] = ids
    if prompt is not None or nulls:
        choice["prompt_token_ids"] = prompt
    return {"id": "c1", "choices": [choice], **more}


TEXTS = st.text(max_size=4)


@given(
    st.lists(TEXTS, min_size=1, max_size=4),
    st.booleans(),
    ENDS,
    CUTS,
    st.booleans(),
    st.booleans(),
)
def test_a_sampled_stream_reads_as_one_that_was_not(texts, chat, end, cuts, cr_inside, nulls):
    last = len(texts) - 1
    full, plain = [b": hello" + end + end], [b": hello" + end + end]
    for i, text in enumerate(texts):
        finish = "stop" if i == last else None
        top = {"token_id:7": -0.5, "token_id:8": -0.9}
        logprobs = {"tokens": ["token_id:7"], "token_logprobs": [-0.5], "top_logprobs": [top]}
        if chat:
            listed = [{"token": name, "logprob": value} for name, value in top.items()]
            step = {"token": "token_id:7", "logprob": -0.5, "top_logprobs": listed}
            logprobs = {"content": [step]}
        with_ids = chunk(text, [7], logprobs, [1, 2] if not i else None, finish, chat, nulls)
        without = chunk(text, finish=finish, chat=chat, nulls=nulls)
        for events, event in ((full, with_ids), (plain, without)):
            said = json.dumps(event, indent=1 if cr_inside else None).encode()
            lines = b"".join(b"data: " + line + end for line in said.split(b"\n"))
            events.append(lines + end)
    for events in (full, plain):
        events.append(b"data: [DONE]" + end + end)
    capture = LogprobCapture(
        LogprobRequest(b"", {"max_new_tokens": 8}, best=2, chat=chat, kind=KIND[nulls]), 10_000
    )

    stream = b"".join(full)
    told = b"".join(capture.feed(part) for part in parts_of(stream, cuts)) + capture.rest()

    def read(stream):
        found = [wire.data_of(b"\n".join(event) + b"\n\n") for event in events_of(stream)]
        return [json.loads(one) if one and one[:1] == b"{" else one for one in found]

    assert read(told) == read(b"".join(plain))
    assert capture.answer() == {
        "token_ids": [7] * len(texts),
        "logprobs": [-0.5] * len(texts),
        "best": [[[7, -0.5], [8, -0.9]]] * len(texts),
        "finish": "stop",
    }
    assert capture.prompt == [1, 2]


def test_an_event_that_is_there_for_its_ids_alone_is_not_sent_on():
    """A reasoning parser of vLLM holds a token back, and sends its id where ids are asked for."""
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None, "token_ids": [5]}
    held = b"data: " + json.dumps({"id": "c1", "choices": [choice]}).encode() + b"\n\n"
    last = b"data: " + json.dumps({"choices": [{**choice, "finish_reason": "stop"}]}).encode()

    for nulls, told in ((True, b""), (False, b'data: {"id":')):
        wish = LogprobRequest(b"", {"max_new_tokens": 8}, chat=True, kind=KIND[nulls])
        capture = LogprobCapture(wish, 10_000)
        assert capture.feed(held).startswith(told) and bool(capture.feed(held)) == bool(told)
        assert b'"finish_reason": "stop"' in capture.feed(last + b"\n\n").replace(b'":"', b'": "')
        assert capture._ids == [5, 5, 5]

    capture = LogprobCapture(
        LogprobRequest(b"", {"max_new_tokens": 8}, ids=True, chat=True, kind=VLLM), 10_000
    )
    assert capture.feed(held) == held


@given(st.binary(max_size=200), CUTS)
def test_bytes_that_are_no_stream_of_ours_pass_as_they_are(stream, cuts):
    capture = LogprobCapture(LogprobRequest(b"", {"max_new_tokens": 8}), 10_000)

    told = b"".join(capture.feed(part) for part in parts_of(stream, cuts)) + capture.rest()

    assert told == stream
    assert "lost" in capture.answer()


@pytest.mark.parametrize("nan", ["NaN", "null", "Infinity"])
def test_a_logprob_that_is_no_number_is_odd_and_unknown(nan):
    body = '{"choices":[{"index":0,"text":"a","finish_reason":"length","token_ids":[3],'
    body += f'"prompt_token_ids":[1],"logprobs":{{"token_logprobs":[{nan}]}}}}]}}'
    capture = LogprobCapture(LogprobRequest(b"", {"max_new_tokens": 1}), 10_000)

    told = json.loads(capture.reply(body.encode()))

    assert told["choices"] == [
        {"index": 0, "text": "a", "finish_reason": "length", "logprobs": None}
    ]
    assert capture.odd == "unknown logprob"
    assert capture.answer() == {"token_ids": [3], "logprobs": [None], "finish": "length"}


def test_nothing_at_all_that_ended_by_its_length_is_odd():
    body = {"choices": [{"index": 0, "text": "", "finish_reason": "length", "token_ids": []}]}
    capture = LogprobCapture(LogprobRequest(b"", {"max_new_tokens": 1}), 10_000)
    capture.reply(json.dumps(body).encode())

    assert capture.odd == "empty answer"
    assert capture.answer() == {"lost": "without ids and logprobs"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"finish_reason": "content_filter"}, "ended by content_filter"),
        ({"finish_reason": None}, "ended by None"),
        ({"token_ids": [3, 4]}, "without ids and logprobs"),
        ({"token_ids": [-1]}, "without ids and logprobs"),
        ({"token_ids": [2**31]}, "without ids and logprobs"),
        ({"token_ids": None}, "without ids and logprobs"),
        ({"prompt_token_ids": None}, "without the prompt's ids"),
        ({"prompt_token_ids": []}, "without the prompt's ids"),
        ({"logprobs": {"token_logprobs": [0.1]}}, "malformed"),
        ({"logprobs": None}, "without ids and logprobs"),
    ],
)
def test_an_answer_that_a_row_could_not_hold_is_lost(change, why):
    choice = {
        "index": 0,
        "text": "a",
        "finish_reason": "stop",
        "token_ids": [3],
        "prompt_token_ids": [1],
        "logprobs": {"token_logprobs": [-0.1]},
    }
    capture = LogprobCapture(LogprobRequest(b"", {"max_new_tokens": 1}), 10_000)
    capture.reply(json.dumps({"choices": [{**choice, **change}]}).encode())

    assert capture.answer() == {"lost": why}


def test_a_stream_that_was_cut_is_lost():
    capture = LogprobCapture(LogprobRequest(b"", {"max_new_tokens": 4}), 10_000)
    capture.feed(b"data: " + json.dumps(chunk("a", [3], finish="stop")).encode() + b"\n\n")

    assert capture.answer() == {"lost": "cut"}


def test_an_error_in_a_stream_is_lost_and_passed_on():
    capture = LogprobCapture(LogprobRequest(b"", {"max_new_tokens": 4}), 10_000)
    event = b'data: {"error": {"message": "x"}}\n\n'

    assert capture.feed(event) == event
    assert capture.answer() == {"lost": "error"}


def step(token, logp, name="x"):
    """Of one token, as llama-server lists it."""
    likely = [{"id": token + i, "token": name, "logprob": logp - i} for i in range(2)]
    return {"id": token, "token": name, "logprob": logp, "top_logprobs": likely}


def of_llama(tokens, drawn=None, prompt=5):
    """A reply of llama-server, and the same to a client that asked for no logprobs."""
    choice = {"index": 0, "text": "ab", "finish_reason": "stop", "logprobs": None}
    usage = {"completion_tokens": drawn or len(tokens), "prompt_tokens": prompt}
    steps = [step(token, -0.5 - i) for i, token in enumerate(tokens)]
    shown = {**choice, "logprobs": {"content": steps}}
    return [{"choices": [one], "usage": usage} for one in (shown, choice)]


def test_llama_server_names_tokens_beside_their_logprobs():
    full, plain = of_llama([7, 3])
    capture = LogprobCapture(LogprobRequest(b"", {"max_new_tokens": 8}, best=2, kind=LLAMA), 10_000)

    assert json.loads(capture.reply(json.dumps(full).encode())) == plain
    assert capture.answer() == {
        "token_ids": [7, 3],
        "logprobs": [-0.5, -1.5],
        "finish": "stop",
        "best": [[[7, -0.5], [8, -1.5]], [[3, -1.5], [4, -2.5]]],
    }
    # anyone who resolves the row asks for the prompt, and holds it against this
    assert (capture.prompt, capture.prompt_tokens) == (None, 5)


def test_an_answer_of_llama_server_that_lacks_tokens_is_lost():
    """It lists none whose text ends in the middle of a character."""
    full, _ = of_llama([7, 3], drawn=3)
    capture = LogprobCapture(LogprobRequest(b"", {"max_new_tokens": 8}, kind=LLAMA), 10_000)
    capture.reply(json.dumps(full).encode())

    assert capture.answer() == {"lost": "without ids and logprobs"}


def test_a_chat_of_llama_server_that_asked_for_no_logprobs_has_none():
    full, _ = of_llama([7])
    choice = full["choices"][0]
    choice["message"] = {"role": "assistant", "content": choice.pop("text")}
    capture = LogprobCapture(
        LogprobRequest(b"", {"max_new_tokens": 8}, chat=True, kind=LLAMA), 10_000
    )

    told = json.loads(capture.reply(json.dumps(full).encode()))

    assert "logprobs" not in told["choices"][0] and capture.answer()["token_ids"] == [7]


def told(capture, *events):
    """What a client gets of these events, without [DONE]."""
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    text = b"".join(map(capture.feed, [*lines, b"data: [DONE]\n\n"])) + capture.rest()
    return [json.loads(line[6:]) for line in text.decode().split("\n\n") if line[6:7] == "{"]


def test_a_streamed_chat_of_sglang_has_its_ids_in_an_event_of_their_own():
    def event(delta, logp=None, **more):
        logprobs = None if logp is None else {"content": [{"token": "a", "logprob": logp}]}
        choice = {"index": 0, "delta": delta, "finish_reason": None, "matched_stop": None}
        return {"id": "c", "choices": [{**choice, "logprobs": logprobs, **more}]}

    first, word = event({"role": "assistant", "content": ""}), event({"content": "a"}, -0.5)
    held = event({}, -0.25)  # a parser keeps the text back, and the logprob comes alone
    last = event({}, finish_reason="stop", matched_stop=2)
    ids = {"id": "c", "choices": [], "usage": None}
    ids["sglext"] = {"input_ids": [1, 2, 3], "output_ids": [[7, 2], [9]]}
    usage = {"id": "c", "choices": [], "usage": {"prompt_tokens": 3}}
    capture = LogprobCapture(
        LogprobRequest(b"", {"max_new_tokens": 8}, chat=True, kind=SGLANG), 10_000
    )

    found = told(capture, first, word, held, last, ids, usage)

    assert found == [first, event({"content": "a"}), last, usage]
    assert capture.answer() == {"token_ids": [7, 2], "logprobs": [-0.5, -0.25], "finish": "stop"}
    assert capture.prompt == [1, 2, 3]


@pytest.mark.parametrize(
    ("more", "finish"),
    [
        ({"stop_reason": None}, "stop"),
        ({"stop_reason": "e"}, "stop_string"),
        ({"matched_stop": "e"}, "stop_string"),
        ({"stop_reason": 3}, "stop_string"),  # one of the client's
        ({"stop_reason": 4}, "stop"),  # one of the model's
        ({"finish_reason": "length"}, "length"),
        ({"finish_reason": "tool_calls"}, "stop"),
    ],
)
def test_what_ended_an_answer_is_what_the_server_says(more, finish):
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "token_ids": [3]}
    choice |= {"prompt_token_ids": [1], "logprobs": {"token_logprobs": [-0.1]}, **more}
    wish = LogprobRequest(b"", {"max_new_tokens": 1}, kind=VLLM, stop_ids=frozenset((3,)))
    capture = LogprobCapture(wish, 10_000)
    capture.reply(json.dumps({"choices": [choice]}).encode())

    assert capture.answer()["finish"] == finish


@pytest.mark.parametrize("streams", [False, True])
def test_of_several_choices_the_first_is_the_answer_in_whatever_order_they_come(streams):
    """And nothing that was asked for beside stays in the others."""

    def choice(index, token):
        found = {"index": index, "text": "a", "finish_reason": "length", "token_ids": [token]}
        return {**found, "logprobs": {"token_logprobs": [-float(token)]}, "prompt_token_ids": [1]}

    capture = LogprobCapture(LogprobRequest(b"", {"max_new_tokens": 2}, kind=VLLM), 10_000)
    bare = {"token_ids": None, "logprobs": None, "prompt_token_ids": None}
    choices = [choice(1, 9), choice(0, 7), choice(2, 8)]
    if streams:
        events = [{"choices": [one]} for one in choices]
        found = [one for event in told(capture, *events) for one in event["choices"]]
    else:
        found = json.loads(capture.reply(json.dumps({"choices": choices}).encode()))["choices"]

    assert found == [{**one, **bare} for one in choices]
    assert capture.answer() == {"token_ids": [7], "logprobs": [-7.0], "finish": "length"}
