# What a gateway must not do, one sentence each, held against the real one on real sockets.

import contextlib
import json
import logging

import httpx2
import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

from servanda.errors import ContractError
from servanda.gateway.controller.audit import Audit
from servanda.gateway.http.api_keys import Keys
from servanda.gateway.proxy.config import LogFiles
from servanda.gateway.routing.model import Pool, snapshot_of
from servanda.gateway.routing.state import Rules, Score, TrafficFacts, WatchedCell
from servanda.gateway.routing.state_machine import absorb, advance, begin
from servanda.judgement.slices.rules import Cut, Term
from servanda.runner.run import load
from servanda.theory.stats.group_ratio import GroupRatio
from tests import kit, serving
from tests.gateway import running as real
from tests.gateway.controller import controllers
from tests.gateway.controller.web.serving import bearer, live
from tests.gateway.fakes.answers import Answers
from tests.gateway.fakes.leader_stub import snapshot
from tests.gateway.world import until, world

MARKER = "a-marker-that-nobody-may-keep"
AWAY = {"status": "quarantined", "share": 0.0, "mirror": 1.0, "acts": True}
POOLS = Pool.__args__


def body(domain="math", **fields):
    asked = {
        "model": "fake",
        "messages": [{"role": "user", "content": "a b c"}],
        "max_tokens": 8,
        "metadata": {"domain": domain},
    }
    return {**asked, **fields}


def ask(client, domain="math", session=None, headers=None, **fields):
    named = {"x-session-id": session} if session else {}
    reply = client.post(
        "/v1/chat/completions", json=body(domain, **fields), headers={**named, **(headers or {})}
    )
    assert reply.status_code == 200, reply.text
    return reply


def sent(server):
    """The bodies that a server was asked for answers with."""
    return [json.loads(one.body) for one in server.seen if one.path.endswith("completions")]


# Serve through the referee


def test_nobody_is_served_by_the_referee():
    """Whatever a snapshot or a client says: there are two pools, and train is neither."""
    spoofed = {
        "x-servanda-pool": "train",
        "x-mirror-cluster": "train",
        "x-envoy-original-dst-host": "train",
    }
    states = (
        snapshot(version=1),
        snapshot(version=2, routes={"all": AWAY}),
        snapshot(version=3, routes={"domain=math": {"pinned": "stable", "acts": True}}),
        snapshot(version=4, valid_until=0.0),
    )
    with world(states[0], names=("infer", "stable", "train")) as w:
        client = w.gateway()
        for state in states:
            w.follow(state)
            for n in range(4):
                headers = {**spoofed, "host": w.urls["train"].removeprefix("http://")}
                ask(client, session=f"{state.version} {n}", headers=headers)

        assert w.servers["train"].count == 0
        assert w.infer.count + w.stable.count >= 16
    assert POOLS == ("infer", "stable")


# Divert without measured headroom, or all at 30 %


MEASURED = {
    "now": 2.0,
    "shares": {"domain=math": 0.25},
    "in_flight": {"domain=math": 2.0},
    "stable_in_flight": 1.0,
}


def looked_at(tmp_path, *, keys=40, declared=", stable_in_flight: 8", **facts):
    """A slice whose every request is far beyond its limit, after one look at it."""
    routing = f"routing: {{mode: enforce{declared}}}\n"
    rule = "escalation: [{when: {clause: tv, is: violated}, do: [{divert: slice}]}]\n"
    path, _ = kit.write(tmp_path, more=routing + rule)
    math_ = Cut("domain=math", (Term("labels.domain", "in", ("math",)),))
    rules = Rules(load(path), (WatchedCell("tv", math_, limit=0.05, diverts="slice"),))
    state = begin(rules, now=0.0)
    bad = GroupRatio(8, 1, np.array([4.0]), np.array([8]), np.array([0]))
    for n in range(200):
        score = Score(1.0, f"user {n % keys}", 1.0, {("tv", "domain=math"): bad})
        state = absorb(rules, state, score)
    state, _ = advance(rules, state, TrafficFacts(**{**MEASURED, **facts}))
    return state.slices["domain=math"]


