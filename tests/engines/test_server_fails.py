# What clients get wrong, what engines get wrong, and what a server gets wrong on purpose.

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import threading
from dataclasses import replace

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.server.app import Limits, Server
from servanda.engines.server.scheduler import SEED, Ended, Job, QueueFullError, Scheduler
from servanda.engines.table import TableEngine
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch
from tests.engines.serving import WAIT_S, Gated, live, table_engine

URL = "/v1/completions"
BODY = {"prompt": [0, 1], "max_tokens": 6, "seed": 3, "return_token_ids": True, "logprobs": 0}


def served(engine, test_mode=False, **limits):
    return TestClient(Server(engine, "toy", Limits(**{"wait_s": 0.0} | limits), test_mode).app())


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with served(table_engine(tmp_path_factory.mktemp("toy"))) as client:
        yield client


# requests


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"stop": ["x"]}, "stop", "stop is not supported: it would change what is drawn"),
        ({"logit_bias": {"1": 5}}, "logit_bias", "would change what is drawn"),
        ({"presence_penalty": 0.5}, "presence_penalty", "would change what is drawn"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "would change what is drawn"),
        ({"best_of": 3}, "best_of", "would change what is drawn"),
        ({"ignore_eos": True}, "ignore_eos", "would change what is drawn"),
        ({"guided_json": {}}, "guided_json", "guided_json is not supported: it might change"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 1e-9}, "temperature", "a temperature is 0, or 0.01 at least"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"logprobs": 6}, "logprobs", "logprobs of 6, which is greater than max allowed: 5"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"prompt": []}, "prompt", "a text, token ids, or a list of either"),
        ({"prompt": [[0], []]}, "prompt", "none is empty"),
        ({"prompt": [True]}, "prompt", "a text, token ids, or a list of either"),
        ({"prompt": ""}, "prompt", "the prompt has no token"),
        ({"prompt": "a z"}, None, "the table has no token 'z'"),
        ({"prompt": [0, 5]}, "prompt", "prompt has the token id 5, and ids end at 4"),
        ({"prompt": [0], "n": 129}, "n", "less than or equal to 128"),
        ({"prompt": [[0]] * 65, "n": 2}, "n", "a request has 128 sequences at most"),
        ({"max_tokens": 4096}, "max_tokens", "2 tokens of prompt and 4096 new are more than"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "are not streamed"),
        ({"stream": True, "echo": True}, "echo", "the logprobs of a prompt are not streamed"),
        ({"add_special_tokens": True, "prompt": "a"}, "add_special_tokens", "as they are"),
        ({"trace_decode_token_ids": [0], "n": 2}, "n", "one continuation"),
        ({"trace_decode_token_ids": []}, "trace_decode_token_ids", "at least 1"),
        ({"trace_decode_token_ids": [0, 1], "max_tokens": 1}, "max_tokens", "2 tokens are given"),
        ({"trace_decode_token_ids": [9]}, "trace_decode_token_ids", "has the token id 9"),
        ({"model": 3}, "model", "valid string"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_a_request_that_cannot_be_met_is_refused_by_the_name_of_its_field(
    client, fields, param, message
):
    reply = client.post(URL, json={**BODY, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert error["param"] == param and message in error["message"], error


def test_fields_that_change_nothing_are_taken(client):
    plain = client.post(URL, json=BODY).json()["choices"]
    more = {"user": "u", "cache_salt": "s", "request_id": "r", "presence_penalty": 0.0, "stop": []}
    more |= {"repetition_penalty": 1, "guided_json": None, "best_of": 1, "top_k": -1, "min_p": 0}
    assert client.post(URL, json={**BODY, **more}).json()["choices"] == plain


def test_another_model_and_another_place_are_not_found(client):
    reply = client.post(URL, json={**BODY, "model": "gpt"})
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "there is no model 'gpt': this is 'toy'"
    assert client.get("/v2").status_code == 404 and client.get(URL).status_code == 405
    assert client.get("/v2").json()["error"]["type"] == "NotFoundError"
    assert client.post("/servanda/misbehave", json={"kind": "hang"}).status_code == 404


def test_a_body_that_is_no_json_object_is_refused(client):
    for body in (b"", b"{", b"[]", b'"a"', b"\xff", b"{" * 100_000, b'{"a":' * 100_000, b"NaN"):
        reply = client.post(URL, content=body)
        assert reply.status_code == 400 and reply.json()["error"]["message"]


NAMES = st.sampled_from(
    [
        *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n"),
        *("logprobs", "prompt_logprobs", "echo", "stream", "stream_options", "return_token_ids"),
        *("return_tokens_as_token_ids", "add_special_tokens", "trace_decode_token_ids", "stop"),
        *("best_of", "user", "messages", "tools", "tool_choice", "top_logprobs", "logit_bias"),
        *("max_completion_tokens", "self", "prompt_embeds"),
    ]
)
LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 9), st.integers(), st.floats(-2, 2)),
    *(st.text(max_size=4), st.sampled_from(["a b", "toy", "auto", [0, 1], [[0], "b"], {}])),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
GOOD = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.sampled_from(["a", "b c", [1, 2], [[0], [3]], ["a", [1]]]),
        "messages": st.just([{"role": "user", "content": "a"}]),
        "max_tokens": st.integers(0, 4),
        "n": st.integers(1, 3),
        "stream": st.booleans(),
        "logprobs": st.integers(-1, 5),
        "echo": st.booleans(),
        "prompt_logprobs": st.integers(0, 5),
        "top_k": st.integers(-1, 3),
        "temperature": st.sampled_from([0, 0.01, 0.5, 1, 100]),
        "trace_decode_token_ids": st.lists(st.integers(0, 4), max_size=3),
        "stream_options": st.just({"include_usage": True}),
        "return_tokens_as_token_ids": st.booleans(),
        "echo ": st.none(),
    },
)


