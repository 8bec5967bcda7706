# The engine over HTTP, against what vLLM 0.32 and llama-server b1 really said.

import contextlib
import json
import math
from dataclasses import replace

import httpx2
import numpy as np
import pytest
from scripts.record_replies import BATCH, FILTERED, SEED, TEXTS

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.http.engine import HTTPEngine
from servanda.engines.http.transport import Limits
from servanda.engines.http_policy import RetryPolicy
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling, seed_of
from servanda.traces.trace import Batch
from tests.clock import eventually
from tests.engines.replaying import found, records, replaying

PLAIN = Sampling()
RETRY = RetryPolicy(tries=3, pause_s=0.5)
SMALL = Limits(connect_s=60.0, read_s=60.0, retry=RETRY, first_tries=2, most_bytes=1 << 20)
HASTY = replace(SMALL, read_s=0.3, token_s=0.0)
BITS = {"vllm": 53, "llamacpp": 31}
DRAWS = {"vllm": "/v1/completions", "llamacpp": "/completion"}


@pytest.fixture(params=["vllm", "llamacpp"])
def dialect(request):
    return request.param


@pytest.fixture
def server(dialect):
    with replaying(records(dialect)) as server:
        yield server


@pytest.fixture
def vllm():
    with replaying(records("vllm")) as server:
        yield server


def opened(server, pauses=None, limits=SMALL, **fields):
    kernel = Kernel(engine="openai_http", url=server.url, batch_size=4, **fields)
    engine = HTTPEngine(kernel, limits, (pauses if pauses is not None else []).append)
    server.stack.callback(engine.close)
    return engine


def drawn_by(dialect, row):
    """The recorded reply to one sequence of BATCH: ids, logprobs, and what was listed."""
    seed = seed_of(SEED, "http", BATCH.sequence_S[row], BITS[dialect])
    prompt = list(BATCH.prompts[row])
    if dialect == "vllm":
        reply = found("vllm", "/v1/completions", seed=seed, prompt=prompt, stream=None, logprobs=8)
        [choice] = reply["choices"]
        told = choice["logprobs"]
        lists = [
            {int(name.removeprefix("token_id:")): v for name, v in step.items()}
            for step in told["top_logprobs"]
        ]
        return choice["token_ids"], told["token_logprobs"], lists
    reply = found("llamacpp", "/completion", seed=seed, temperature=1.0, n_probs=8)
    steps = reply["completion_probabilities"]
    lists = [{t["id"]: t["logprob"] for t in step["top_logprobs"]} for step in steps]
    return reply["tokens"], [step["logprob"] for step in steps], lists


def rows_of(trace, column):
    return np.split(trace.columns[column], np.cumsum(trace.length_S)[:-1])


def test_a_server_says_what_it_is(server, dialect):
    described = opened(server).describe()

    assert described.fingerprint["dialect"] == dialect
    assert described.fingerprint["logprobs"] == "raw"
    assert described.fingerprint["version"] == {"vllm": "0.32.0", "llamacpp": "b1-0c1e570"}[dialect]
    assert described.context == 511 and described.capture == "float32" and described.timed
    assert not described.tensors and not described.tokens and not described.full_logits
    knows = {"vllm": ((), 0, ("prefill",), 20), "llamacpp": ((0,), 1024, (), 0)}[dialect]
    assert (described.eos, described.vocab_size, described.scores, described.top) == knows


def test_weights_are_the_word_of_who_declares_them(vllm):
    assert opened(vllm).describe().weights == ""
    assert opened(vllm, weights_from="0123abcd").describe().weights == "0123abcd"


def test_ids_and_logprobs_are_those_of_the_reply(server, dialect):
    trace = opened(server).generate(BATCH, PLAIN, SEED)

    assert trace.about["path"] == "decode" and trace.about["batch_size"] == "4"
    assert not trace.lost_S.any()
    for row, (tokens, logp) in enumerate(
        zip(trace.continuations, rows_of(trace, "logp"), strict=True)
    ):
        ids, values, _ = drawn_by(dialect, row)
        assert list(tokens) == ids and logp.tolist() == values


