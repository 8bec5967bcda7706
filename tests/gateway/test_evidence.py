# Sampled requests against a real server: users get what they would have got, rows get the rest.

import contextlib
import dataclasses
import json
import threading

import httpx2
import pytest

from servanda.cli.gateway_pools import Waits, urls_of
from servanda.cli.serve_processes import config_of
from servanda.engines.table import TableEngine
from servanda.errors import MeasurementError
from servanda.gateway.proxy import gateway
from servanda.gateway.proxy.config import Limits, Upstream
from servanda.gateway.proxy.logprob_request import REASONS, NoEvidence, logprob_request_of
from servanda.gateway.proxy.request import CompletionRequest
from servanda.runner.load import load
from servanda.traces.request_log import read_served
from tests import kit
from tests.engines.serving import live, table_engine
from tests.gateway.running import CONTRACT
from tests.gateway.serving import (
    NOBODY,
    WAIT_S,
    Fake,
    Running,
    config,
    eventually,
    everything,
    reply,
    snapshot,
    stream,
)

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


class Chatting(TableEngine):
    """A table whose chat template is one word after another."""

    def render(self, messages, tools):
        return "".join(message["content"] for message in messages)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    engine = table_engine(tmp_path_factory.mktemp("kernel"), cls=Chatting)
    with live(engine) as (client, _):
        yield str(client.base_url)


@pytest.fixture
def running(server):
    with Running(config(server, without="infer", waits={"best": 4}, controller=NOBODY)) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        yield running


def asked(path, **more):
    said = {"messages": [{"role": "user", "content": "a b"}]} if path == CHAT else {"prompt": "a b"}
    return {"model": "toy", **said, "max_tokens": 6, "temperature": 1.0, "seed": 11, **more}


def rows(running):
    """Rows that wait for a leader, as the leader would read them."""
    waiting = running.idle().launches.waiting()
    text = b"".join(row + b"\n" for row in waiting).decode()
    return read_served(text, "rows"), [json.loads(row) for row in waiting]


def events(text):
    found = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [json.loads(one) if one != "[DONE]" else one for one in found]


def without_id(reply):
    return {name: value for name, value in reply.items() if name not in ("id", "created")}


AS_IDS = {"return_tokens_as_token_ids": True, "return_token_ids": True}
OWN = {
    COMPLETION: [{}, {"logprobs": 2}, {"return_token_ids": True}, {"logprobs": 3, **AS_IDS}],
    CHAT: [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}, AS_IDS],
}
ASKED = [(path, own) for path, owns in OWN.items() for own in owns]


@pytest.mark.parametrize(("path", "own"), ASKED)
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_a_sampled_stream_is_the_one_that_was_asked_for(server, running, path, own, options):
    body = asked(path, stream=True, **own, **({"stream_options": options} if options else {}))
    plain = httpx2.post(server + path, json=body).raise_for_status().text

    told = running.client.post(path, json=body).text

    said = [without_id(e) if e != "[DONE]" else e for e in events(told)]
    assert said == [without_id(e) if e != "[DONE]" else e for e in events(plain)]
    assert told.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("path", "own"), ASKED)
