# A gateway and its leader: rows go until they are safe, snapshots come and are numbered.

import asyncio
import json
import threading
from dataclasses import replace

import pytest

from servanda.gateway.controller.gateways import SplitRecord
from servanda.gateway.proxy.config import Limits, LogFiles, Upstream
from servanda.gateway.proxy.counters import OVERHEAD_S, Counts, InFlightMeans
from servanda.gateway.proxy.logprob_request import LogprobRequest
from servanda.gateway.proxy.request import CompletionRequest, RoutedRequest
from servanda.gateway.proxy.request_log import UNKNOWN_PROMPT, LaunchLog
from servanda.gateway.routing.model import Decision, RequestFacts, snapshot_of
from servanda.traces.request_log import assignment_of, read_served
from servanda.traces.serialization import to_plain
from tests.gateway.serving import (
    NOBODY,
    NOW,
    WAIT_S,
    Fake,
    Running,
    config,
    drop,
    eventually,
    everything,
    hang,
    reply,
    snapshot,
)

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = [{"role": "user", "content": "a"}]
ASK = {"model": "m", "prompt": [1, 2], "max_tokens": 4}


def answered(ids=(3,), prompt=(1, 2), chat=False):
    names = [f"token_id:{i}" for i in ids]
    logprobs = {"tokens": names, "token_logprobs": [-0.5] * len(ids)}
    logprobs["top_logprobs"] = [{name: -0.5} for name in names]
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "logprobs": logprobs}
    choice |= {"token_ids": list(ids), "prompt_token_ids": list(prompt)}
    if chat:
        choice["logprobs"] = {"content": [{"token": name, "logprob": -0.5} for name in names]}
    return reply({"choices": [choice]})


class Leader(Fake):
    """Keeps what it is told, and answers as it is set to."""

    def __init__(self):
        super().__init__(self._answer)
        self.told, self.snapshot, self.keeps, self.dead = [], None, True, False
        self.rows = {}

    async def _answer(self, request, writer):
        message = request.json
        if self.dead:
            await reply({}, status=503)(request, writer)
            return
        taken = message["first"]
        if self.keeps:
            for number, row in enumerate(message["rows"], message["first"]):
                self.rows[number] = row
            taken += len(message["rows"])
        told = self.snapshot
        new = told is not None and told.version > message["version"]
        answer = {"taken": taken, "version": told.version if told else 0, "now": NOW}
        await reply({**answer, "snapshot": to_plain(told) if new else None})(request, writer)
        self.told.append(message)


@pytest.fixture
def infer():
    with Fake(answered()) as infer:
        yield infer


@pytest.fixture
def leader():
    with Leader() as leader:
        leader.snapshot = snapshot(whole=everything(sample=1.0))
        yield leader


def following(infer, leader, stable=None, **more):
    upstream = Upstream(leader.url, key="a key")
    return Running(config(infer, stable, without="infer", controller=upstream, name="g1", **more))


def _follows(gateway, told):
    """Whether it has this snapshot, which ends by its own clock."""
    found = gateway.snapshot
    return found is not None and replace(found, valid_until=told.valid_until) == told


def test_a_gateway_follows_the_snapshot_of_its_leader(infer, leader):
    with following(infer, leader) as running:
        eventually(lambda: running.gateway.snapshot is not None)

        assert _follows(running.gateway, leader.snapshot)
        assert leader.requests[0].headers["authorization"] == "Bearer a key"
        assert leader.requests[0].target == "/v1/follow"
        first = leader.told[0]
        assert (first["gateway"], first["version"], first["first"]) == ("g1", 0, 0)
        assert first["rows"] == [] and first["start"] == running.gateway.started
        leader.snapshot = snapshot(version=2)
        eventually(lambda: running.gateway.snapshot.version == 2)


def test_the_leader_is_told_who_served_the_users_of_a_step(infer, leader):
    leader.snapshot = snapshot(base=0.5, run="r1", leg="canary-1")
    with Fake(answered()) as stable, following(infer, leader, stable) as running:
        eventually(lambda: running.gateway.snapshot is not None)
        leader.dead = True
        for user in [*range(20), *range(20)]:
            body = {**ASK, "user": f"u{user}", "metadata": {"team": "x"}}
            running.client.post(PATH, json=body).raise_for_status()
        served = {request.json["user"] for request in infer.requests}
        infer.script = drop
        for user in range(20, 30):
            running.client.post(PATH, json={**ASK, "user": f"u{user}"}).raise_for_status()
        leader.dead = False

        def told():
            return [line for message in leader.told for line in message["assigned"]]

        eventually(lambda: told() and leader.told[-1]["assigned"] == [])
        record = SplitRecord("r1", "canary-1", 0.5, 0.02)
        record.record(map(assignment_of, told()))
        assert record.users == 30
        assert record.infer == len(served)
        assert record.causes["failover"] > 0
        assert {*told()[0]} == {"run", "leg", "at", "key", "pool"}  # nothing of the request


