# Dialects of which no server runs here: replies written by hand.
#
# SGLang's are after its documented native API (/generate, meta_info); nobody ran it for these
# tests.  The plain ones and those of `servanda tools serve-kernel` have vLLM's shape.

import json
import math

import numpy as np
import pytest

from servanda.contract.model import Kernel
from servanda.engines.http.dialects import DIALECTS, Server
from servanda.engines.http.dialects.base import NEUTRAL, SequenceRequest
from servanda.engines.http.engine import HTTPEngine
from servanda.engines.http.responses import Part
from servanda.engines.http.transport import Limits
from servanda.engines.http_policy import RetryPolicy
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch
from tests.engines.replaying import replaying

QUICK = Limits(connect_s=60.0, read_s=60.0, retry=RetryPolicy(tries=1))
ONE = Batch((0,), ((5, 6),), 3)
MODELS = {"data": [{"id": "m", "max_model_len": 64}]}


def part(value):
    return Part(value, "", "http://127.0.0.1:1", "/endpoint")


def asked(**fields):
    given = {"prompt": (5, 6), "width": 3, "sampling": NEUTRAL, "seed": 1, "best": 2}
    return SequenceRequest(**{**given, **fields})


def sglang():
    """The reply to a request for three tokens, the last of which ended it."""
    steps = [[-0.5, 7, None], [-2.0, 8, None], [-0.1, 2, None]]
    top = [
        [[-0.5, 7, None], [-1.5, 9, None]],
        [[-0.2, 9, None], [-1.9, 7, None]],  # the drawn token is not among the two likeliest
        [[-0.1, 2, None], [-3.0, 7, None]],
    ]
    meta = {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": steps,
        "output_top_logprobs": top,
    }
    return {"text": "x", "output_ids": [7, 8, 2], "meta_info": meta}


def sglang_rows():
    """The reply to the four tokens 5 6 7 8 as a prompt, from row 0 on."""
    rows = [[None, 5, None], [-3.0, 6, None], [-0.5, 7, None], [-2.0, 8, None]]
    top = [None, *([[[-0.5, 7, None], [-1.5, 9, None]]] * 3)]
    top[1] = [[-0.5, 9, None], [-1.5, 8, None]]
    top[3] = [[-0.1, 9, None], [-2.0, 8, None]]
    return {"meta_info": {"input_token_logprobs": rows, "input_top_logprobs": top}}


def test_sglang_is_read_with_the_likeliest_tokens_of_its_lists():
    answer = DIALECTS["sglang"]().drawn(part(sglang()), asked(), Server("m"))

    assert answer.tokens == (7, 8, 2) and answer.logp == (-0.5, -2.0, -0.1)
    assert answer.best[1] == ((9, -0.2), (7, -1.9))


def test_sglang_without_the_end_token_has_it_appended_with_an_unknown_logprob():
    """`matched` names the id, so nothing is guessed; its probability is not known."""
    reply = sglang()
    reply["output_ids"].pop()
    for name in ("output_token_logprobs", "output_top_logprobs"):
        reply["meta_info"][name].pop()

    answer = DIALECTS["sglang"]().drawn(part(reply), asked(), Server("m"))

    assert answer.tokens == (7, 8, 2) and math.isnan(answer.logp[2]) and answer.best[2] == ()


def test_sglang_scores_by_the_row_of_each_given_token():
    scored = DIALECTS["sglang"]().scored(
        part(sglang_rows()), asked(given=(7, 8)), Server("m"), "prefill"
    )

    assert scored.tokens == (7, 8) and scored.logp == (-0.5, -2.0)
    assert scored.best == (((7, -0.5), (9, -1.5)), ((9, -0.1), (8, -2.0)))


def test_sglang_with_rows_of_a_cached_prefix_missing_is_refused():
    reply = sglang_rows()
    del reply["meta_info"]["input_token_logprobs"][0]

    with pytest.raises(MeasurementError, match="has 3 entries for 4 tokens of the prompt"):
        DIALECTS["sglang"]().scored(part(reply), asked(given=(7, 8)), Server("m"), "prefill")


def test_sglang_with_another_prompt_is_refused():
    reply = sglang_rows()
    reply["meta_info"]["input_token_logprobs"][0][1] = 1

    with pytest.raises(MeasurementError, match=r"\[1, 6, 7, 8\], and \[5, 6, 7, 8\] was sent"):
        DIALECTS["sglang"]().scored(part(reply), asked(given=(7, 8)), Server("m"), "prefill")
    reply = sglang()
    reply["meta_info"]["prompt_tokens"] = 3
    with pytest.raises(MeasurementError, match="BOS"):
        DIALECTS["sglang"]().drawn(part(reply), asked(), Server("m"))


