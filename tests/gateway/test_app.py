# What a user of a gateway sees: paths, bodies, headers, limits and errors.

import gzip
import json
import socket

import pytest

from servanda.errors import ContractError
from servanda.gateway.http.api_keys import Keys
from servanda.gateway.proxy.config import Config, Limits, Upstream
from servanda.gateway.routing.model import SliceRoute
from servanda.judgement.slices.rules import Cut, Term
from tests.clock import HOUR_S, NEVER_S
from tests.gateway.serving import (
    FOREVER,
    Fake,
    Running,
    config,
    drop,
    eventually,
    everything,
    reply,
    snapshot,
    stream,
    waits_for,
)

ASK = {"model": "m", "prompt": "hello", "max_tokens": 4}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
EVENTS = (b'data: {"choices":[{"index":0,"text":"a"}]}\n\n', b": hi\r\n\r\n", b"data: [DONE]\n\n")


@pytest.fixture
def pools():
    with Fake(reply({"by": "infer"})) as infer, Fake(reply({"by": "stable"})) as stable:
        yield infer, stable


@pytest.fixture
def running(pools):
    with Running(config(*pools, allow=("/v1/files/*", "/v1/responses/*"))) as running:
        yield running


def error(answer):
    return answer.json()["error"]


def test_before_any_snapshot_stable_answers_with_the_very_bytes(pools, running):
    infer, stable = pools
    body = json.dumps(ASK, indent=3).encode() + b"\n "
    odd = b'{ "by" :  "stable", "x":1e0 }'
    stable.script = reply(odd, x_upstream="yes")
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = running.client.post(path, content=body)

        assert (answer.status_code, answer.content) == (200, odd)
        assert answer.headers["x-upstream"] == "yes"
        assert (stable.last.target, stable.last.body) == (path, body)
    assert not infer.requests


@pytest.mark.parametrize("size", [100, 70_000, 3_000_000])
def test_replies_of_any_length_come_as_they_are(pools, running, size):
    body = json.dumps({"text": "x" * size}).encode()
    pools[1].script = reply(body)

    assert running.client.post("/v1/completions", json=ASK).content == body


def test_a_prompt_of_a_megabyte_passes_untouched(pools, running):
    body = json.dumps({**ASK, "prompt": "é\\u00e9" * 200_000}).encode()

    assert running.client.post("/v1/completions", content=body).status_code == 200
    assert pools[1].last.body == body


def test_a_stream_comes_as_it_is(pools, running):
    pools[1].script = stream(*EVENTS)

    with running.client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.read() == b"".join(EVENTS)


def test_a_reply_that_was_packed_stays_packed(pools, running):
    packed = gzip.compress(b'{"by": "stable"}')
    pools[1].script = reply(packed, content_encoding="gzip")

    answer = running.client.post("/v1/completions", json=ASK, headers={"accept-encoding": "gzip"})

    assert answer.json() == {"by": "stable"}
    assert pools[1].last.headers["accept-encoding"] == "gzip"


def test_nothing_is_said_of_encodings_that_the_client_did_not_say(pools, running):
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        body = json.dumps(ASK).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        client.sendall(head.encode() + b"connection: close\r\n\r\n" + body)
        while client.recv(65_536):
            pass

    assert {"accept-encoding", "user-agent", "accept"}.isdisjoint(pools[1].last.headers)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT", "PATCH"])
def test_other_paths_of_the_api_pass_byte_for_byte(pools, running, method):
    infer, stable = pools
    running.gateway.take(snapshot(whole=everything(share=1.0, sample=1.0, mirror=1.0)))
    stable.script = reply(b"\x00\xff", media="audio/wav")
    body = b"\x00--not json--\xff" * 5000 if method != "GET" else b""

    answer = running.client.request(method, "/v1/responses/r1?a=%20b&c", content=body)

    assert answer.content == b"\x00\xff"
    assert (stable.last.method, stable.last.target) == (method, "/v1/responses/r1?a=%20b&c")
    assert stable.last.body == body
    assert not infer.requests