def test_a_slice_beyond_its_limit_is_diverted_where_all_is_known(tmp_path):
    """The others of these tests leave out one thing each."""
    assert looked_at(tmp_path).status == "quarantined"


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"stable_in_flight": None}, "not measured"),
        ({"in_flight": {}}, "not measured"),
        ({"stable_in_flight": 7.0}, "stable has no capacity left"),
    ],
)
def test_nothing_is_diverted_without_measured_headroom(tmp_path, facts, why):
    found = looked_at(tmp_path, **facts)

    assert found.status != "quarantined"
    assert why in found.held


def test_a_contract_that_acts_declares_the_headroom_of_stable(tmp_path):
    with pytest.raises(ContractError, match="write stable_in_flight: with the requests"):
        looked_at(tmp_path, declared="")


def test_more_than_three_tenths_of_all_traffic_are_not_diverted(tmp_path):
    found = looked_at(tmp_path, shares={"domain=math": 0.31})

    assert found.status != "quarantined"
    assert "routing.most_diverted is 0.3" in found.held


def test_a_slice_that_is_away_takes_no_other_one_along():
    with world(snapshot(routes={"domain=math": AWAY})) as w:
        client = w.gateway()

        for n in range(20):
            ask(client, "law", session=f"law {n}")
        assert (w.infer.count, w.stable.count) == (20, 0)
        ask(client, "math", session="math")

        assert w.stable.count == 1


# Fail closed


@pytest.mark.parametrize("known", [None, snapshot(valid_until=0.0, routes={"domain=math": AWAY})])
def test_without_a_valid_snapshot_users_are_served(known):
    with world(known) as w:
        ask(w.gateway())


def test_without_a_leader_users_are_served():
    with world(leader=False) as w:
        ask(w.gateway())


def test_a_slice_goes_on_as_it_was_after_its_leader_is_gone():
    with world(snapshot(routes={"domain=math": {**AWAY, "mirror": 0.0}})) as w:
        client = w.gateway()
        w.hang_up()

        for n in range(8):
            ask(client, "math", session=f"math {n}")
            ask(client, "law", session=f"law {n}")

        assert (w.infer.count, w.stable.count) == (8, 8)


# Be required


def test_decisions_are_there_for_a_gateway_of_ones_own(tmp_path):
    """Rows come over HTTP from the server, and routes go back; none of ours is in the path."""
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    clock, rows = controllers.Clock(), controllers.rows(path, 240)
    leader = controllers.controller(path, clock)
    with contextlib.closing(leader), live(leader) as client:
        for i in range(0, len(rows), 24):
            clock.now = rows[i + 23]["at"] + 3
            message = controllers.message(rows[i : i + 24], first=i)
            client.post("/v1/follow", json=message, headers=bearer("gateway"))
            while leader.step():
                pass

        def decided(domain):
            known = {"request": "r-1", "labels": {"first": domain}}
            reply = client.post("/v1/route/decide", json=known, headers=bearer("gateway"))
            return reply.json()["pool"]

        snapshot = client.get("/v1/route/snapshot", headers=bearer("gateway"))
        routes = {one.name: one for one in snapshot_of(snapshot.json()).slices}

        assert [decided(domain) for domain in "abc"] == ["stable", "infer", "infer"]
        assert routes["first=a"].share == 0.0
        tag = {"if-none-match": snapshot.headers["etag"], **bearer("gateway")}
        assert client.get("/v1/route/snapshot", headers=tag).status_code == 304


def test_an_audit_needs_a_log_and_nothing_that_serves(tmp_path):
    path = controllers.contract(tmp_path, q=controllers.FAULTY)
    log = serving.log(tmp_path, controllers.rows(path, 240))
    audit = Audit(path, [log], state=tmp_path / "state", open=controllers.here, key=b"")
    with contextlib.closing(audit):
        audit.read()

        assert "first=a" in audit.result.beyond


