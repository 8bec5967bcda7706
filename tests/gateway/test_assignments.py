# The assignments that a gateway writes: who was served by which pool on a step of a promotion.

import pytest

from servanda.contract.stages import Leg
from servanda.gateway.proxy.config import LogFiles
from servanda.gateway.proxy.gateway import AssignmentLog
from servanda.gateway.proxy.request import RoutedRequest
from servanda.gateway.proxy.request_log import RequestLog
from servanda.gateway.routing.model import RequestFacts, SliceRoute
from servanda.gateway.routing.router import Router
from servanda.judgement.slices.rules import Cut, Term
from servanda.promotion.run.request_log_files import read_split
from servanda.traces.request_log import Assignment, first_of_each_user
from tests import serving as traffic
from tests.gateway.serving import Fake, Running, config, drop, everything, reply, snapshot
from tests.promotion.run.test_looking import at, cell
from tests.promotion.run.test_sample_ratio import write

ASK = {"model": "m", "prompt": "hello", "max_tokens": 4}
CANARY = Leg("canary", share=0.05, first=64, last=640, part=1 / 7)
STEP = {"run": "r1", "leg": "canary-1"}


@pytest.fixture
def pools():
    with Fake(reply({"by": "infer"})) as infer, Fake(reply({"by": "stable"})) as stable:
        yield infer, stable


def ask(running, user, **headers):
    body = {**ASK, "user": f"u{user}"}
    answer = running.client.post("/v1/completions", json=body, headers=headers)
    return answer.raise_for_status().json()["by"]


def assigned(running, folder, leg="canary-1"):
    running.idle().log.flush()
    return first_of_each_user(read_split([folder]), "r1", leg)


def test_the_first_request_of_each_user_has_a_line_with_its_pool(pools, tmp_path):
    with Running(config(*pools, log=LogFiles(tmp_path))) as running:
        ask(running, 0)  # before the promotion: no step, no line
        running.gateway.take(snapshot(base=0.5, **STEP))
        by = [ask(running, user) for user in (*range(20), *range(20))]

        lines = assigned(running, tmp_path)

        assert [one.pool for one in lines] == by[:20] == by[20:]
        assert {"infer", "stable"} == {*by}
        assert {(one.because, one.apart) for one in lines} == {("", "")}
        assert len(read_split([tmp_path])) == 20


def test_a_failover_corrects_the_line_of_its_user(pools, tmp_path):
    pools[0].script = drop
    with Running(config(*pools, log=LogFiles(tmp_path))) as running:
        running.gateway.take(snapshot(base=1.0, **STEP))
        assert {ask(running, user) for user in range(8)} == {"stable"}

        causes = [one.because for one in assigned(running, tmp_path)]

        assert causes[0] == "failover"
        assert {*causes} <= {"failover", "breaker"}


@pytest.mark.parametrize(
    ("at", "because", "pool"),
    [
        (1.0, "failover", "stable"),
        (1.0, "breaker", "infer"),
        (1.5, "failover", "infer"),  # of a later request: the user was already served by infer
    ],
)
def test_only_a_failover_of_the_first_request_corrects_the_first_line(at, because, pool):
    first, other = (Assignment("r1", "canary-1", 1.0, key, "infer") for key in "ab")
    later = Assignment("r1", "canary-1", at, "a", "stable", because=because)

    found = first_of_each_user([first, other, later], "r1", "canary-1")

    assert [(one.key, one.pool) for one in found] == [("a", pool), ("b", "infer")]


def test_what_a_session_or_a_pin_decides_is_apart(pools, tmp_path):
    pin = SliceRoute(Cut("long", (Term("request.prompt_tokens", "gte", 3),)), pinned="stable")
    with Running(config(*pools, log=LogFiles(tmp_path))) as running:
        running.gateway.take(snapshot(base=0.5, **STEP))
        for name in ("a", "b", "c"):
            ask(running, 1, **{"x-session-id": name})
        running.gateway.take(snapshot(base=1.0, version=2, run="r1", leg="full-1"))
        for name in ("a", "b", "c", "new"):
            ask(running, 1, **{"x-session-id": name})

        apart = [one.apart for one in assigned(running, tmp_path, "full-1")]

    assert apart == ["session", "session", "session", ""]
    router = Router(snapshot(pin, base=0.5, **STEP))
    for tokens, why in ((5, "long pinned"), (2, "")):
        facts = RequestFacts("r", "user", prompt_tokens=tokens)
        assert router.decide(facts, now=0.0).apart == why


@pytest.mark.parametrize(("share", "outcome"), [(0.05, "holds"), (0.03, "violated")])
def test_a_router_with_a_wrong_share_is_found_by_the_promotion(tmp_path, share, outcome):
    """From the decisions of the router to the verdict on the step, over the gateway's own log."""
    path, folder = write(tmp_path), tmp_path / "log"
    log = RequestLog(LogFiles(folder))
    writer = AssignmentLog(log, now=lambda: 1000.0)
    made = snapshot(whole=everything(), base=share, **STEP)
    router = Router(made)
    for user in range(4000):
        for request in range(1 + user % 3):
            facts = RequestFacts(f"{user} {request}", f"user {user}", labels={"first": "a"})
            routed = RoutedRequest(None, "", facts, router.decide(facts, now=0.0), "", "")
            writer.assign(routed, made, routed.decision.pool, "")
    log.close()
    traffic.log(folder, traffic.rows(path, "canary-1", 64), "served-0002.jsonl")

    split = cell(at(path, folder, CANARY), "split")

    assert (split.outcome, split.n) == (outcome, 4000)


def test_a_log_with_assignments_alone_is_continued(tmp_path):
    log = RequestLog(LogFiles(tmp_path))
    log.assign({**STEP, "at": 1.0, "key": "a", "pool": "infer", "labels": {"team": "x"}})
    log.close()

    again = RequestLog(LogFiles(tmp_path, tokens=False))
    again.assign({**STEP, "at": 2.0, "key": "b", "pool": "stable", "labels": {"team": "x"}})
    again.close()

    assert [(one.key, one.labels) for one in read_split([tmp_path])] == [
        ("a", {"team": "x"}),
        ("b", {}),  # a log without tokens keeps no outside data
    ]