def test_an_ended_sequence_has_its_end_token_and_the_logprob_of_it(server, dialect):
    """Both real servers keep it; a server that drops it makes every answer look cut."""
    trace = opened(server).generate(BATCH, PLAIN, SEED)

    ended = [s for s, tokens in enumerate(trace.continuations) if tokens[-1] == 0]
    assert ended, "the exchange has an answer that ends by itself"
    for s in ended:
        assert trace.length_S[s] <= BATCH.width
        assert math.isfinite(rows_of(trace, "logp")[s][-1])


def test_the_best_tokens_are_fixed_before_the_draw(server, dialect):
    """vLLM lists k + 1 tokens where the drawn one is not among the k likeliest."""
    trace = opened(server).generate(BATCH, PLAIN, SEED)

    ids_NK, logp_NK = trace.best
    assert ids_NK.shape == (len(trace.token_N), 8) and (np.diff(logp_NK) <= 0).all()
    lists = [step for row in range(len(BATCH)) for step in drawn_by(dialect, row)[2]]
    appended = 0
    for step, ids, logp, token in zip(lists, ids_NK, logp_NK, trace.token_N, strict=True):
        likeliest = sorted(step, key=lambda t: (-step[t], t))[:8]
        assert ids.tolist() == likeliest and logp.tolist() == [step[t] for t in likeliest]
        appended += len(step) == 9 and token not in likeliest
    assert appended > 0 if dialect == "vllm" else appended == 0


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ((), "sequence 3 has an empty prompt"),
        ((5, -1), "sequence 3 has the token id -1, and the model's ids "),
        ((5,) * 511, "sequence 3 needs 535 tokens .* the model's context is 511"),
    ],
    ids=["empty", "id", "context"],
)
def test_a_sequence_that_cannot_be_run_is_named_and_not_sent(server, prompt, says):
    """The exchange has no reply to it."""
    with pytest.raises(MeasurementError, match=says):
        opened(server).generate(Batch((2, 3), ((5,), prompt), 24), PLAIN, SEED)


def test_a_sequence_without_tokens_is_scored_as_nothing_and_not_sent(vllm):
    trace = opened(vllm).score(Batch((2,), ((5,),), 1, ((),)), PLAIN, "prefill")

    assert trace.length_S.tolist() == [0] and not len(trace.token_N)


@pytest.mark.slow
def test_the_same_seed_is_the_same_draw_and_each_sequence_has_its_own(server):
    engine = opened(server)

    whole = engine.generate(BATCH, PLAIN, SEED)
    parts = [engine.generate(BATCH.take([row]), PLAIN, SEED) for row in range(len(BATCH))]

    assert whole.continuations == tuple(part.continuations[0] for part in parts)
    assert len({seed_of(SEED, "http", s, 53) for s in range(10_000)}) == 10_000
    assert all(0 <= seed_of(seed, "http", 0, 31) < 2**31 for seed in range(1000))


def test_every_sampling_parameter_is_in_every_request(dialect):
    """What a request leaves unsaid, a server fills in from a model's generation_config.json."""
    asked = [r["asked"] for r in records(dialect) if r["endpoint"] == DRAWS[dialect]]

    names = {"temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos"}
    names |= {"presence_penalty", "frequency_penalty"}
    names |= {"repetition_penalty", "n"} if dialect == "vllm" else {"repeat_penalty", "samplers"}
    for body in asked:
        assert names <= body.keys()
        assert all(isinstance(token, int) for token in body["prompt"])