class Chatting(TableEngine):
    def render(self, messages, tools=None):
        return " ".join(message["content"] for message in messages)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    with served(table_engine(tmp_path_factory.mktemp("toy"), cls=Chatting)) as client:
        yield client


@pytest.mark.slow
@given(
    good=GOOD,
    odd=st.dictionaries(NAMES, JSON, max_size=2),
    url=st.sampled_from([URL, "/v1/chat/completions", "/tokenize", "/detokenize"]),
)
def test_any_request_is_answered_or_refused_and_never_breaks_the_server(chatting, good, odd, url):
    body = {"max_tokens": 2, **good, **odd}
    if isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], 5)  # long answers are slow, not odd
    reply = chatting.post(url, content=json.dumps(body))
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert 400 <= reply.status_code < 500, error
        assert error["code"] == reply.status_code and error["message"]
    elif body.get("stream") and not url.endswith("tokenize"):
        *parts, done, last = reply.text.split("\n\n")
        assert (done, last) == ("data: [DONE]", "")
        assert all("error" not in json.loads(p.removeprefix("data: ")) for p in parts)
    elif url == URL:
        found = reply.json()
        assert all(c["finish_reason"] in ("stop", "length") for c in found["choices"])
        assert len(found["choices"]) % body.get("n", 1) == 0


# engines


class Broken(TableEngine):
    def steps(self, batch, sampling, seed, best=0):
        for at, step in enumerate(super().steps(batch, sampling, seed, best)):
            if batch.prompts[0][0] == 2 and at:
                raise RuntimeError("the device is on fire")
            yield step


def test_an_engine_that_fails_is_a_500_and_the_server_lives_on(tmp_path, capsys):
    with served(table_engine(tmp_path, cls=Broken)) as client:
        bad = {**BODY, "prompt": [2], "seed": 1}
        reply = client.post(URL, json=bad)
        assert reply.status_code == 500
        error = reply.json()["error"]
        assert error["message"] == "RuntimeError: the device is on fire"
        assert error["type"] == "InternalServerError"
        streamed = client.post(URL, json={**bad, "stream": True}).text.split("\n\n")
        assert "on fire" in streamed[-3] and streamed[-2:] == ["data: [DONE]", ""]
        assert client.post(URL, json=BODY).status_code == 200
    assert "RuntimeError: the device is on fire" in capsys.readouterr().err