def test_a_sampled_reply_is_the_one_that_was_asked_for(server, running, path, own):
    body = asked(path, **own)
    plain = httpx2.post(server + path, json=body).raise_for_status().json()

    told = running.client.post(path, json=body)

    assert without_id(told.json()) == without_id(plain)
    assert int(told.headers["content-length"]) == len(told.content)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_the_row_of_a_sampled_request_is_what_the_server_says(server, running, path, streams):
    full = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    full |= {"logprobs": 4} if path == COMPLETION else {"logprobs": True, "top_logprobs": 4}
    truth = httpx2.post(server + path, json=asked(path, **full)).json()
    choice = truth["choices"][0]

    running.client.post(path, json=asked(path, stream=streams, user="u1")).raise_for_status()

    (request,), (row,) = rows(running)
    assert list(request.tokens) == choice["token_ids"]
    prompt = choice.get("prompt_token_ids") or truth["prompt_token_ids"]
    assert list(request.prompt) == prompt == [0, 1]
    steps = choice["logprobs"]
    if path == COMPLETION:
        assert list(request.logp) == steps["token_logprobs"]
    else:
        assert list(request.logp) == [step["logprob"] for step in steps["content"]]
    assert all(len(step) == 4 for step in request.best)
    assert request.finish == choice["finish_reason"]
    assert row["sampling"] == {"max_new_tokens": 6, "temperature": 1.0, "seed": 11}
    assert (row["index"], row["served"], row["run"], row["leg"]) == (0, 1, "toy", "gateway")
    assert row["x-slices"] == ["all"] and row["x-chance"] == 1.0 and row["x-version"] == 1
    assert row["x-drawn"] == {"all": 1.0}
    assert "u1" not in json.dumps(row) and len(row["key"]) == 16


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_of_several_choices_the_one_with_index_0_is_the_row(server, running, path, streams):
    full = {"return_token_ids": True, "logprobs": True if path == CHAT else 1}
    truth = httpx2.post(server + path, json=asked(path, n=3, **full)).json()["choices"]
    plain = httpx2.post(server + path, json=asked(path, n=3, stream=streams))

    answer = running.client.post(path, json=asked(path, n=3, stream=streams))

    if streams:
        said, wanted = ([e for e in events(r.text) if e != "[DONE]"] for r in (answer, plain))
        assert sorted(json.dumps(without_id(e)) for e in said) == sorted(
            json.dumps(without_id(e)) for e in wanted
        )
    else:
        assert without_id(answer.json()) == without_id(plain.json())
    (request,), _ = rows(running)
    assert len(truth) == 3 and list(request.tokens) == truth[0]["token_ids"]


def test_a_chat_without_max_tokens_may_have_what_the_context_has_room_for(server):
    waits = {"context": 63, "best": 4}
    with Running(config(server, without="infer", waits=waits, controller=NOBODY)) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        body = asked(CHAT)
        del body["max_tokens"]
        running.client.post(CHAT, json=body).raise_for_status()

        (request,), (row,) = rows(running)
        assert row["sampling"]["max_new_tokens"] == 63 and request.tokens and not request.lost


def test_a_client_that_asked_for_logprobs_by_words_leaves_a_row_without_likeliest(running):
    running.client.post(COMPLETION, json=asked(COMPLETION, logprobs=2)).raise_for_status()

    (request,), _ = rows(running)
    assert request.tokens and request.best == ()


def test_a_filter_leaves_no_more_likeliest_than_its_top_k(running):
    running.client.post(COMPLETION, json=asked(COMPLETION, top_k=2)).raise_for_status()

    (request,), _ = rows(running)
    assert {len(step) for step in request.best} <= {1, 2}


def test_a_run_and_a_leg_are_those_of_the_route(running):
    running.gateway.take(
        snapshot(whole=everything(sample=1.0), version=2, run="r1", leg="canary-1")
    )
    for _ in range(3):
        running.client.post(COMPLETION, json=asked(COMPLETION)).raise_for_status()

    found, _ = rows(running)
    assert [(r.run, r.leg, r.index, r.served) for r in found] == [
        ("r1", "canary-1", i, i + 1) for i in range(3)
    ]


def test_a_pool_that_gives_fewer_likeliest_is_asked_for_as_many_as_it_gives(server):
    """The table has five tokens, and eight are asked for first."""
    with Running(config(server, without="infer", controller=NOBODY)) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        for _ in range(2):
            running.client.post(COMPLETION, json=asked(COMPLETION)).raise_for_status()
        running.idle().counts.reflexes.pop("no leader", None)

        first, second = rows(running)[0]
        assert first.lost == "refused"
        assert [len(step) for step in second.best] == [len(kit.TOKENS)] * len(second.tokens)
        assert running.idle().counts.reflexes == {"refused sample": 1}