def test_a_prompt_is_scored_by_the_row_of_each_token(vllm):
    """Row i is the distribution given tokens < i: a shift by one would not show in a mean."""
    engine = opened(vllm)
    drawn = engine.generate(BATCH, PLAIN, SEED)
    given = Batch(BATCH.sequence_S, BATCH.prompts, BATCH.width, drawn.continuations)

    scored = engine.score(given, PLAIN, "prefill")

    assert scored.continuations == drawn.continuations and scored.about["path"] == "prefill"
    for s, logp in enumerate(rows_of(scored, "logp")):
        text = [*BATCH.prompts[s], *drawn.continuations[s]]
        reply = found("vllm", "/v1/completions", prompt=text, prompt_logprobs=8)
        rows = reply["choices"][0]["prompt_logprobs"]
        first = len(BATCH.prompts[s])
        assert logp.tolist() == [rows[i][str(text[i])]["logprob"] for i in range(first, len(text))]
    # float32 on one core: scoring what was drawn says what drawing said
    assert np.abs(scored.columns["logp"] - drawn.columns["logp"]).max() < 1e-5
    # a guard sees how the other side draws: its likeliest tokens among those of this one
    (ids_NK, logp_NK), (own_NK, _) = scored.best, drawn.best
    assert ids_NK.shape == (len(drawn.token_N), 8) and (np.diff(logp_NK) <= 0).all()
    assert (np.sort(ids_NK) == np.sort(own_NK)).mean() > 0.99  # ties of float32 apart


def test_the_likeliest_tokens_of_a_given_position_leave_the_given_one_out(vllm):
    engine = opened(vllm)
    drawn = engine.generate(BATCH, PLAIN, SEED)
    given = Batch(BATCH.sequence_S, BATCH.prompts, BATCH.width, drawn.continuations).take([0, 1])

    top = engine.top(given, "prefill")

    ids_NK, logp_NK = top.best
    assert ids_NK.shape[1] == 20 and (np.diff(logp_NK) <= 0).all()
    at = 0
    for s in (0, 1):
        text = [*BATCH.prompts[s], *drawn.continuations[s]]
        reply = found("vllm", "/v1/completions", prompt=text, prompt_logprobs=20)
        for row in reply["choices"][0]["prompt_logprobs"][len(BATCH.prompts[s]) :]:
            by_rank = sorted(row, key=lambda name: row[name]["rank"])[:20]
            assert set(ids_NK[at].tolist()) == set(map(int, by_rank))
            at += 1
    assert at == len(ids_NK)


def test_texts_are_encoded_and_ids_decoded_by_the_server(server):
    engine = opened(server)
    drawn = engine.generate(BATCH, PLAIN, SEED)

    first, second = engine.encode(TEXTS)
    texts = engine.decode(drawn.continuations)

    assert first == [854, 79, 300, 77, 80, 655] and second
    assert len(texts) == 4 and all(isinstance(text, str) and text for text in texts)
    assert engine.decode([[]]) == [""]


def test_a_batch_is_timed_by_the_clock_of_who_waits(server):
    engine = opened(server)
    ticks = iter(range(1000))
    engine.clock = lambda: float(next(ticks))
    drawn = engine.generate(BATCH, PLAIN, SEED)

    timing = engine.time(BATCH.take([0, 1]), PLAIN, SEED, record=False)

    assert timing.tokens == int(drawn.length_S[:2].sum())
    assert min(timing.first_S) >= 1 and min(timing.gap_N) >= 1
    assert timing.wall >= max(timing.first_S)


def test_llama_server_gives_what_a_filtered_token_was_drawn_with():
    with replaying(records("llamacpp")) as server:
        trace = opened(server).generate(BATCH, FILTERED, SEED)

    reply = found("llamacpp", "/completion", seed=seed_of(SEED, "http", 0, 31), n_probs=3)
    probs = [step["prob"] for step in reply["completion_probabilities"]]
    assert np.exp(rows_of(trace, "logp")[0]) == pytest.approx(probs, rel=1e-12)
    assert trace.best[0].shape[1] == 3  # a top-k of 3 leaves no fourth