@pytest.mark.parametrize("path", ["/v1/models/org%2Fname", "/v1/files/a%20b", "/v1/files/%C3%A9"])
def test_an_encoded_path_passes_as_it_was_encoded(pools, running, path):
    assert running.client.get(path).status_code == 200
    assert pools[1].last.target == path


def test_a_stream_of_another_path_comes_as_it_is(pools, running):
    pools[1].script = stream(*EVENTS)

    assert running.client.post("/v1/responses", json={}).content == b"".join(EVENTS)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/metrics",
        "/health",
        "/version",
        "/tokenize",
        "/servanda/misbehave",
        "/v1/follow",
        "/v1/status",
        "/v1/route/decide",
        "/v1/route/snapshot",
        "/v1/admin/pin",
        "/v1/admin",
        "/v1/../metrics",
        "/v1/%2e%2e/metrics",
        "/v1/..%2fmetrics",
        "/v1//metrics",
        "/v1/./models",
        "/v1/a%5c..%5cb",
        "/v1/a%00b",
        "/v1/a%252e",
        "/v1/a%zz",
        "/v1/a%ff",
        "/v1%2Ffollow",
        "/v2/completions",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_whatever_is_no_users_business_does_not_exist(pools, running, path, method):
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n"
        client.sendall(head.encode() + b"connection: close\r\n\r\n")
        answer = b""
        while part := client.recv(65_536):
            answer += part

    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"there is no such path: ask under /v1" in answer
    assert not pools[0].requests and not pools[1].requests


def test_it_is_well_by_itself(running):
    assert running.client.get("/healthz").text == "ok\n"


def test_models_are_those_of_a_pool_that_answers(pools, running):
    infer, stable = pools
    stable.script, infer.script = drop, reply({"data": [{"id": "m"}]})

    assert running.client.get("/v1/models").json() == {"data": [{"id": "m"}]}
    assert infer.last.target == "/v1/models"


def test_no_models_where_no_pool_answers(pools, running):
    pools[0].script = pools[1].script = drop

    answer = running.client.get("/v1/models")

    assert answer.status_code == 503
    assert error(answer) == {
        "message": "no pool answers; try again",
        "type": "overloaded_error",
        "param": None,
        "code": "no_pool",
    }


def test_headers_of_the_connection_and_of_ours_stay_here(pools, running):
    given = {
        "x-servanda-mirror": "1",
        "x-servanda-pool": "infer",
        "x-mirror-cluster": "evil",
        "x-envoy-original-path": "/",
        "proxy-authorization": "Basic x",
        "x-forwarded-host": "evil",
        "x-forwarded-for": "10.0.0.1",
        "x-forwarded-proto": "https",
        "x-forwarded-prefix": "/admin",
        "forwarded": "for=10.0.0.1;host=evil",
        "x-real-ip": "10.0.0.1",
        "true-client-ip": "10.0.0.1",
        "x-original-url": "/metrics",
        "x-original-forwarded-for": "10.0.0.1",
        "te": "trailers",
        "connection": "x-secret",
        "x-secret": "1",
        "x-session-id": "s1",
        "x-gateway-destination": "kept",
        "authorization": "Bearer mine",
    }

    running.client.post("/v1/completions", json=ASK, headers=given)

    found = pools[1].last.headers
    assert {name for name in given if name in found} == {
        "x-session-id",
        "x-gateway-destination",
        "authorization",
    }
    assert found["authorization"] == "Bearer mine"
    assert found["host"] == pools[1].url.removeprefix("http://")


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
def test_a_request_without_a_body_has_none_upstream(pools, running, method):
    running.client.request(method, "/v1/files/a").raise_for_status()

    (request,) = pools[1].requests
    assert "transfer-encoding" not in request.headers
    assert request.headers.get("content-length", "0") == "0"