# Ask for logprobs on unsampled requests, or silently change logprobs_mode


def test_an_unsampled_request_is_sent_as_the_bytes_that_came():
    written = b'{ "messages":[{"role":"user","content":"a \\u0062"}],"max_tokens":8.0e0 ,"x":[1]}'
    with world(snapshot(sample=0.0)) as w:
        client = w.gateway()

        for stream in (b"", b',"stream":true'):
            client.post("/v1/chat/completions", content=written[:-1] + stream + b"}")

            assert w.infer.seen[-1].body == written[:-1] + stream + b"}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_sampled_request_asks_for_logprobs_and_the_client_sees_none(stream):
    with world(snapshot(sample=1.0)) as w:
        client = w.gateway()

        said = ask(client, stream=stream).text

        asked = sent(w.infer)[0]
        assert asked["logprobs"] is True
        assert asked["return_token_ids"] is True
        assert not {name for name in asked if name.startswith("logprobs_")}
        for name in ('token_ids":[', "token_id:", '"logprob"'):
            assert name not in said
        assert w.rows(1)[0]["token_ids"]


def test_a_client_that_asks_for_logprobs_has_them_as_it_asked():
    with world(snapshot(sample=1.0)) as w:
        client = w.gateway()

        found = ask(client, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]

        assert sent(w.infer)[0]["top_logprobs"] == 2
        assert {len(step["top_logprobs"]) for step in found["content"]} == {2}
        assert not any(step["token"].startswith("token_id:") for step in found["content"])


# Send prompt_logprobs to a serving pool


@pytest.mark.parametrize("routes", [{}, {"domain=math": AWAY}])
def test_no_serving_pool_is_asked_for_the_logprobs_of_a_prompt(routes):
    with world(snapshot(sample=1.0, routes=routes)) as w:
        client = w.gateway()
        for n in range(10):
            ask(client, session=str(n), stream=bool(n % 2))
        w.rows(10)

        for asked in (*sent(w.infer), *sent(w.stable)):
            assert "prompt_logprobs" not in asked
            assert "echo" not in asked


# Switch kernels inside a stream or, short of critical, inside a session


def test_a_stream_ends_at_the_kernel_where_it_began():
    first = snapshot(version=1, routes={"domain=math": {"acts": True}})
    with world(first) as w:
        w.infer.rate = 200.0
        client = w.gateway()
        asked = body(stream=True, max_tokens=48)
        w.infer.answers = Answers(least=48, most=48)
        with client.stream("POST", "/v1/chat/completions", json=asked) as reply:
            lines = reply.iter_lines()
            begun = next(lines)
            w.follow(snapshot(version=2, routes={"domain=math": AWAY}))
            rest = list(lines)

        events = [line for line in (begun, *rest) if line.startswith("data: {")]
        assert len(events) == 48
        assert rest[-2:] == ["data: [DONE]", ""]
        assert (w.infer.count, w.stable.count) == (1, 0)


@pytest.mark.parametrize(("critical", "at_stable"), [(False, 0), (True, 1)])
def test_a_session_stays_where_it_began_short_of_a_critical_fault(critical, at_stable):
    with world(snapshot(version=1, routes={"domain=math": {"acts": True}})) as w:
        client = w.gateway()
        ask(client, session="one")
        assert w.infer.count == 1

        away = {**AWAY, "critical": critical, "mirror": 0.0}
        w.follow(snapshot(version=2, routes={"domain=math": away}))
        ask(client, session="one")
        assert w.stable.count == at_stable
        ask(client, session="another")

        assert w.stable.count == at_stable + 1


# Read message content for slices by default


def test_no_slice_is_found_in_what_a_message_says():
    words = json.dumps({"metadata": {"domain": "math"}, "domain": "math"})
    with world(snapshot(routes={"domain=math": AWAY})) as w:
        client = w.gateway()

        ask(client, "law", messages=[{"role": "user", "content": words}])
        ask(client, "law", messages=[{"role": "user", "content": "b", "metadata": "math"}])

        assert w.stable.count == 0