@pytest.mark.parametrize(("text", "left_out"), [("a\u3082", 3), ("a\u3082", 0), ("ab", 3)])
def test_llama_server_leaves_out_the_first_tokens_of_a_character(text, left_out):
    def shorter(reply):
        reply["content"] = text
        del reply["completion_probabilities"][left_out]
        return reply

    with replaying(records("llamacpp")) as server:
        engine = opened(server)
        whole = rows_of(engine.generate(BATCH.take([0]), PLAIN, SEED), "logp")[0]
        server.changed["/completion"] = changed(shorter)
        if text.isascii():
            with pytest.raises(MeasurementError, match="the server lost or added some"):
                engine.generate(BATCH.take([0]), PLAIN, SEED)
            return
        logp = rows_of(engine.generate(BATCH.take([0]), PLAIN, SEED), "logp")[0]

    assert np.flatnonzero(np.isnan(logp)).tolist() == [left_out]
    assert np.array_equal(np.delete(logp, left_out), np.delete(whole, left_out))


def test_raw_logprobs_and_another_order_of_filters_are_refused_where_the_draw_was_processed(vllm):
    engine = opened(vllm)

    with pytest.raises(MeasurementError, match="raw logprobs of drawn tokens") as caught:
        engine.generate(BATCH, FILTERED, SEED)

    assert "--logprobs-mode processed_logprobs" in str(caught.value)
    assert "logprobs: processed" in str(caught.value)
    with pytest.raises(MeasurementError, match="scores a prompt by raw logprobs"):
        engine.score(BATCH, Sampling(temperature=0.5), "prefill")
    engine = opened(vllm, logprobs="processed")

    with pytest.raises(MeasurementError, match="min-p before top-p"):
        engine.generate(BATCH, Sampling(top_p=0.9, min_p=0.1), SEED)


def test_what_a_server_cannot_is_refused_with_the_next_move(server, dialect):
    engine = opened(server)
    given = Batch((0,), ((5,),), 1, ((6,),))

    with pytest.raises(MeasurementError, match="cannot score given tokens by decode") as caught:
        engine.score(given, PLAIN, "decode")
    able = "--referee" if dialect in ("llamacpp", "plain") else ",path=prefill"
    assert able in str(caught.value)
    with pytest.raises(MeasurementError, match="no full logits"):
        engine.logits(given, "prefill")
    assert engine.vocabulary() == []
    if dialect == "llamacpp":
        with pytest.raises(MeasurementError, match="let it be infer"):
            engine.score(given, PLAIN, "prefill")
        with pytest.raises(MeasurementError, match="likeliest tokens of given positions"):
            engine.top(given, "prefill")


def changed(change):
    """A text of JSON with something done to its value."""

    def of(text):
        value = json.loads(text)
        change(value)
        return json.dumps(value)

    return of


def _bos(value):
    if value.get("choices") and value["choices"][0].get("prompt_token_ids"):
        value["choices"][0]["prompt_token_ids"].insert(0, 1)
    value["tokens_evaluated"] = value.get("tokens_evaluated", 0) + 1


def _short(value):
    for choice in value.get("choices", []):
        choice["token_ids"].pop()
    if "tokens" in value:
        value["tokens"].pop()


def _padded(value):
    value["tokens"][0] = 1030
    value["completion_probabilities"][0]["id"] = 1030


def test_a_bos_that_the_server_put_in_is_refused_with_both_heads(vllm):
    engine = opened(vllm)
    vllm.changed["/v1/completions"] = changed(_bos)

    with pytest.raises(MeasurementError) as caught:
        engine.generate(BATCH.take([0]), PLAIN, SEED)

    assert str(caught.value) == (
        f"{vllm.url}/v1/completions: choices[0].prompt_token_ids is [1, 5, 6, 7, 8], and "
        "[5, 6, 7, 8] was sent: the server put a token before the prompt (BOS), or encoded it "
        "anew\n  hint: serve the model without a BOS token of the server's own, and without a "
        "template"
    )


@pytest.mark.parametrize(
    ("change", "message", "next_move"),
    [
        (_bos, r"tokens_evaluated is 5, and 4 .* \(BOS\)", ""),
        (_padded, "1030, and the vocabulary ends at 1023", "padded beyond the tokenizer"),
    ],
)
def test_a_prompt_that_grew_in_length_and_an_id_of_the_padding_are_refused(
    change, message, next_move
):
    with replaying(records("llamacpp")) as server:
        engine = opened(server)
        server.changed["/completion"] = changed(change)
        with pytest.raises(MeasurementError, match=message) as caught:
            engine.generate(BATCH.take([0]), PLAIN, SEED)
    assert next_move in str(caught.value)