def test_a_body_in_chunks_passes_whatever_the_method(pools, running):
    parts = iter([b"a", b"b"])
    running.client.request("GET", "/v1/files/a", content=parts).raise_for_status()

    assert pools[1].last.body == b"ab"


@pytest.mark.parametrize("size", [5, 100_000])
@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_reply_without_a_body_may_say_how_long_one_is(pools, running, method, size):
    async def unchanged(request, writer):
        status = 200 if request.method == "HEAD" else 304
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\netag: a\r\n\r\n" % (status, size))

    pools[1].script = unchanged
    for _ in range(2):
        answer = running.client.request(method, "/v1/files/a")

        assert (answer.status_code, answer.content) == (200 if method == "HEAD" else 304, b"")
        assert answer.headers["etag"] == "a"
    assert running.idle().counts.in_flight["stable"] == 0


def test_what_a_connection_upstream_names_stays_there(pools, running):
    pools[1].script = reply(
        {}, connection="keep-alive, x-hop", x_hop="1", alt_svc='h3=":9"', x_a="2"
    )

    answer = running.client.post("/v1/completions", json=ASK)

    assert answer.headers["x-a"] == "2"
    assert not {"x-hop", "alt-svc"} & {*answer.headers}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_nobody_is_led_to_another_protocol(pools, running, path):
    async def switch(request, writer):
        writer.write(b"HTTP/1.1 101 X\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")

    pools[1].script = switch
    answer = running.client.post(path, json=ASK)

    assert answer.status_code == 502


@pytest.mark.parametrize("status", [204, 205, 404])
def test_a_reply_of_nothing_is_passed_as_it_is(pools, running, status):
    async def nothing(request, writer):
        writer.write(b"HTTP/1.1 %d X\r\n" % status)
        writer.write(b"\r\n" if status == 204 else b"content-length: 0\r\n\r\n")

    pools[1].script = nothing
    for path in ("/v1/files/a", "/v1/completions"):
        assert running.client.post(path, json=ASK).status_code == status
        assert running.client.post(path, json=ASK).content == b""


def test_hints_before_a_reply_and_bytes_behind_it_are_not_the_reply(pools, running):
    async def more(request, writer):
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\nevil")

    pools[1].script = more
    for _ in range(3):
        answer = running.client.post("/v1/completions", json=ASK)
        assert (answer.content, "link" in answer.headers) == (b"ok", False)


def test_headers_of_an_upstream_that_are_its_connections_stay_there(pools, running):
    pools[1].script = reply({}, keep_alive="timeout=5", x_servanda_pool="evil", set_cookie="a=b")

    answer = running.client.post("/v1/completions", json=ASK)
    running.client.cookies.clear()
    running.client.post("/v1/completions", json=ASK)

    assert {"keep-alive", "x-servanda-pool", "x-servanda-decision"}.isdisjoint(answer.headers)
    assert "cookie" not in pools[1].last.headers  # nobody gets what another one was given


def test_replies_say_who_answered_where_that_is_wanted(pools):
    with Running(config(*pools, shows=True)) as running:
        answers = [running.client.post("/v1/completions", json=ASK) for _ in range(2)]

    assert [a.headers["x-servanda-pool"] for a in answers] == ["stable"] * 2
    first, second = (a.headers["x-servanda-decision"] for a in answers)
    assert first != second


def test_a_redirect_is_not_followed(pools, running):
    pools[1].script = reply({}, status=302, location=f"{pools[0].url}/v1/completions")

    for path in ("/v1/completions", "/v1/embeddings"):
        answer = running.client.post(path, json=ASK)

        assert answer.status_code == 502
        assert error(answer)["message"].startswith("stable answers with a redirect")
    assert not pools[0].requests