# Store text


def test_no_text_of_a_user_is_in_a_row_a_log_or_a_message(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with world(snapshot(sample=1.0)) as w:
        client = w.gateway(log=LogFiles(tmp_path / "log"))
        words = [{"role": "user", "content": f"a b {MARKER}"}]
        for n in range(5):
            ask(client, session=MARKER, messages=words, user=MARKER, stream=bool(n % 2))
        w.infer.misbehaves = "garble"
        client.post("/v1/chat/completions", json=body(messages=words))
        w.infer.misbehaves = ""
        client.post("/v1/chat/completions", content=b'{"messages": "' + MARKER.encode())
        w.rows(5)

        assert MARKER not in json.dumps(w.stub.rows)
        assert MARKER not in json.dumps(w.counts())
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept, "a log was asked for"
    assert not [path for path in kept if MARKER.encode() in path.read_bytes()]
    assert MARKER not in caplog.text


@pytest.mark.slow
def test_no_text_of_a_user_is_kept_or_said_by_any_process(tmp_path):
    """Through `servanda serve`: in its state, the ledger, the log, and all that it prints."""
    prompt = " ".join("dabbadcabdacadabbacd")  # in words that the kernel knows
    with (
        real.kernels(tmp_path / "kernels") as urls,
        real.Serving(tmp_path / "serve", urls, "--log", "served") as serve,
    ):
        url = serve.begun()
        with httpx2.Client(base_url=url, timeout=real.WAIT_S) as client:
            for n in range(12):
                chat = {"messages": [{"role": "user", "content": prompt}]}
                asked = {
                    "max_tokens": 1,
                    "stream": bool(n % 2),
                    "user": MARKER,
                    "metadata": {"team": "a", "note": MARKER},
                    **(chat if n % 3 == 0 else {"prompt": prompt}),
                }
                key = {"authorization": f"Bearer {real.key(n)}"}
                path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
                named = {"x-session-id": MARKER, **key}
                reply = client.post(path, json=asked, headers=named)
                assert reply.status_code == 200 or "messages" in asked, reply.text
                client.post(path, content=f'{{"{MARKER}{prompt}'.encode(), headers=key)
        gateway = real.until(lambda: counted(serve), "rows are durable")
        assert gateway["counts"]["sampled"] >= 8
        running = kept(serve.folder)
        told = json.dumps(serve.status())
        assert serve.end() == 0
        ended = kept(serve.folder)
    assert {"leader.db", "leader.db-wal", "ledger.db", "served-0001.jsonl"} <= {
        name for name, _ in running
    }
    texts = [*running, *ended, ("printed", serve.text.encode()), ("status", told.encode())]
    for text in (MARKER, prompt):
        assert not [name for name, data in texts if text.encode() in data]


def counted(serve):
    """The gateway, as its leader knows it, once all it sampled is durable and the ledger told."""
    status, ledger = serve.status(), serve.folder / "ledger.db"
    one = status["gateways"][0]
    told = ledger.exists() and not status["ledger_behind"]
    return one if told and one["taken"] == one["counts"]["sampled"] >= 8 else None


def kept(folder):
    """(name, bytes) of every file that was written there."""
    return [(path.name, path.read_bytes()) for path in folder.rglob("*") if path.is_file()]


# Touch what it passes on


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/responses"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/files/file-7?limit=2&after=%C3%A9"),
        ("DELETE", "/v1/files/7"),
    ],
)
def test_a_path_of_no_completion_passes_byte_for_byte(method, path):
    data = b'{"model": "fake",\n "stream":true, "\xff": 1}\r\n\x00' if method == "POST" else b""
    with world(snapshot(sample=1.0, routes={"all": AWAY})) as w:
        client = w.gateway(allow=("/v1/batches", "/v1/files/*"))

        reply = client.request(
            method, path, content=data, headers={"content-type": "x/y", "openai-beta": "a=b"}
        )

        (seen,) = [*w.infer.seen, *w.stable.seen]
        assert (seen.method, seen.path, seen.body) == (method, path, data)
        assert seen.headers["openai-beta"] == "a=b"
        assert seen.headers["content-type"] == "x/y"
        assert reply.json() == {"path": path, "bytes": len(data)}
        assert not w.stub.rows