def test_a_wrong_number_of_tokens_is_refused(server, dialect):
    engine = opened(server)
    server.changed[DRAWS[dialect]] = changed(_short)

    with pytest.raises(MeasurementError, match="tokens"):
        engine.generate(BATCH, PLAIN, SEED)


def test_a_server_that_is_silent_to_everybody_is_given_up_at_once(server, dialect):
    pauses = []
    engine = opened(server, pauses)
    engine.transport.limits = HASTY
    server.troubled = (DRAWS[dialect],)
    server.troubles.extend(["hang"] * 4)

    with pytest.raises(MeasurementError) as caught:
        engine.generate(BATCH, PLAIN, SEED)

    said = f"{server.url}{DRAWS[dialect]} did not answer within 0.3 s\n"
    assert str(caught.value).startswith(said) and not pauses
    assert "timeout_s: 600" in str(caught.value)


def test_one_request_that_hangs_is_asked_again_where_others_are_answered(vllm, monkeypatch):
    pauses = []
    engine = opened(vllm, pauses)
    before = engine.generate(BATCH, PLAIN, SEED)
    sound, hung = engine.transport._response, []

    @contextlib.contextmanager
    def response(*request):
        if not hung:  # until another one was answered
            hung.append(engine.transport._heard)
            eventually(lambda: engine.transport._heard > hung[0])
            raise httpx2.ReadTimeout("")
        with sound(*request) as answer:
            yield answer

    monkeypatch.setattr(engine.transport, "_response", response)
    assert engine.generate(BATCH, PLAIN, SEED).continuations == before.continuations
    assert pauses == [0.5]


def test_a_longer_answer_is_waited_for_longer_unless_the_contract_says_how_long(vllm):
    assert opened(vllm, limits=Limits()).transport.patience(1024) == 120 + 256
    assert opened(vllm, limits=Limits(), timeout_s=30.0).transport.patience(1024) == 30


@pytest.mark.parametrize("field", ["version", "max_model_len"])
def test_a_server_that_became_another_one_is_refused_before_its_answers_are_kept(vllm, field):
    engine = opened(vllm)
    engine.generate(BATCH, PLAIN, SEED)

    def other(value):
        if field == "version":
            value["version"] = "0.33.0"
        else:
            value["data"][0][field] = 1024

    vllm.changed["/version" if field == "version" else "/v1/models"] = changed(other)

    with pytest.raises(MeasurementError) as caught:
        engine.generate(BATCH, PLAIN, SEED)
    what = {"version": "version", "max_model_len": "context"}[field]
    assert f"is no longer the server that was met: its {what} changed" in str(caught.value)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "troubles",
    [
        ["drop"],
        ["cut"],
        [(503, "loading", {}), (502, "<html>bad gateway</html>", {})],
        [(429, "", {})],
    ],
)
def test_what_may_pass_is_asked_again_and_is_the_same_draw(server, dialect, troubles):
    engine = opened(server)
    before = engine.generate(BATCH.take([0]), PLAIN, SEED)
    server.troubled = (DRAWS[dialect],)
    server.troubles.extend(troubles)

    after = engine.generate(BATCH.take([0]), PLAIN, SEED)

    assert after.token_N.tolist() == before.token_N.tolist()
    assert not server.troubles