FIELDS = [
    {"n": 0},
    {"echo": True},
    {"best_of": 2},
    {"suffix": "x"},
    {"presence_penalty": 0.1},
    {"frequency_penalty": -0.1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"3": 1}},
    {"min_tokens": 2},
    {"ignore_eos": True},
    {"use_beam_search": True},
    {"prompt_logprobs": 1},
    {"max_tokens": 0},
    {"max_tokens": "6"},
    {"guided_json": {}},
    {"structured_outputs": {}},
    {"prompt": ["a", "b"]},
    {"prompt": [[1], [2]]},
    {"prompt_embeds": "x"},
    {"temperature": "1"},
    {"seed": 1.5},
    {"some_day": 1},
    {"max_tokens": 2**63},
    {"seed": 2**63},
    {"top_k": -(2**63) - 1},
    {"logprobs": "2"},
    {"logprobs": True},
    {"return_token_ids": 1},
    {"stream": "yes"},
]
CHAT_FIELDS = [
    {"tools": [{"type": "function"}], "tool_choice": "required"},
    {"max_tokens": None},
    {"response_format": {"type": "json_object"}},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": []},
    {"modalities": ["text", "audio"]},
    {"logprobs": 1},
    {"logprobs": "true"},
    {"top_logprobs": 2},
    {"logprobs": False, "top_logprobs": 2},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("path", "field"),
    [(COMPLETION, f) for f in FIELDS] + [(CHAT, f) for f in CHAT_FIELDS],
    ids=str,
)
def test_what_cannot_be_evidence_is_launched_and_not_asked_for_logprobs(path, field):
    body = json.dumps(asked(path, **field)).encode()
    with Fake() as infer, Running(config(infer, without="infer")) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))

        running.client.post(path, content=body)

        assert infer.last.body == body
        assert running.idle().counts.launched == {"all": 1}
        assert running.idle().counts.sampled == 0


@pytest.mark.parametrize(
    "field",
    [b'"temperature":1e999', b'"seed":' + b"9" * 5000, b'"stop":"\xff"', b'"\xff":1'],
)
def test_what_cannot_be_read_is_the_upstreams_to_refuse(field):
    body = b'{"prompt":[1,2],"max_tokens":4,' + field + b"}"
    with (
        Fake(reply({"error": "no"}, status=400)) as infer,
        Fake() as stable,
        Running(config(infer, stable)) as running,
    ):
        running.gateway.take(snapshot(whole=everything(sample=1.0), version=1))
        assert running.client.post(COMPLETION, content=body).json() == {"error": "no"}
        away = everything(share=0.0, mirror=1.0, sample=1.0, acts=True)
        running.gateway.take(snapshot(whole=away, version=2))
        assert running.client.post(COMPLETION, content=body).json() == {"ok": True}

        assert stable.last.body == infer.requests[0].body == body
        assert running.idle().counts.sampled == 0


def test_a_label_that_cannot_be_read_is_none():
    one = CompletionRequest(b'{"prompt":"a","metadata":{"t":"\xff"}}', chat=False)

    assert one.labels({"t": "request.metadata.t"}, "", COMPLETION) == {}


@pytest.mark.parametrize(
    "field",
    [
        {"n": 1},
        {"stop": []},
        {"tools": []},
        {"response_format": {"type": "text"}},
        {"presence_penalty": 0.0},
        {"n": None, "stop": None, "logit_bias": None},
        {"max_tokens": None, "max_completion_tokens": 6},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"stream_options": {"include_usage": True}, "stream": True, "store": True},
    ],
    ids=str,
)
def test_what_changes_no_draw_can_be_evidence(field):
    pool = Upstream("http://x", defaults={})
    one = CompletionRequest(json.dumps(asked(CHAT, **field)).encode(), chat=True)

    assert logprob_request_of(one, pool, 8).sampling == {
        "max_new_tokens": 6,
        "temperature": 1.0,
        "seed": 11,
    }


@pytest.mark.parametrize(
    ("served", "evidence"), [("", True), ("toy", True), ("base", False), ("TOY", False)]
)
def test_an_adapter_that_is_asked_for_by_name_is_another_kernel(served, evidence):
    pool = Upstream("http://x", served=served, defaults={})
    one = CompletionRequest(json.dumps(asked(COMPLETION)).encode(), chat=False)

    with contextlib.nullcontext() if evidence else pytest.raises(NoEvidence, match=r"^another"):
        assert logprob_request_of(one, pool, 8).best == 8


NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@pytest.mark.parametrize(
    ("defaults", "said", "sampled"),
    [
        (NEUTRAL, {}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}),
        ({**NEUTRAL, "temperature": 0.4}, {}, {"temperature": 0.4}),
        ({"temperature": 0.4}, {"temperature": 1.0}, {"temperature": 1.0}),
        ({"temperature": 0.4}, {"temperature": None}, {"temperature": 0.4}),
        ({**NEUTRAL, "repetition_penalty": 1.1}, {}, "repetition_penalty"),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.0}, {}),
        (None, {"temperature": 1.0, "top_p": 1.0}, "sampling left to the server"),
        (None, NEUTRAL, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}),
        (None, {**NEUTRAL, "min_p": None}, "sampling left to the server"),
    ],
)
def test_what_a_request_leaves_unsaid_is_the_servers_where_that_is_known(defaults, said, sampled):
    """Clients that send no temperature are most of them; a folder may make theirs 0.4."""
    body = {"prompt": "a", "max_tokens": 4, **said}
    one = CompletionRequest(json.dumps(body).encode(), chat=False)
    pool = Upstream("http://x", defaults=defaults)

    if isinstance(sampled, str):
        with pytest.raises(NoEvidence, match=f"^{sampled}$"):
            logprob_request_of(one, pool, 8)
    else:
        wish = logprob_request_of(one, pool, 8)
        assert {k: wish.sampling[k] for k in sampled} == sampled
        sent = json.loads(wish.body)
        assert {k: sent[k] for k in body} == body and not sent.keys() & (NEUTRAL.keys() - said)


def test_infer_is_asked_what_it_is_until_it_says_so(server, monkeypatch):
    """A server that loads its model does not answer; what it is was then never asked again."""
    monkeypatch.setattr(gateway, "_MEET_S", 0.01)
    plain = config(server, without="infer", controller=NOBODY)
    answers = iter([MeasurementError("busy"), MeasurementError("busy"), plain.infer])
    asked_again = threading.Event()

    def met():
        asked_again.wait(WAIT_S)
        found = next(answers)
        if isinstance(found, MeasurementError):
            raise found
        return found

    unmet = dataclasses.replace(plain, infer=dataclasses.replace(plain.infer, probe=met))
    with Running(unmet) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        running.client.post(COMPLETION, json=asked(COMPLETION)).raise_for_status()
        counts = running.idle().counts
        assert counts.unsampled == {"infer has not said what it is": 1} and not counts.sampled

        asked_again.set()
        eventually(lambda: running.gateway.pools["infer"].servers[0].about.probe is None)
        running.client.post(COMPLETION, json=asked(COMPLETION)).raise_for_status()
        assert counts.sampled == 1


def test_why_requests_are_no_evidence_is_counted(server):
    with Running(config(server, without="infer", controller=NOBODY)) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        for more in ({"echo": True}, {"min_tokens": 2}, {"min_tokens": 3}, {"some_day": 1}, {}):
            running.client.post(COMPLETION, json=asked(COMPLETION, **more))
        running.client.post(CHAT, json=asked(CHAT, max_tokens=None))
        counts = running.idle().counts

    found = {"echo": 1, "min_tokens": 2, "no max_tokens": 1, "unknown field": 1}
    assert counts.unsampled == found and found.keys() <= {*REASONS}
    assert counts.sampled == 1


@pytest.mark.parametrize(("path", "logprobs"), [(COMPLETION, 8), (CHAT, True)])
def test_what_is_asked_for_beside_is_ids_and_logprobs_of_the_answer_alone(path, logprobs):
    words = '"prompt":"a\\u0062"' if path == COMPLETION else '"messages":[ {"role":"user"} ]'
    body = f'{{"max_tokens": 4,  {words}, "temperature":0.70}}'.encode()
    one = CompletionRequest(body, chat=path == CHAT)

    wish = logprob_request_of(one, Upstream("http://x", defaults={}), 8)

    more = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": logprobs}
    more |= {"top_logprobs": 8} if path == CHAT else {}
    assert json.loads(wish.body) == {**json.loads(body), **more}
    assert words.encode() in wish.body and b"0.70" in wish.body
    assert not {"prompt_logprobs", "logprobs_mode"} & json.loads(wish.body).keys()


def test_an_unsampled_request_is_asked_for_nothing_beside():
    body = json.dumps(asked(COMPLETION)).encode()
    with Fake() as infer, Running(config(infer, without="infer")) as running:
        running.gateway.take(snapshot(whole=everything(sample=0.0)))
        running.client.post(COMPLETION, content=body, headers={"accept-encoding": "gzip"})

        assert infer.last.body == body
        assert infer.last.headers["accept-encoding"] == "gzip"


def test_a_sampled_request_is_answered_unpacked():
    with Fake() as infer, Running(config(infer, without="infer")) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        running.client.post(COMPLETION, json=asked(COMPLETION), headers={"accept-encoding": "gzip"})

        assert infer.last.headers["accept-encoding"] == "identity"