def test_a_route_lasts_as_long_as_its_leader_says_whatever_the_clocks_say(infer, leader):
    """A leader's clock that is a century ahead, or was set while the route was followed."""
    with Fake(answered()) as stable, following(infer, leader, stable) as running:
        eventually(lambda: running.gateway.snapshot is not None)
        acting = everything(acts=True)
        leader.snapshot = snapshot(version=2, whole=acting, valid_until=NOW + 600)
        eventually(lambda: running.gateway.snapshot.version == 2)
        gateway = running.gateway
        assert 590 < gateway.snapshot.valid_until - gateway.now() <= 600

        leader.snapshot = snapshot(version=3, whole=acting, valid_until=NOW - 1)
        eventually(lambda: gateway.snapshot.version == 3)
        assert gateway.router.decide(RequestFacts("", ""), now=gateway.now()).reason == "expired"


def test_an_older_snapshot_is_refused_and_counted(infer, leader):
    with following(infer, leader) as running:
        eventually(lambda: running.gateway.snapshot is not None)
        running.gateway.take(snapshot(version=9))
        leader.snapshot = snapshot(version=8)
        leader.script = _always(leader)
        eventually(lambda: "old snapshot" in running.gateway.counts.reflexes)

        assert running.gateway.snapshot.version == 9


def _always(leader):
    async def script(request, writer):
        told = leader.snapshot
        answer = {"taken": 0, "version": told.version, "snapshot": to_plain(told), "now": NOW}
        await reply(answer)(request, writer)

    return script


ODD = (
    {"salt": "00" * 65},
    {"salt": "x"},
    {"version": 10**40},
    {"valid_until": 10**400},
    {"valid_until": None},
    {"base": "1"},
    {"slices": [{"cut": None}]},
)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "text",
    [
        b"no json",
        b"[]",
        b'{"snapshot": {"version": 3}}',
        b'{"snapshot": 7}',
        b'{"taken": "x"}',
        b'{"snapshot": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        *(
            json.dumps({"snapshot": {**to_plain(snapshot(version=3)), **odd}, "now": now}).encode()
            for now, odd in (
                (0, {}),
                *((NOW, odd) for odd in ODD),
            )
        ),
    ],
    ids=lambda text: text[-40:].decode(),
)
def test_what_is_no_snapshot_is_not_followed(infer, leader, text):
    leader.script = reply(text)
    with following(infer, leader) as running:
        eventually(lambda: "odd snapshot" in running.gateway.counts.reflexes)

        assert running.gateway.snapshot is None
        leader.script = leader._answer
        eventually(lambda: _follows(running.gateway, leader.snapshot))


def test_rows_reach_the_leader_in_launch_order_and_once(infer, leader):
    with following(infer, leader) as running:
        eventually(lambda: running.gateway.snapshot is not None)
        for _ in range(5):
            running.client.post(PATH, json=ASK).raise_for_status()
        eventually(lambda: len(leader.rows) == 5)

        found = [leader.rows[number] for number in range(5)]
        assert [row["index"] for row in found] == [0, 1, 2, 3, 4]
        assert read_served("\n".join(map(json.dumps, found)) + "\n", "rows")
        eventually(lambda: running.gateway.launches.first == 5)
        assert running.gateway.launches.waiting() == []
        eventually(lambda: leader.told[-1]["counts"]["sampled"] == 5)
        counts = leader.told[-1]["counts"]
        assert counts["launched"] == {"all": 5}
        assert counts["statuses"] == {"infer\t2xx": 5}
        assert sum(counts["overhead"]["buckets"].values()) == 5
        assert len(counts["overhead"]["buckets"]) == len(OVERHEAD_S) + 1
        assert counts["answers"] == {"all\tinfer": 5}
        assert sum(counts["first_byte"]["infer"]["buckets"].values()) == 5
        assert counts["pools"] == {"infer": "closed"}