def test_a_server_says_how_long_to_wait_and_is_believed_within_bounds(vllm):
    pauses = []
    engine = opened(vllm, pauses)
    vllm.troubled = ("/v1/completions",)
    vllm.troubles.extend([(429, "", {"retry-after": "7"}), (503, "", {"retry-after": "9999"})])

    engine.generate(BATCH.take([0]), PLAIN, SEED)

    assert pauses == [7.0, 60.0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("answer", "said", "hint"),
    [
        ((400, '{"error": "Token id 5000"}', {}), 'status 400: {"error": "Token id', "own words"),
        ((401, "", {}), "status 401", "`key_env: NAME` beside"),
        ((500, "Traceback", {}), "status 500: Traceback", "log"),
        ((307, "", {"location": "http://elsewhere"}), "status 307", "redirects are not followed"),
        ((200, "{", {}), "no JSON", "is it the right server"),
        ((200, "<html><p>Sign in</p></html>", {}), "an HTML page", "gateway"),
        ((200, "[1]", {}), "the reply is [1], not an object", "dialect"),
        ((200, "{}", {}), "is missing", "dialect"),
        ((200, '{"choices": [], "choices": []}', {}), "is there twice", "right server"),
        ((200, "[" * 100_000, {}), "no JSON", "right server"),
        ((200, '"' + "x" * (1 << 20) + '"', {}), "more than 1,048,576 bytes", "that long"),
    ],
)
def test_what_will_not_pass_is_an_error_at_once(vllm, answer, said, hint):
    pauses = []
    engine = opened(vllm, pauses)
    vllm.troubled = ("/v1/completions",)
    vllm.troubles.append(answer)

    with pytest.raises(MeasurementError) as caught:
        engine.generate(BATCH.take([0]), PLAIN, SEED)

    problem = caught.value.problems[0]
    assert problem.message.startswith(f"{vllm.url}/v1/completions")
    assert said in problem.message and hint in problem.hint and not pauses


def test_nobody_there_is_said_with_the_address():
    with replaying([]) as server:
        url = server.url
    with pytest.raises(MeasurementError, match=r"cannot be reached \(2 tries\)"):
        HTTPEngine(Kernel(engine="openai_http", url=url), SMALL, lambda _: None)


def test_a_model_has_to_be_named_where_there_are_two(vllm):
    def two(value):
        value["data"].append({**value["data"][0], "id": "other"})

    vllm.changed["/v1/models"] = changed(two)

    with pytest.raises(MeasurementError, match="serves 2 models: tiny-lm, other") as caught:
        opened(vllm)
    assert "kernels.*.served" in str(caught.value)
    assert opened(vllm, served="tiny-lm").describe().fingerprint["served"] == "tiny-lm"
    with pytest.raises(MeasurementError, match="no model 'third', only tiny-lm, other"):
        opened(vllm, served="third")


def test_a_dialect_that_the_server_does_not_speak_is_refused(vllm):
    with pytest.raises(MeasurementError, match="does not answer as a server of dialect 'sglang'"):
        opened(vllm, dialect="sglang")


def test_a_server_that_allows_fewer_logprobs_is_asked_for_fewer():
    """--max-logprobs 5: 20 are refused, and five are what is had."""
    refused = "Requested sample logprobs of 20, which is greater than max allowed: 5"
    told = [(400, json.dumps({"error": {"message": refused}}), {})]
    with replaying(records("vllm")) as server:
        server.troubled = ("/v1/completions",)
        server.troubles.extend(told)
        # nothing was recorded for five, so opening goes no further than asking for them
        with pytest.raises(MeasurementError, match="nothing was recorded"):
            opened(server)
    assert server.asked.count("/v1/completions") == 2


@pytest.mark.parametrize("url", [None, "127.0.0.1:8000", "ftp://a", "http://"])
def test_an_engine_without_an_address_is_refused(url):
    with pytest.raises(MeasurementError, match="needs the url of a server"):
        open_engine(Kernel(engine="openai_http", url=url))


def test_a_broken_stream_is_not_timed(server, dialect):
    engine = opened(server)
    server.changed[DRAWS[dialect]] = lambda text: text[: text.index("\n\n") + 2]

    with pytest.raises(MeasurementError, match="streamed 1 tokens and no end"):
        engine.time(BATCH.take([0]), PLAIN, SEED, record=False)


def test_an_error_inside_a_stream_is_said(vllm):
    engine = opened(vllm)
    vllm.changed["/v1/completions"] = lambda _: 'data: {"error": {"message": "died"}}\n\n'

    with pytest.raises(MeasurementError, match="died"):
        engine.time(BATCH.take([0]), PLAIN, SEED, record=False)
