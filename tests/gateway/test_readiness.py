# /readyz: whether a balancer should send requests here, and if not, why.

import pytest

from servanda.gateway.proxy.config import Config, Upstream
from tests.gateway.serving import Fake, Running, config, drop, everything, reply, snapshot

ASK = {"model": "m", "prompt": "hello", "max_tokens": 4}
NONE_YET = "no route is known yet: stable serves (routing.without_snapshot)"
NOWHERE = "http://127.0.0.1:9"


def ready(running):
    answer = running.client.get("/readyz")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json()


def opened(running, pool):
    """Have a pool's circuit breaker open."""
    breaker = running.gateway.pools[pool].servers[0].breaker
    while breaker.state == "closed":
        breaker.unreachable()
    assert breaker.state == "open"


@pytest.fixture
def running(pools):
    with Running(config(*pools)) as running:
        yield running


def test_without_a_route_it_is_ready_and_says_who_serves(running):
    assert ready(running) == (200, {"ready": True, "reasons": [], "notes": [NONE_YET]})


def test_with_a_route_and_both_pools_nothing_is_to_be_said(running):
    running.gateway.take(snapshot(whole=everything()))

    assert ready(running) == (200, {"ready": True, "reasons": [], "notes": []})


def test_routes_that_have_expired_are_said(running):
    running.gateway.take(snapshot(whole=everything(acts=True), valid_until=0.0))

    status, found = ready(running)
    assert status == 200 and found["notes"] == [
        "the routes have expired: stable serves where they acted (routing.without_snapshot)"
    ]


@pytest.mark.parametrize("pool", ["infer", "stable"])
def test_one_pool_that_answers_is_enough_where_routes_are_known(running, pool):
    running.gateway.take(snapshot(whole=everything()))
    opened(running, pool)

    status, found = ready(running)
    assert status == 200 and found["notes"] == [
        f"after failures the circuit breaker is open for {pool} for 5 s"
    ]


def test_without_any_pool_it_is_not_ready(running):
    running.gateway.take(snapshot(whole=everything()))
    opened(running, "infer")
    opened(running, "stable")

    assert ready(running) == (
        503,
        {
            "ready": False,
            "reasons": [
                "no pool is available: after failures the circuit breaker is open for infer for "
                "5 s and stable for 5 s"
            ],
            "notes": [],
        },
    )


@pytest.mark.parametrize(
    ("without", "pool", "status"),
    [
        ("stable", "stable", 503),
        ("stable", "infer", 200),
        ("infer", "infer", 200),
        ("infer", "stable", 200),
    ],
)
def test_without_a_route_the_pool_that_serves_then_has_to_answer(pools, without, pool, status):
    """Or the one that answers in its place."""
    with Running(config(*pools, without=without)) as running:
        opened(running, pool)

        found = ready(running)
        answer = running.client.post("/v1/completions", json=ASK)
    assert found[0] == status
    assert answer.status_code == status  # and so it is
    if status == 503:
        assert found[1]["reasons"] == [
            "no route is known, and stable serves then: after failures the circuit breaker is "
            "open for stable for 5 s"
        ]


def test_a_pool_that_may_be_tried_again_makes_it_ready_again():
    """Else nothing would ever be sent that could show that the pool is well."""
    now = [0.0]
    with Fake(drop) as infer, Running(Config(Upstream(infer.url), without="infer")) as running:
        running.gateway.pools["infer"].servers[0].breaker._clock = lambda: now[0]
        opened(running, "infer")
        assert ready(running)[0] == 503

        now[0] = 6.0
        assert ready(running)[0] == 200
        infer.script = reply({})
        assert running.client.post("/v1/completions", json=ASK).status_code == 200


def test_a_gateway_that_was_told_to_end_says_so_and_answers_on(running):
    running.app.draining = True

    status, found = ready(running)
    assert status == 503 and found["reasons"] == [
        "the gateway is shutting down: send new requests elsewhere"
    ]
    for path in ("/v1/completions", "/v1/embeddings", "/v1/nothing"):
        answer = running.client.post(path, json=ASK)
        assert answer.status_code == (403 if path == "/v1/nothing" else 200)
        assert answer.headers["connection"] == "close"


def test_readiness_needs_no_key_and_no_room(pools):
    from servanda.gateway.http.api_keys import Keys
    from servanda.gateway.proxy.config import Limits

    keys = Keys(("anna", "client", "anna's-key-0123456789"))
    with Running(config(*pools, keys=keys, limits=Limits(in_flight=0))) as running:
        assert ready(running)[0] == 200