def test_rows_go_again_until_the_leader_has_them_safe(infer, leader):
    leader.keeps = False
    with following(infer, leader) as running:
        eventually(lambda: running.gateway.snapshot is not None)
        running.client.post(PATH, json=ASK).raise_for_status()
        eventually(lambda: sum(bool(m["rows"]) for m in leader.told) >= 2)
        leader.dead = True
        running.client.post(PATH, json=ASK).raise_for_status()
        eventually(lambda: "leader 5xx" in running.gateway.counts.reflexes)
        leader.dead, leader.keeps = False, True
        eventually(lambda: len(leader.rows) == 2)

        assert {m["first"] for m in leader.told if m["rows"]} == {0}


class Strict(Leader):
    """Refuses every message that has a row of these."""

    def __init__(self, status):
        super().__init__()
        self.status, self.hates, self.refused = status, set(), 0

    async def _answer(self, request, writer):
        rows = request.json["rows"]
        if any(row.get("token_ids") and row["index"] in self.hates for row in rows):
            self.refused += 1
            await reply({"error": "no"}, status=self.status)(request, writer)
        else:
            await super()._answer(request, writer)


@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_a_row_that_the_leader_refuses_is_lost_and_keeps_no_other_waiting(
    infer, status, monkeypatch
):
    monkeypatch.setattr("servanda.gateway.proxy.app._SELDOM_S", 0.01)
    monkeypatch.setattr("servanda.gateway.proxy.app._OFTEN_S", 0.0)
    with Strict(status) as leader:
        leader.snapshot = snapshot(whole=everything(sample=1.0))
        leader.hates = {2, 3, 7}
        with following(infer, leader) as running:
            eventually(lambda: running.gateway.snapshot is not None)
            for _ in range(9):
                running.client.post(PATH, json=ASK).raise_for_status()
            eventually(lambda: len(leader.rows) == 9)

        found = [leader.rows[number] for number in range(9)]
        lost = {row["index"]: row["lost"] for row in found if "lost" in row}
        assert [row["index"] for row in found] == [*range(9)]
        assert lost == dict.fromkeys(leader.hates, "refused row")
        read_served("".join(json.dumps(row) + "\n" for row in found), "rows")
        assert running.gateway.counts.reflexes["refused row"] == 3


@pytest.mark.parametrize("status", [400, 401, 403, 429, 500, 503])
def test_where_the_leader_refuses_everything_no_row_is_lost(infer, leader, status, monkeypatch):
    monkeypatch.setattr("servanda.gateway.proxy.app._SELDOM_S", 0.001)
    monkeypatch.setattr("servanda.gateway.proxy.app._OFTEN_S", 0.0)
    with following(infer, leader) as running:
        eventually(lambda: running.gateway.snapshot is not None)
        leader.script = reply({}, status=status)
        for _ in range(5):
            running.client.post(PATH, json=ASK).raise_for_status()
        eventually(lambda: len(leader.requests) > 50)
        leader.script = leader._answer
        eventually(lambda: len(leader.rows) == 5)

        assert not any("lost" in row for row in leader.rows.values())


def test_a_row_waits_for_those_that_were_launched_before_it(infer, leader):
    gate = threading.Event()

    async def late(request, writer):
        while not gate.is_set():
            await asyncio.sleep(0.001)
        await answered(ids=(7,))(request, writer)

    infer.scripts.append(late)
    with following(infer, leader) as running:
        eventually(lambda: running.gateway.snapshot is not None)
        thread = threading.Thread(target=lambda: running.client.post(PATH, json=ASK))
        thread.start()
        assert infer.arrived.acquire(timeout=WAIT_S)
        running.client.post(PATH, json=ASK).raise_for_status()
        eventually(lambda: running.app.in_flight == 1)

        assert running.gateway.launches.waiting() == [] and not leader.rows
        gate.set()
        thread.join()
        eventually(lambda: len(leader.rows) == 2)
        assert [leader.rows[i]["token_ids"] for i in (0, 1)] == [[7], [3]]


def test_the_last_rows_are_said_at_the_end(infer, leader):
    infer.script = hang
    running = following(infer, leader).__enter__()
    eventually(lambda: running.gateway.snapshot is not None)
    thread = threading.Thread(target=lambda: running.client.post(PATH, json=ASK))
    thread.start()
    assert infer.arrived.acquire(timeout=WAIT_S)

    running._running.should_exit = True
    thread.join()
    running.__exit__()

    assert [row["lost"] for row in leader.rows.values()] == ["cancelled"]