def test_sglang_logprobs_know_the_temperature_and_no_filter():
    refusal = DIALECTS["sglang"]().refusal

    assert refusal(Sampling(temperature=0.5), "processed") is None
    assert "before its filters" in refusal(Sampling(top_k=5), "processed")[0]
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in refusal(Sampling(temperature=0.5), "raw")[1]


def test_sglang_asks_for_everything_by_name():
    endpoint, body = DIALECTS["sglang"]().draw(asked(), Server("m"), "processed")

    assert endpoint == "/generate" and body["input_ids"] == [5, 6]
    assert body["sampling_params"] == {
        "max_new_tokens": 3,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "sampling_seed": 1,
        "n": 1,
        "stop": [],
        "ignore_eos": False,
    }
    _, scoring = DIALECTS["sglang"]().score(asked(given=(7, 8)), Server("m"), "prefill")
    assert scoring["input_ids"] == [5, 6, 7, 8] and scoring["logprob_start_len"] == 0
    assert scoring["sampling_params"]["max_new_tokens"] == 0


class Any:
    """A server that answers an endpoint with the same text, whatever is asked."""

    def __init__(self, server, pages):
        def answer(endpoint, body):
            server.asked.append((endpoint, body))
            value = pages.get(endpoint)
            if callable(value):
                value = value(body)
            return (404, "{}", {}) if value is None else (200, _text(value), {})

        server.answer = answer


def _text(value):
    return value if isinstance(value, str) else json.dumps(value)


def opened(server, pages, **fields):
    Any(server, pages)
    engine = HTTPEngine(Kernel(engine="openai_http", url=server.url, **fields), QUICK)
    server.stack.callback(engine.close)
    return engine


@pytest.fixture
def server():
    with replaying([]) as server:
        yield server


def one_token(body, more):
    """A reply of SGLang to any request: its prompt, and as many 7s as were asked for."""
    n = body["sampling_params"]["max_new_tokens"]
    k = body["top_logprobs_num"]
    step = [-0.5, 7, None]
    top = [[-0.5 - i, 7 + i, None] for i in range(k)]
    meta = {
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": n,
        "finish_reason": {"type": "length", "length": n},
        "output_token_logprobs": [step] * n,
        "output_top_logprobs": [top] * n,
        **more,
    }
    reply = {"output_ids": [7] * n, "meta_info": meta}
    return f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n" if body.get("stream") else reply


def test_sglang_is_found_out_drawn_from_flushed_and_timed(server):
    rows = {"input_token_logprobs": [[None, 5, None], [-3.0, 6, None], [-0.5, 7, None]]}
    eight = [[-0.5 - i, 7 + i, None] for i in range(8)]
    rows["input_top_logprobs"] = [None, None, eight]
    pages = {
        "/get_model_info": {"model_path": "m"},
        "/get_server_info": {"version": "0.5", "dtype": "bfloat16", "tp_size": 2},
        "/v1/models": MODELS,
        "/flush_cache": "flushed",
        "/generate": lambda body: one_token(body, rows),
    }
    engine = opened(server, pages)
    told = engine.describe()

    assert told.fingerprint["dialect"] == "sglang" and told.fingerprint["version"] == "0.5"
    assert told.fingerprint["dtype"] == "bfloat16" and told.fingerprint["tp_size"] == "2"
    assert told.fingerprint["logprobs"] == "processed" and told.scores == ("prefill",)
    assert not told.encodes and not told.decodes and told.context == 63
    drawn = engine.generate(ONE, Sampling(temperature=0.5), 3)
    assert drawn.token_N.tolist() == [7, 7, 7] and drawn.best[0].shape == (3, 8)
    scored = engine.score(Batch((0,), ((5, 6),), 3, ((7,),)), NEUTRAL, "prefill")
    assert scored.columns["logp"].tolist() == [-0.5]
    assert scored.best[0].tolist() == [[7, 8, 9, 10, 11, 12, 13, 14]]
    asked_of = [endpoint for endpoint, _ in server.asked]
    assert asked_of.index("/flush_cache") < len(asked_of) - 1
    assert engine.time(ONE, NEUTRAL, 3, record=False).tokens == 3