def test_a_sequence_that_the_engine_lost_is_an_error_and_no_empty_answer(tmp_path):
    class Losing(TableEngine):
        def generate(self, batch, sampling, seed):
            trace = super().generate(batch, sampling, seed)
            none = {c: v[:0] for c, v in trace.columns.items()}
            no_S = trace.length_S * 0
            tokens = trace.token_N[:0]
            return replace(trace, length_S=no_S, lost_S=no_S == 0, token_N=tokens, columns=none)

    with served(table_engine(tmp_path, cls=Losing)) as client:
        reply = client.post(URL, json=BODY)
    assert reply.status_code == 500
    assert "the engine lost the sequence: nothing came" in reply.json()["error"]["message"]


# limits


def test_a_full_queue_sends_clients_away_and_says_when_to_come_back(tmp_path):
    engine = table_engine(tmp_path, cls=Gated)
    with (
        live(engine, max_batch=1, places=1) as (client, server),
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        runs = pool.submit(client.post, URL, json=BODY)
        assert engine.reached.acquire(timeout=WAIT_S)
        waits = pool.submit(client.post, URL, json=BODY)
        until(lambda: server.scheduler.waiting == 1)
        for more in ({}, {"stream": True}):
            reply = client.post(URL, json={**BODY, **more})
            assert reply.status_code == 429 and reply.headers["retry-after"] == "1"
            assert "the queue takes 1" in reply.json()["error"]["message"]
        engine.open()
        assert runs.result().json()["choices"] == waits.result().json()["choices"]


def test_requests_in_flight_and_bodies_are_bounded(tmp_path):
    engine = table_engine(tmp_path, cls=Gated)
    with live(engine, in_flight=1, body_bytes=1000) as (client, _):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            runs = pool.submit(client.post, URL, json={**BODY, "stream": True})
            assert engine.reached.acquire(timeout=WAIT_S)
            assert client.post(URL, json=BODY).status_code == 429
            engine.open()
            assert runs.result().status_code == 200
        reply = client.post(URL, json={**BODY, "user": "u" * 1000})
        assert reply.status_code == 413
        assert reply.json()["error"]["message"] == "a body has 1000 bytes at most"
        assert client.post(URL, json=BODY).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_hangs_up_frees_its_place_and_ends_its_batch(tmp_path, stream):
    engine = table_engine(tmp_path, {"": [1, 0, 0, 0, 0]}, cls=Gated)
    with live(engine, max_batch=1) as (client, server):
        calls = [_hung_up(client, {**BODY, "max_tokens": 4000, "stream": stream})]
        assert engine.reached.acquire(timeout=WAIT_S)
        calls.append(_hung_up(client, {**BODY, "stream": stream}))
        until(lambda: server.scheduler.waiting == 1)
        for call in reversed(calls):
            call.close()
        until(lambda: server.scheduler.waiting == 0)
        until(lambda: server._in_flight == 0)
        engine.gate.release()  # one more step, and the batch has no client
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reply = pool.submit(client.post, URL, json={**BODY, "max_tokens": 1})
            assert engine.reached.acquire(timeout=WAIT_S)
            engine.open()
            assert reply.result().json()["choices"][0]["token_ids"] == [0]
    assert len(engine.batches) == 2  # the second one's job was never run


def _hung_up(client, body):
    """A request on a socket of its own, to be closed by the test."""
    data = json.dumps(body).encode()
    call = socket.create_connection((client.base_url.host, client.base_url.port))
    head = f"POST {URL} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    call.sendall(head.encode() + data)
    return call


def until(true):
    """Asks again and again; a red test ends, too."""
    pause = threading.Event()
    for _ in range(WAIT_S * 200):
        if true():
            return
        pause.wait(0.005)
    raise AssertionError("it never came")


def test_who_waits_when_the_server_ends_is_told_so(tmp_path):
    engine, told = table_engine(tmp_path, cls=Gated), []
    scheduler = Scheduler(engine, max_batch=1, wait_s=0.0, places=2)
    jobs = [Job((0,), 3, Sampling(), seed, told.append) for seed in (1, 2)]
    scheduler.put(jobs[:1])
    assert engine.reached.acquire(timeout=WAIT_S)
    scheduler.put(jobs[1:])
    with pytest.raises(QueueFullError, match="1 sequences wait already, and the queue takes 2"):
        scheduler.put(jobs)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    until(lambda: scheduler._closing)
    engine.open()
    closing.join()
    endings = [str(event.error) for event in told if hasattr(event, "error")]
    assert endings == ["the server is ending"] * 2


# a transport that fails on purpose


def with_fault(folder):
    """Opens the toy kernel with a fault of the catalogue in it."""
    return lambda fault: open_engine(
        Kernel(engine="table", model=str(folder / "p.json"), fault=dict(fault))
    )


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    engine = table_engine(folder)
    with live(engine, test_mode=True, faulty=with_fault(folder)) as (client, _):
        yield client


@pytest.fixture
def fault(misbehaving):
    def begin(**fields):
        reply = misbehaving.post("/servanda/misbehave", json=fields)
        assert reply.status_code == 200, reply.text
        return misbehaving

    yield begin
    assert misbehaving.delete("/servanda/misbehave").json()["fault"] is None
    assert misbehaving.post(URL, json=BODY).status_code == 200


def test_a_status_comes_instead_of_an_answer(fault):
    reply = fault(kind="status", status=502).post(URL, json=BODY)
    assert reply.status_code == 502 and reply.json()["error"]["type"] == "Misbehaviour"


def test_a_dropped_request_has_no_answer_at_all(fault):
    client = fault(kind="drop")
    with pytest.raises(httpx2.TransportError):
        client.post(URL, json=BODY)


def test_a_garbled_answer_is_no_json(fault):
    reply = fault(kind="garble").post(URL, json=BODY)
    assert reply.status_code == 200
    with pytest.raises(ValueError, match="codec can't decode"):
        json.loads(reply.content)


def test_a_slow_or_hanging_server_outlasts_an_impatient_client(fault):
    for kind in ("hang", "slow"):
        client = fault(kind=kind, seconds=3600)
        with pytest.raises(httpx2.ReadTimeout):
            client.post(URL, json=BODY, timeout=httpx2.Timeout(WAIT_S, read=0.1))
    assert fault(kind="slow", seconds=0).post(URL, json=BODY).status_code == 200


def test_a_kernel_goes_wrong_from_the_next_batch_on_and_says_nothing_of_it(fault, tmp_path):
    def answers(client):
        asked = [client.post(URL, json={**BODY, "seed": seed}).json() for seed in range(20)]
        return [reply["choices"][0] for reply in asked]

    sound = table_engine(tmp_path)
    client = fault(kind="kernel", fault={"lost_top_token": 1.0})
    about, wrong = client.get("/servanda/describe").json(), answers(client)
    broken = with_fault(tmp_path)({"lost_top_token": 1.0})
    for seed, found in enumerate(wrong):
        drawn = broken.generate(Batch((seed,), ((0, 1),), 6), Sampling(), SEED)
        assert found["token_ids"] == drawn.token_N.tolist()
    assert client.get("/servanda/misbehave").json()["struck"] == 20
    client.delete("/servanda/misbehave")
    for seed, found in enumerate(answers(client)):
        drawn = sound.generate(Batch((seed,), ((0, 1),), 6), Sampling(), SEED)
        assert found["token_ids"] == drawn.token_N.tolist()
    assert client.get("/servanda/describe").json() == about


def test_a_kernel_goes_wrong_for_the_requests_of_one_kind_only(fault, tmp_path):
    def answers(client, **more):
        asked = [client.post(URL, json={**BODY, "seed": n, **more}).json() for n in range(20)]
        return [reply["choices"][0] for reply in asked]

    sound = table_engine(tmp_path)
    broken = with_fault(tmp_path)({"lost_top_token": 1.0})
    client = fault(kind="kernel", fault={"lost_top_token": 1.0}, when={"domain": "math"})
    others = ({}, {"metadata": {"domain": "code"}}, {"metadata": {"user": "math"}})
    for engine, more in ((broken, {"metadata": {"domain": "math"}}), *((sound, o) for o in others)):
        for seed, found in enumerate(answers(client, **more)):
            drawn = engine.generate(Batch((seed,), ((0, 1),), 6), Sampling(), SEED)
            assert found["token_ids"] == drawn.token_N.tolist()
    about = client.get("/servanda/misbehave").json()
    assert (about["asked"], about["struck"]) == (80, 20)


def test_who_is_struck_shares_no_batch_with_who_is_not(tmp_path):
    sound, other = table_engine(tmp_path, cls=Gated), table_engine(tmp_path, cls=Gated)
    scheduler = Scheduler(sound, max_batch=8, wait_s=60.0)
    asyncio.run(scheduler.run_by(sound, other))
    told = []
    jobs = [Job((0, 1), 2, Sampling(), n, told.append, aside=n % 2 == 1) for n in range(16)]
    scheduler.put(jobs)  # eight of each fill a batch
    sound.open()
    other.open()
    until(lambda: sum(isinstance(event, Ended) for event in told) == 16)
    assert sound.batches == [(0, 2, 4, 6, 8, 10, 12, 14)]
    assert other.batches == [(1, 3, 5, 7, 9, 11, 13, 15)]
    scheduler.close()


def test_a_batch_that_runs_is_ended_by_the_engine_that_began_it(tmp_path):
    sound, other = table_engine(tmp_path, cls=Gated), table_engine(tmp_path)
    scheduler = Scheduler(sound, max_batch=1, wait_s=0.0)
    told = []
    scheduler.put([Job((0, 1), 2, Sampling(), 0, told.append)])
    assert sound.reached.acquire(timeout=WAIT_S)  # in the midst of its first step
    with concurrent.futures.ThreadPoolExecutor() as pool:
        changed = pool.submit(lambda: asyncio.run(scheduler.run_by(other)))
        sound.open()
        changed.result(WAIT_S)
    assert isinstance(told[-1], Ended) and len(told) == 3
    assert scheduler.executor.engine is other
    scheduler.close()


def test_a_share_of_requests_is_struck_by_a_seed(fault):
    def struck(seed):
        client = fault(kind="status", share=0.3, seed=seed)
        found = [client.post(URL, json=BODY).status_code for _ in range(40)]
        about = client.get("/servanda/misbehave").json()
        assert about["asked"] == 40 and about["struck"] == found.count(503)
        return found

    first = struck(1)
    assert 4 < first.count(503) < 20
    assert struck(1) == first and struck(2) != first


def test_a_fault_that_is_none_is_refused(misbehaving):
    reply = misbehaving.post("/servanda/misbehave", json={"kind": "sulk"})
    assert reply.status_code == 400 and "'garble'" in reply.json()["error"]["message"]
    assert misbehaving.get("/servanda/misbehave").json()["fault"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "kernel"}, "kind kernel has a fault of the catalogue"),
        ({"kind": "slow", "fault": {"int4": True}}, "no other kind has one"),
        ({"kind": "kernel", "fault": {"int4": True}, "share": 0.5}, "at fault for all requests"),
        ({"kind": "slow", "when": {"domain": "math"}}, "only kind kernel has a `when`"),
        ({"kind": "kernel", "fault": {"int5": True}}, "there is no fault 'int5'"),
        ({"kind": "kernel", "fault": {"int4": True}}, "cannot be injected into TableEngine"),
    ],
)
def test_a_kernel_that_cannot_go_wrong_so_is_refused_and_goes_on(misbehaving, fields, message):
    reply = misbehaving.post("/servanda/misbehave", json=fields)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]
    assert misbehaving.get("/servanda/misbehave").json()["fault"] is None
    assert misbehaving.post(URL, json=BODY).status_code == 200


def test_a_server_that_cannot_open_its_kernel_again_says_so(tmp_path):
    with served(table_engine(tmp_path), test_mode=True) as client:
        body = {"kind": "kernel", "fault": {"lost_top_token": 1.0}}
        reply = client.post("/servanda/misbehave", json=body)
    assert reply.status_code == 400
    assert "cannot open its kernel again" in reply.json()["error"]["message"]