def test_a_log_says_what_the_leader_is_told(infer, leader, tmp_path):
    for _ in range(2):  # a gateway that starts anew goes on counting
        with following(infer, leader, log=LogFiles(tmp_path)) as running:
            eventually(lambda running=running: running.gateway.snapshot is not None)
            for _ in range(3):
                running.client.post(PATH, json=ASK).raise_for_status()
            running.idle()

    files = sorted(tmp_path.glob("served-*"))
    assert [file.name for file in files] == ["served-0001.jsonl", "served-0002.jsonl"]
    found = [r for file in files for r in read_served(file.read_text(), file.name)]
    assert [(r.index, r.served) for r in found] == [(i, i + 1) for i in range(6)]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


ROUTED = RoutedRequest(
    request=CompletionRequest(b"{}", chat=False),
    path="/v1/completions",
    facts=RequestFacts("r-1", "k", {"team": "x"}),
    decision=Decision("infer", "infer", False, True, 0.5, ("a", "all"), "share", 1),
    user_hash="k",
    client="c",
)


@pytest.fixture
def clock():
    return Clock()


def launches(clock, **limits):
    counts = Counts()
    return LaunchLog(Limits(**limits), counts, None, clock=clock, now=lambda: 5.0), counts


def launched(rows, sampling=None):
    logprob_request = LogprobRequest(b"{}", sampling or {"max_new_tokens": 4})
    return rows.launch(ROUTED, snapshot(), logprob_request)


ANSWER = {"token_ids": [3], "logprobs": [-0.5], "finish": "stop"}


def waiting(rows):
    return [json.loads(row) for row in rows.waiting()]


def test_unsampled_requests_are_counted_and_have_no_row(clock):
    rows, counts = launches(clock)
    for _ in range(9):
        assert rows.launch(ROUTED, snapshot(), None) is None
    rows.resolve(launched(rows), ANSWER, [1])

    (row,) = waiting(rows)
    assert (row["index"], row["served"]) == (0, 10)
    assert counts.launched == {"a": 10, "all": 10} and counts.sampled == 1
    assert row == {
        "index": 0,
        "run": "toy",
        "leg": "gateway",
        "at": 5.0,
        "served": 10,
        "key": "k",
        "sampling": {"max_new_tokens": 4},
        "labels": {"team": "x"},
        "prompt_token_ids": [1],
        "x-best": 0,
        "x-chance": 0.5,
        "x-drawn": {},
        "x-slices": ["a", "all"],
        "x-mirrored": False,
        "x-version": 1,
        **ANSWER,
    }


def test_a_row_without_an_answer_holds_up_the_others_only_so_long(clock):
    rows, _ = launches(clock, row_s=60.0)
    first, second = launched(rows), launched(rows)
    rows.resolve(second, ANSWER, [1])
    clock.now += 59.0
    rows.sweep()
    assert waiting(rows) == []
    clock.now += 2.0
    rows.sweep()
    rows.resolve(first, ANSWER, [1])  # too late

    assert [row.get("lost") for row in waiting(rows)] == ["timeout", None]
    assert waiting(rows)[0]["prompt_token_ids"] == UNKNOWN_PROMPT["prompt_token_ids"]


def test_memory_is_bounded_and_what_is_given_up_is_counted(clock):
    rows, counts = launches(clock, rows=3)
    for _ in range(12):
        assert rows.room
        rows.resolve(launched(rows), ANSWER, [1] * 5000)
    assert not rows.room

    found = waiting(rows)
    assert [row.get("lost") for row in found] == [None] * 3 + ["dropped"] * 9
    assert counts.dropped == 9
    assert all(len(json.dumps(row)) < 500 for row in found[3:])
    rows.taken(2)
    assert (rows.first, len(waiting(rows)), rows.room) == (2, 10, True)


def test_bytes_are_bounded_too(clock):
    rows, counts = launches(clock, row_bytes=10_000)
    for _ in range(4):
        rows.resolve(launched(rows), ANSWER, [1] * 4000)

    assert [row.get("lost") for row in waiting(rows)] == [None, None, "dropped", "dropped"]
    assert counts.dropped == 2


def test_what_waits_behind_a_row_without_an_answer_is_bounded_too(clock):
    rows, counts = launches(clock, row_bytes=100_000)
    first = launched(rows)
    for _ in range(100):
        rows.resolve(launched(rows), ANSWER, [1] * 4000)
    rows.resolve(first, ANSWER, [1])

    found = rows.waiting()
    assert len(found) == 101 and counts.dropped > 80
    assert sum(map(len, found)) < 150_000