@pytest.mark.parametrize("name", ["api_base", "base_url", "api_key", "proxies"])
def test_a_body_does_not_say_where_it_goes(pools, running, name):
    answer = running.client.post("/v1/completions", json={**ASK, name: "http://169.254.169.254"})

    assert answer.status_code == 400
    assert error(answer)["message"] == (
        f"{name!r} is not for a request to say: leave it out, this gateway's upstreams are those "
        "that it was started with"
    )
    assert not pools[1].requests


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt": NaN}', b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(running, body):
    answer = running.client.post("/v1/completions", content=body)

    assert answer.status_code == 400
    assert error(answer)["message"].startswith("the body is not an object of JSON: ")


def test_completions_are_posted(running):
    answer = running.client.get("/v1/completions")

    assert (answer.status_code, error(answer)["message"]) == (405, "/v1/completions takes POST")


KEYS = Keys(("anna", "client", "anna's-key-0123456789"), ("root", "admin", "root's-key-0123456789"))


def test_users_need_a_key_where_there_are_keys(pools):
    with Running(config(*pools, keys=KEYS.plus())) as running:
        wrong = (None, "Bearer x", "Bearer root's-key-0123456789", "Bearer anna's-key-012345678")
        for given in wrong:
            for path in ("/v1/completions", "/v1/models", "/v1/responses"):
                headers = {"authorization": given} if given else {}
                answer = running.client.post(path, json=ASK, headers=headers)

                assert answer.status_code == 401
                assert error(answer)["message"] == (
                    "no such key: give a key of role client as `Authorization: Bearer KEY`"
                )
        assert not pools[0].requests and not pools[1].requests
        assert running.gateway.report()["refused_keys"] == {"gateway": 9}
        given = {"authorization": "Bearer anna's-key-0123456789"}
        assert running.client.post("/v1/completions", json=ASK, headers=given).is_success
        assert "authorization" not in pools[1].last.headers


def test_an_upstreams_key_is_the_configurations(pools):
    infer, stable = pools
    own = Config(Upstream(infer.url), Upstream(stable.url, key="theirs"), keys=KEYS)
    assert "theirs" not in repr(own)
    with Running(own) as running:
        given = {"authorization": "Bearer anna's-key-0123456789"}
        running.client.post("/v1/completions", json=ASK, headers=given)
        assert stable.last.headers["authorization"] == "Bearer theirs"


def test_a_body_that_is_too_long_is_refused(pools):
    limits = Limits(body_bytes=10_000)
    with Running(config(*pools, limits=limits)) as running:
        for path in ("/v1/completions", "/v1/embeddings"):
            answer = running.client.post(path, content=b"x" * 10_001)

            assert answer.status_code == 413
            assert error(answer)["message"] == "a body has 10,000 bytes at most: send less"
            chunks = running.client.post(path, content=iter([b"x" * 4000] * 4))
            assert chunks.status_code == 413
    assert not any(len(r.body) > 10_000 for r in pools[1].requests)


def test_headers_that_are_too_long_are_refused(pools):
    with Running(config(*pools, limits=Limits(header_bytes=2000))) as running:
        answer = running.client.post("/v1/completions", json=ASK, headers={"x-long": "x" * 2000})

        assert answer.status_code == 431
        assert error(answer)["message"] == "the headers have 2,000 bytes at most"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_a_body_that_does_not_come_is_not_waited_for(pools, path):
    given = config(*pools, limits=Limits(body_s=HOUR_S), waits={"total_s": NEVER_S})
    with (
        Running(given, skips=True) as running,
        socket.create_connection(("127.0.0.1", running.port)) as client,
    ):
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nx"
        client.sendall(head.encode())
        if path == "/v1/embeddings":  # no connection is waited for any more
            eventually(lambda: pools[1].heads)
        running.clock.skip(HOUR_S, waits_for("body"))
        assert client.recv(65_536).startswith(b"HTTP/1.1 408 ")