def plain_reply(body, **changes):
    n = body["max_tokens"]
    names = [f"token_id:{7}"] * n
    top = [{f"token_id:{7 + i}": -0.5 - i for i in range(body["logprobs"])} for _ in range(n)]
    logprobs = {"tokens": names, "token_logprobs": [-0.5] * n, "top_logprobs": top}
    choice = {"finish_reason": "length", "logprobs": logprobs, "text": "x" * n, **changes}
    return {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}


def test_a_plain_server_is_believed_where_token_ids_come_back(server):
    engine = opened(server, {"/v1/models": MODELS, "/v1/completions": plain_reply})

    told, drawn = engine.describe(), engine.generate(ONE, NEUTRAL, 3)

    assert told.fingerprint["dialect"] == "plain" and told.scores == () and told.top == 0
    assert drawn.token_N.tolist() == [7, 7, 7] and drawn.columns["logp"].tolist() == [-0.5] * 3


def test_a_plain_server_that_names_tokens_by_their_texts_is_refused(server):
    def texts(body):
        reply = plain_reply(body)
        reply["choices"][0]["logprobs"]["tokens"] = ["hello"] * body["max_tokens"]
        return reply

    with pytest.raises(MeasurementError, match='not "token_id:" and a number') as caught:
        opened(server, {"/v1/models": MODELS, "/v1/completions": texts})
    assert "do not tell ids" in str(caught.value)


def test_a_plain_server_that_says_nothing_of_its_prompt_is_refused(server):
    def silent(body):
        return {"choices": plain_reply(body)["choices"]}

    with pytest.raises(MeasurementError, match="usage is missing"):
        opened(server, {"/v1/models": MODELS, "/v1/completions": silent})


def test_what_a_plain_server_cannot_is_said():
    plain = DIALECTS["plain"]()

    assert plain.refusal(Sampling(top_p=0.5), "processed") is None
    assert "logprobs: processed" in plain.refusal(Sampling(top_p=0.5), "raw")[1]
    for verb in (plain.encode, plain.decode):
        with pytest.raises(MeasurementError, match="no endpoint of a plain server"):
            verb("x", Server("m"))


def servanda_reply(body):
    """What a server of ours answers: it replays the tokens that it is given."""
    reply = plain_reply({**body, "logprobs": body["logprobs"] or 0})
    given = body.get("trace_decode_token_ids") or [7] * body["max_tokens"]
    [choice] = reply["choices"]
    choice["logprobs"]["tokens"] = [f"token_id:{t}" for t in given]
    for token, step in zip(given, choice["logprobs"]["top_logprobs"], strict=False):
        step[f"token_id:{token}"] = -0.5
    return {"choices": [{**choice, "prompt_token_ids": body["prompt"], "token_ids": given}]}


def test_a_server_of_ours_says_what_it_knows_and_scores_by_decoding(server):
    about = {
        "version": "0.9",
        "weights": "feed",
        "tokens": "cafe",
        "vocab_size": 100,
        "eos": [2],
        "context": 50,
        "scores": ["prefill", "decode"],
        "logprobs": "processed",
        "fingerprint": {"dtype": "float32"},
    }
    pages = {
        "/servanda/describe": about,
        "/v1/models": MODELS,
        "/v1/completions": servanda_reply,
    }
    engine = opened(server, pages)
    told = engine.describe()

    assert told.weights == "feed" and told.tokens == "cafe" and told.eos == (2,)
    assert told.vocab_size == 100 and told.context == 63
    assert told.scores == ("prefill", "decode")
    assert told.fingerprint["kernel.dtype"] == "float32"
    assert told.fingerprint["logprobs"] == "processed"
    scored = engine.score(Batch((0,), ((5, 6),), 3, ((9, 8),)), NEUTRAL, "decode")
    assert scored.token_N.tolist() == [9, 8] and scored.about["path"] == "decode"
    assert np.isfinite(scored.columns["logp"]).all() and scored.best[0].shape == (2, 8)


def test_a_server_that_draws_instead_of_replaying_is_refused(server):
    def ignoring(body):
        return servanda_reply({**body, "trace_decode_token_ids": None})

    pages = {
        "/servanda/describe": {"scores": ["decode"]},
        "/v1/models": MODELS,
        "/v1/completions": ignoring,
    }
    engine = opened(server, pages)

    with pytest.raises(MeasurementError, match="drew instead of replaying"):
        engine.score(Batch((0,), ((5, 6),), 3, ((9, 8),)), NEUTRAL, "decode")