def test_lost_rows_do_not_grow_without_bound_either(clock):
    rows, counts = launches(clock, row_bytes=100_000)
    for _ in range(100):
        rows.resolve(launched(rows), {"lost": "gone"}, [1] * 40_000)

    found = rows.waiting()
    assert [json.loads(row)["lost"] for row in found] == ["gone"] * 100
    assert sum(map(len, found)) < 250_000 and counts.dropped == 0


def test_a_row_that_no_message_can_hold_is_dropped(clock):
    rows, counts = launches(clock)
    many = {"token_ids": [3] * 4_000_000, "logprobs": [-0.5] * 4_000_000, "finish": "stop"}
    rows.resolve(launched(rows, {"max_new_tokens": 4_000_000}), many, [1])

    assert [row["lost"] for row in waiting(rows)] == ["dropped"]
    assert counts.dropped == 1


def test_an_hour_without_a_leader_at_a_thousand_requests_a_second(clock):
    """One in ten is sampled, and each has a prompt of a thousand tokens."""
    rows, counts = launches(clock)
    for n in range(3600):
        for _ in range(10):
            if rows.room:
                rows.resolve(launched(rows), ANSWER, [70_000] * 1000)
            else:
                rows.launch(ROUTED, snapshot(), None)
                counts.dropped += 1
        clock.now = float(n)
        rows.sweep()

    held = rows.last - rows.first
    assert held == 4 * 4096 and counts.dropped == 36_000 - 4096
    assert rows._bytes < (64 << 20)


def test_a_message_has_so_many_rows_at_most(clock):
    rows, _ = launches(clock)
    for _ in range(600):
        rows.resolve(launched(rows), ANSWER, [1])

    assert len(rows.waiting()) == 512
    rows.taken(512)
    assert [json.loads(row)["index"] for row in rows.waiting()] == [*range(512, 600)]


def test_requests_at_a_time_are_a_mean_over_time(clock):
    presence = InFlightMeans(clock)
    presence.move(("a", "all"), 1)
    clock.now += 2.0
    presence.move(("all",), 1)
    clock.now += 2.0
    presence.move(("a", "all"), -1)
    clock.now += 4.0

    assert presence.means() == {"a": 4 / 8, "all": (2 * 1 + 2 * 2 + 4 * 1) / 8}
    clock.now += 1.0
    assert presence.means() == {"all": 1.0}


def test_a_report_begins_what_is_since_the_last_one_anew():
    counts = Counts()
    counts.begun("infer")
    counts.begun("infer")
    counts.ended("infer")

    assert counts.report()["peak"] == {"infer": 2, "stable": 0}
    assert counts.report()["peak"] == {"infer": 1, "stable": 0}
    assert counts.report()["in_flight"] == {"infer": 1, "stable": 0}


def test_a_snapshot_comes_as_it_was_made():
    one = snapshot(whole=everything(sample=0.5), labels={"team": "api_key"}, prompt_tokens=(1, 9))

    assert snapshot_of(json.loads(json.dumps(to_plain(one)))) == one


def lost_row(infer, stable, body, running):
    running.client.post(PATH, json=body)
    (row,) = (json.loads(row) for row in running.idle().launches.waiting())
    return row


def test_the_prompt_of_a_lost_row_is_asked_for():
    async def tokens(request, writer):
        known = {"count": 2, "tokens": [5, 6]} if request.target == "/tokenize" else {}
        await reply(known)(request, writer)

    with (
        Fake(reply({}, status=500)) as infer,
        Fake(tokens) as stable,
        Running(config(infer, stable, controller=NOBODY)) as running,
    ):
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        row = lost_row(infer, stable, {**ASK, "prompt": "words"}, running)

    assert (row["lost"], row["prompt_token_ids"]) == ("5xx", [5, 6])
    asked = [r.json for r in stable.requests if r.target == "/tokenize"]
    assert asked == [{"model": "m", "prompt": "words"}]