def test_a_malformed_reply_to_a_sampled_request_passes_as_it_is():
    with Fake(reply(b"{not json")) as infer, Running(config(infer, without="infer")) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))

        answer = running.client.post(COMPLETION, json=asked(COMPLETION, prompt=[1, 2]))

        assert answer.content == b"{not json"
        running.idle().counts.reflexes.pop("no leader", None)
        assert running.idle().counts.reflexes == {"malformed": 1}


def test_an_event_that_is_longer_than_is_kept_passes_as_it_is():
    """The first event of a stream may hold the ids of a long prompt."""
    long, next_ = b"data: " + b"x" * 3_000_000 + b"\n\n", b'data: {"choices":[]}\n\n'
    limits = Limits(line_bytes=1000)
    with (
        Fake(stream(long, next_)) as infer,
        Running(config(infer, without="infer", limits=limits, controller=NOBODY)) as running,
    ):
        running.gateway.take(snapshot(whole=everything(sample=1.0)))

        told = running.client.post(COMPLETION, json=asked(COMPLETION, stream=True, prompt=[1]))

        assert told.content == long + next_
        assert [row["lost"] for row in rows(running)[1]] == ["overlong"]
        assert running.gateway.counts.statuses == {"infer\t2xx": 1}
        assert "malformed" not in running.gateway.counts.reflexes


@pytest.mark.parametrize("sends", [{}, {"share": 0.0, "mirror": 1.0, "acts": True}])
def test_a_body_that_is_too_large_to_be_taken_apart_is_served_and_no_evidence(sends):
    body = json.dumps(asked(COMPLETION, prompt="x" * 2000)).encode()
    limits = Limits(read_bytes=1000)
    with (
        Fake() as infer,
        Fake() as stable,
        Running(config(infer, stable, limits=limits)) as running,
    ):
        running.gateway.take(snapshot(whole=everything(sample=1.0, **sends)))
        running.client.post(COMPLETION, content=body).raise_for_status()

        (request,) = infer.requests + stable.requests
        assert request.body == body
        assert running.idle().counts.sampled == 0
        assert running.gateway.counts.mirror_dropped == bool(sends)


def odd():
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "token_ids": [3]}
    choice |= {"prompt_token_ids": [1], "logprobs": {"token_logprobs": [None]}}
    return reply({"choices": [choice]})


def test_answers_without_sense_send_the_traffic_to_stable_for_a_while():
    with (
        Fake(odd()) as infer,
        Fake(reply({"by": "stable"})) as stable,
        Running(config(infer, stable)) as running,
    ):
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        told = [running.client.post(COMPLETION, json=asked(COMPLETION)).json() for _ in range(5)]

        assert [one.get("by") for one in told] == [None, None, None, "stable", "stable"]
        assert running.idle().counts.reflexes["unknown logprob"] == 3
        assert [*running.idle().counts.decisions] == ["all\tinfer\tshare"]


def test_what_infer_says_of_itself_is_what_its_requests_are_judged_by(server, tmp_path):
    """Its context no contract declares, so it is asked again until it says so."""
    kit.table(tmp_path, "p.json", {"": kit.BASE})
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "labels": {"team": "a"}}')
    told = {"infer": server, "stable": "http://127.0.0.1:9", "mode": "observe"}
    declared = (
        f'url: "{server}", dialect: vllm, served: toy, sampling_defaults: {{temperature: 1.0}}'
    )
    text = CONTRACT.format(**told, sample=1, limit=0.1).replace(f'url: "{server}"', declared)
    (tmp_path / "c.yaml").write_text(text)
    contract, said = load(tmp_path / "c.yaml"), []

    known = config_of(contract, urls_of(contract, None, None), Waits(5.0, 5.0), said.append).infer
    gone = urls_of(contract, "http://127.0.0.1:9", "http://127.0.0.1:10")
    unknown = config_of(contract, gone, Waits(5.0, 5.0), said.append).infer

    assert (known.dialect, known.served, known.limit) == ("vllm", "toy", None)
    assert known.context == httpx2.get(f"{server}/v1/models").json()["data"][0]["max_model_len"] - 1
    assert not known.mute and not known.masks and known.probe is None
    assert unknown.probe is not None and any("does not respond yet" in line for line in said)