# Replay tools or `store` in shadows


def test_a_shadow_repeats_no_tool_and_stores_nothing():
    tools = [{"type": "function", "function": {"name": "pay", "parameters": {}}}]
    with world(snapshot(sample=1.0, routes={"domain=math": AWAY})) as w:
        client = w.gateway()
        ask(client, session="a", store=True, user="ana")
        ask(client, session="b", tools=tools, tool_choice="auto")
        until(lambda: w.counts()["mirrored"] >= 1)

        assert [sorted(set(one) & {"store", "tools"}) for one in sent(w.stable)] == [
            ["store"],
            ["tools"],
        ]
        until(lambda: w.infer.count)
        for shadow in sent(w.infer):
            assert not {"tools", "tool_choice", "store", "user", "metadata"} & set(shadow)


# Let one key fill a slice's evidence


def test_one_user_alone_moves_no_slice(tmp_path):
    one = looked_at(tmp_path / "one", keys=1)
    some = looked_at(tmp_path / "some", keys=19)

    assert one.status != "quarantined"
    assert one.scored + one.passed == 200
    assert one.passed > 190
    assert some.status != "quarantined"
    assert "19 distinct users, and 20 are needed" in some.held


def test_rows_of_one_key_are_of_one_key_whatever_it_says():
    """Sessions and users are for the client to choose; who it is, is not."""
    with world(snapshot(sample=1.0)) as w:
        client = w.gateway(keys=Keys(("ana", "client", "k" * 32)))
        headers = {"authorization": f"Bearer {'k' * 32}"}
        for n in range(6):
            ask(client, session=f"s{n}", user=f"u{n}", headers=headers)

        assert len({row["key"] for row in w.rows(6)}) == 1


# Count its own traffic in user metrics


def test_what_infer_is_asked_for_nobody_is_in_no_count_of_users():
    with world(snapshot(sample=1.0, routes={"domain=math": AWAY})) as w:
        client = w.gateway()
        for n in range(8):
            ask(client, session=str(n))
        w.rows(8)
        counts = w.counts()

        assert w.infer.count == 8
        assert counts["mirrored"] == 8
        assert sum(counts["decisions"].values()) == 8
        assert counts["statuses"] == {"stable\t2xx": 8}
        assert sum(counts["overhead"]["buckets"].values()) == 8
        assert counts["answers"] == {"domain=math\tstable": 8}
        assert {row["x-mirrored"] for row in w.stub.rows} == {True}


def test_what_infer_is_asked_for_nobody_says_so():
    with world(snapshot(sample=1.0, routes={"domain=math": AWAY})) as w:
        ask(w.gateway())
        until(lambda: w.infer.count)

        told = {name for name in w.infer.seen[0].headers if name.startswith("x-servanda")}
        assert told
        assert not {n for n in w.stable.seen[0].headers if n.startswith("x-servanda")}


# Act in observe mode


def test_in_observe_mode_what_it_would_do_is_not_done():
    with world(snapshot(routes={"domain=math": {**AWAY, "acts": False}})) as w:
        client = w.gateway()
        for n in range(8):
            ask(client, session=str(n))

        assert (w.infer.count, w.stable.count) == (8, 0)


# And what is asked of every one of these: no request outlives its timeout


def test_a_pool_that_never_answers_keeps_nobody_longer_than_its_time():
    with world(snapshot(routes={"all": {"pinned": "infer", "acts": True}})) as w:
        w.infer.misbehaves = w.stable.misbehaves = "hang"
        pools = {name: w.pool(name, first_byte_s=0.2) for name in ("infer", "stable")}
        client = w.gateway(**pools)

        assert client.post("/v1/chat/completions", json=body()).status_code == 504