@pytest.mark.parametrize(
    ("path", "ask", "told", "compared"),
    [
        (PATH, {"prompt": "words"}, [1, 2], "equal"),
        (PATH, {"prompt": "words", "add_special_tokens": False}, [1, 2], "equal"),
        (PATH, {"prompt": "words"}, [5, 6], "other"),
        (PATH, {"prompt": [1, 2]}, None, "equal"),
        (PATH, {"prompt": [1, 3]}, None, "other"),
        (PATH, {"prompt": "words"}, None, "unknown"),
        (CHAT, {"messages": WORDS, "chat_template_kwargs": {"think": False}}, [9, 1], "other"),
        (CHAT, {"messages": WORDS, "documents": [{"text": "a"}]}, [9, 1], "unknown"),
        (CHAT, {"messages": WORDS, "tools": [{"type": "function"}]}, [9, 1], "other"),
        # some servers leave tools out of the prompt then, and tokenizers do not hear of it
        (CHAT, {"messages": WORDS, "tools": [{}], "tool_choice": "none"}, [9, 1], "unknown"),
    ],
)
def test_an_answer_for_another_prompt_than_was_asked_is_missing(path, ask, told, compared):
    """Infer says that it ran [1, 2]; stable is who says what should have been run."""

    async def tokens(request, writer):
        known = {} if told is None else {"count": len(told), "tokens": told}
        await reply(known)(request, writer)

    with (
        Fake(answered(chat=path == CHAT)) as infer,
        Fake(tokens) as stable,
        Running(config(infer, stable, controller=NOBODY)) as running,
    ):
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        body = {"model": "m", "max_tokens": 4, **ask}
        assert running.client.post(path, json=body).status_code == 200
        (row,) = (json.loads(row) for row in running.idle().launches.waiting())
        assert running.gateway.counts.prompts == {compared: 1}

    if compared == "other":
        assert row["lost"] == "answered for another prompt" and "token_ids" not in row
        assert row["prompt_token_ids"] == (told or [1, 3])
    else:
        assert row["prompt_token_ids"] == [1, 2] and row["token_ids"] == [3]
    asked = [r.json for r in stable.requests if r.target == "/tokenize"]
    asks = told is not None or ask.get("prompt") == "words"
    asks &= not {"documents", "tool_choice"} & ask.keys()
    assert asked == ([{"model": "m", **ask}] if asks else [])


def test_a_prompt_is_compared_with_what_another_pool_says_or_not_at_all():
    async def answer(request, writer):
        told = {"count": 1, "tokens": [7]} if request.target == "/tokenize" else {}
        await (reply(told) if told else answered())(request, writer)

    with Fake(answer) as infer, Running(config(infer, controller=NOBODY)) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        running.client.post(PATH, json={**ASK, "prompt": "words"}).raise_for_status()
        (row,) = (json.loads(row) for row in running.idle().launches.waiting())

    assert row["token_ids"] == [3] and running.gateway.counts.prompts == {"unknown": 1}


def test_a_lost_row_whose_prompt_nobody_knows_says_so():
    with (
        Fake(reply({}, status=500)) as infer,
        Fake(reply({}, status=404)) as stable,
        Running(config(infer, stable, controller=NOBODY)) as running,
    ):
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        row = lost_row(infer, stable, {**ASK, "prompt": "words"}, running)

    assert (row["lost"], row["prompt_token_ids"], row["x-prompt"]) == ("5xx", [0], "unknown")
    assert read_served(json.dumps(row) + "\n", "rows")


@pytest.mark.parametrize(
    ("prompt", "asked"), [([1] * 9, 0), ("words", 1), ([" a"], 1)], ids=["ids", "text", "list"]
)
def test_prompts_are_counted_where_a_route_depends_on_it(prompt, asked):
    async def tokens(request, writer):
        known = {"count": 9, "tokens": [1] * 9} if request.target == "/tokenize" else {}
        await reply(known)(request, writer)

    with Fake() as infer, Fake(tokens) as stable, Running(config(infer, stable)) as running:
        running.gateway.take(snapshot(prompt_tokens=(1, 8), outside="stable"))
        for _ in range(3):  # one that was counted is not counted again
            running.client.post(PATH, json={**ASK, "prompt": prompt}).raise_for_status()

        assert [*running.idle().counts.decisions] == ["all\tstable\toutside"]
    assert sum(r.target == "/tokenize" for r in stable.requests) == asked
    assert not infer.requests


def test_a_prompt_that_nobody_counts_in_time_is_none_of_a_length():
    limits = Limits(count_s=0.05)
    with (
        Fake() as infer,
        Fake(hang) as stable,
        Running(config(infer, stable, limits=limits)) as running,
    ):
        running.gateway.take(snapshot(prompt_tokens=(1, 8), outside="refuse"))

        assert running.client.post(PATH, json={**ASK, "prompt": "words"}).is_success
    assert infer.requests