def test_a_contract_that_refuses_what_is_outside_says_its_limits(pools, running):
    running.gateway.take(snapshot(prompt_tokens=(2, 5), outside="refuse"))

    answer = running.client.post("/v1/completions", json={**ASK, "prompt": [1] * 6})

    assert answer.status_code == 422
    assert error(answer)["message"] == (
        "the prompt has 6 tokens, and the contract promises 2 to 5: send one of that length"
    )
    inside = running.client.post("/v1/completions", json={**ASK, "prompt": [1] * 5})
    assert inside.is_success


def test_a_pool_that_is_not_there_is_said_to_be_none(pools):
    with Running(config(pools[0], without="infer")) as running:
        running.gateway.take(snapshot(whole=everything(share=0.0, acts=True)))

        answer = running.client.post("/v1/completions", json=ASK)

        assert answer.status_code == 503
        assert error(answer)["message"].startswith("the route sends this request to stable, and")
        assert answer.headers["retry-after"] == "5"


def test_a_snapshot_that_has_expired_leaves_the_traffic_to_stable(pools, running):
    infer, stable = pools
    running.gateway.take(snapshot(whole=everything(acts=True), valid_until=FOREVER))
    running.client.post("/v1/completions", json=ASK)
    running.gateway.take(snapshot(whole=everything(acts=True), valid_until=0.0, version=2))
    running.client.post("/v1/completions", json=ASK)

    assert (len(infer.requests), len(stable.requests)) == (1, 1)


def test_an_older_snapshot_is_not_followed(pools, running):
    assert running.gateway.take(snapshot(version=7))
    assert not running.gateway.take(snapshot(version=7))
    assert not running.gateway.take(snapshot(version=6))
    assert running.gateway.snapshot.version == 7


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://x", "an upstream's url is 'ftp://x'"),
        ("http://u:p@x", "an upstream's url is 'http://u:p@x'"),
        ("x:80", "an upstream's url is 'x:80'"),
    ],
)
def test_an_upstream_has_a_url(url, said):
    with pytest.raises(ContractError, match=said.replace("?", r"\?")):
        Upstream(url)


def test_two_pools_are_not_one_server():
    with pytest.raises(ContractError, match="infer and stable are both http://x"):
        Config(Upstream("http://x/v1"), Upstream("http://x/"))


def test_without_a_stable_pool_infer_serves_without_a_route():
    with pytest.raises(ContractError, match="there is no stable pool"):
        Config(Upstream("http://x"))


def by_label(value, **more):
    return SliceRoute(Cut(f"team={value}", (Term("labels.team", "in", (value,)),)), **more)


@pytest.mark.parametrize(
    ("source", "body", "value"),
    [
        ("request.metadata.team", {"metadata": {"team": "a"}}, "a"),
        ("request.metadata.team", {"metadata": {"team": 7}}, "7"),
        ("route", {}, "/v1/completions"),
        ("api_key", {}, "anna"),
    ],
)
def test_slices_are_told_by_labels(pools, source, body, value):
    infer, stable = pools
    with Running(config(*pools, keys=KEYS)) as running:
        slices = by_label(value, share=0.0, acts=True, status="quarantined")
        running.gateway.take(snapshot(slices, labels={"team": source}))
        given = {"authorization": "Bearer anna's-key-0123456789"}
        running.client.post("/v1/completions", json={**ASK, **body}, headers=given)
        counts = running.idle().counts

        assert (len(infer.requests), len(stable.requests)) == (0, 1)
        assert counts.decisions == {f"team={value}\tstable\tteam={value} quarantined": 1}
        assert counts.statuses == {"stable\t2xx": 1}


def test_words_of_a_message_are_in_no_slice(pools, running):
    running.gateway.take(
        snapshot(by_label("math", share=0.0, acts=True), labels={"team": "request.metadata.team"})
    )
    said = {"messages": [{"role": "user", "content": '{"metadata": {"team": "math"}}'}]}

    running.client.post("/v1/chat/completions", json={**CHAT, **said})

    assert [*running.idle().counts.decisions] == ["all\tinfer\tshare"]
