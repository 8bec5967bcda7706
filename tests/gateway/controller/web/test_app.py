"""Who may ask a leader for what, and how he is told."""

import asyncio
import base64
import gzip
import hmac
import json
import socket
import threading

import pytest

from servanda.gateway.controller.web.app import ControllerRoutes, Limits, app
from servanda.gateway.http.api_keys import ROLES, Keys
from servanda.gateway.routing.model import snapshot_of
from servanda.promotion.notify.sinks import sinks_of
from servanda.promotion.state import Effect
from tests.gateway.controller.web import fake
from tests.gateway.controller.web.serving import KEY, KEYS, WAIT_S, bearer, live

READS = ("/", "/page", "/metrics", "/v1/status", "/assets/page.js", "/assets/page.css")
ROUTE = ("/v1/route/snapshot",)
PIN = {"slice": "long", "to": "stable", "ttl_s": 3600, "reason": "it looks wrong"}
FOLLOW = {"gateway": "g", "start": 1.0, "version": 0, "first": 0, "rows": [], "counts": {}}
ACTS = {
    "/v1/admin/pin": PIN,
    "/v1/admin/unpin": {"slice": "long", "reason": "it is repaired"},
    "/v1/admin/route": {"run": "r-1", "leg": "canary 5 %", "share": 0.05},
    "/v1/admin/reload": {},
    "/v1/follow": FOLLOW,
    "/v1/route/decide": {"request": "r-1"},
}
MAY = {
    "client": set(),
    "viewer": {*READS},
    "operator": {*READS, "/v1/admin/pin", "/v1/admin/unpin", "/v1/admin/route"},
    "admin": {*READS, *(at for at in ACTS if at.startswith("/v1/admin"))},
    "gateway": {*ROUTE, "/v1/follow", "/v1/route/decide"},
}


@pytest.fixture(scope="module")
def shared():
    leader = fake.Controller()
    with live(leader) as client:
        yield client, leader


@pytest.fixture
def server():
    leader = fake.Controller()
    with live(leader) as client:
        yield client, leader


def test_the_process_says_that_it_lives_and_nothing_else_without_a_key(shared):
    client, leader = shared
    alive = client.get("/healthz")
    assert (alive.status_code, alive.text) == (200, "ok\n")
    asked = len(leader.asked)

    for path in (*READS, *ROUTE, *ACTS, "/nowhere", "/healthz/", "//healthz", "/healthz/../page"):
        for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT"):
            answer = client.request(method, path, headers={"content-type": "application/json"})
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == 'Basic realm="servanda", charset="UTF-8"'
    assert len(leader.asked) == asked


@pytest.mark.parametrize("role", sorted(MAY))
def test_each_role_may_what_it_needs_and_no_more(server, role):
    client, _ = server
    found = set()
    for path in (*READS, *ROUTE):
        if client.get(path, headers=bearer(role)).status_code != 403:
            found.add(path)
    for path, body in ACTS.items():
        if client.post(path, json=body, headers=bearer(role)).status_code != 403:
            found.add(path)
    assert found == MAY[role]


@pytest.mark.parametrize(
    ("path", "role", "says"),
    [
        ("/page", "client", "a-client is a client, and this needs the role viewer"),
        ("/v1/admin/pin", "viewer", "a-viewer is a viewer, and this needs the role operator"),
        (
            "/v1/admin/reload",
            "operator",
            "a-operator is an operator, and this needs the role admin",
        ),
        ("/v1/follow", "admin", "a-admin is an admin, and this needs the role gateway"),
    ],
)
def test_whoever_may_not_is_told_who_may(shared, path, role, says):
    client, _ = shared
    method = "POST" if path in ACTS else "GET"
    answer = client.request(method, path, headers=bearer(role))
    assert answer.status_code == 403
    assert answer.json()["error"]["message"] == says


@pytest.mark.parametrize(
    "given",
    [
        "Bearer wrong-key-0123456789abc",
        f"Bearer {KEY['admin'][:-1]}",
        f"Basic {KEY['admin']}",
        KEY["admin"],
        f"Bearer {KEY['admin']}\x20{KEY['admin']}",
        "Bearer " + "x" * 10_000,
    ],
)
def test_a_wrong_key_is_no_key(shared, given):
    client, _ = shared
    answer = client.get("/v1/status", headers={"authorization": given})
    assert answer.status_code == 401
    assert answer.json()["error"]["message"] == "unknown key"
    assert "x" * 40 not in answer.text


def test_two_keys_are_no_key(shared):
    client, _ = shared
    headers = [("authorization", f"Bearer {KEY[role]}") for role in ("viewer", "admin")]
    assert client.get("/v1/status", headers=headers).status_code == 401


def test_a_browser_logs_in_with_a_key_for_the_password(shared):
    client, _ = shared
    text = base64.b64encode(f"anybody:{KEY['viewer']}".encode()).decode()
    answer = client.get("/", headers={"authorization": f"Basic {text}"})
    assert answer.status_code == 200
    assert "a-viewer (viewer)" in answer.text


def test_without_keys_nobody_is_let_in():
    with live(fake.Controller(), Keys()) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/v1/status", headers=bearer("admin")).status_code == 401
        assert client.get("/v1/status", headers={"authorization": "Bearer"}).status_code == 401


def test_every_answer_tells_browsers_to_be_careful(shared):
    client, _ = shared
    for path in ("/healthz", "/nowhere", *READS):
        headers = client.get(path, headers=bearer("viewer")).headers
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame" in policy
        assert not [name for name in headers if name.startswith("access-control")]
        kept = "private, max-age=86400" if path.startswith("/assets/page") else "no-store"
        assert headers["cache-control"] == kept, path


def test_a_refused_act_is_never_kept_by_a_cache(shared):
    client, _ = shared
    assert client.get("/assets/none.js", headers=bearer("viewer")).status_code == 404
    for path in ("/assets/none.js", "/assets/page.js"):
        assert client.get(path).headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_an_act_that_a_form_could_send_is_refused(shared, kind):
    client, leader = shared
    asked = len(leader.asked)
    for path, body in ACTS.items():
        role = "gateway" if "gateway" in body or path.endswith("decide") else "admin"
        headers = {**bearer(role), "content-type": kind}
        answer = client.post(path, content=json.dumps(body), headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["hint"] == "send content-type: application/json"
    assert len(leader.asked) == asked


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_an_act_from_another_site_is_refused(shared, site):
    client, leader = shared
    asked = len(leader.asked)
    headers = {**bearer("admin"), "sec-fetch-site": site}
    answer = client.post("/v1/admin/pin", json=PIN, headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["message"] == "the request comes from another site"
    assert len(leader.asked) == asked


def test_a_pin_is_recorded_for_whoever_holds_the_key(server):
    client, leader = server

    answer = client.post("/v1/admin/pin", json=PIN, headers=bearer("operator"))

    assert answer.status_code == 200
    (moved,) = answer.json()["transitions"]
    assert (moved["slice"], moved["after"]) == ("long", "active, pinned to stable")
    assert leader.asked == [("pin", "long", "stable", 3600.0, "a-operator", "it looks wrong")]


@pytest.mark.parametrize("key", ["actor", "by", "file", "url", "path", "contract", "ledger"])
@pytest.mark.parametrize("path", [at for at in ACTS if at != "/v1/follow"])
def test_no_act_names_its_actor_nor_a_file_nor_a_url(shared, path, key):
    client, leader = shared
    asked = len(leader.asked)
    role = "gateway" if path.endswith("decide") else "admin"
    answer = client.post(path, json=ACTS[path] | {key: "/etc/passwd"}, headers=bearer(role))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f'the body has no key "{key}"'
    assert len(leader.asked) == asked


@pytest.mark.parametrize(
    ("body", "message", "hint"),
    [
        (b"", "the body is not JSON: Expecting value: line 1 column 1 (char 0)", ""),
        (b"[]", "the body: a line is a JSON object", ""),
        (b"\xff", None, ""),
        (b'{"slice":"long","slice":"all"}', "the body: the key 'slice' is there twice", ""),
        (b"[" * 50_000, None, ""),
        ({"tto": "stable"}, 'the body has no key "tto"', "did you mean 'to'?"),
        ({"to": "away"}, 'to is "away"', "known: stable, infer, enforce, observe"),
        ({"to": ["stable"]}, 'to is ["stable"]', "known: stable, infer, enforce, observe"),
        ({"ttl_s": "1h"}, 'ttl_s is "1h", not a number of seconds', "such as 86400"),
        ({"ttl_s": True}, "ttl_s is true, not a number of seconds", "such as 86400"),
        ({"ttl_s": 0}, "ttl_s is 0, not a number of seconds", "such as 86400"),
        ({"ttl_s": -5}, "ttl_s is -5, not a number of seconds", "such as 86400"),
        (
            {"ttl_s": 31 * 86_400},
            "a pin holds for 30 days at most",
            "pin again when it ends, or change the contract",
        ),
        ({"reason": " "}, "an act needs a reason", "the ledger keeps it"),
        ({"reason": None}, "an act needs a reason", "the ledger keeps it"),
        ({"reason": "x" * 501}, "a reason has 500 characters at most", "shorten it"),
        ({"slice": 5}, "slice is 5, not a text", "1 to 1024 characters"),
        ({"slice": ""}, 'slice is "", not a text', "1 to 1024 characters"),
    ],
)
def test_a_pin_that_is_wrong_is_told_what_is_wrong(shared, body, message, hint):
    client, leader = shared
    asked = len(leader.asked)
    data = body if isinstance(body, bytes) else json.dumps(PIN | body).encode()
    headers = {**bearer("operator"), "content-type": "application/json; charset=utf-8"}
    answer = client.post("/v1/admin/pin", content=data, headers=headers)
    assert answer.status_code == 400
    found = answer.json()["error"]
    if message is not None:
        assert (found["message"], found["hint"]) == (message, hint)
    assert len(leader.asked) == asked


def test_a_slice_that_nobody_watches_is_not_found(shared):
    client, _ = shared
    for path in ("/v1/admin/pin", "/v1/admin/unpin"):
        body = ACTS[path] | {"slice": "lnog"}
        answer = client.post(path, json=body, headers=bearer("operator"))
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": "no slice is named 'lnog'",
            "hint": "did you mean 'long'?",
            "code": 404,
        }


def test_what_the_leader_refuses_is_told_with_its_next_move(server):
    client, _ = server
    answer = client.post("/v1/admin/unpin", json=ACTS["/v1/admin/unpin"], headers=bearer("admin"))
    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == "long has no pin"
    assert answer.json()["error"]["hint"] == "`servanda gateway status` shows the pins"


def test_a_reload_that_is_refused_says_why(server):
    client, leader = server
    leader.refuse_reload = "contract.yaml:3:1: no metric is named 'k33'"
    answer = client.post("/v1/admin/reload", json={}, headers=bearer("admin"))
    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == "contract.yaml:3:1: no metric is named 'k33'"

    leader.refuse_reload = ""
    assert client.post("/v1/admin/reload", json={}, headers=bearer("admin")).json() == {
        "version": 17
    }
    assert leader.asked == [("reload",)] * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"share": 1.5}, "a route: share is 1.5, expected `float` <= 1.0"),
        ({"mirror": "half"}, 'a route: mirror is "half", expected `float | null`, got `str`'),
        ({"sample": False}, "a route: sample is false, expected `float | null`, got `bool`"),
        ({"run": ""}, 'a route: run is "", expected `str` of length >= 1'),
    ],
)
def test_a_route_that_is_none_is_refused(shared, body, message):
    client, _ = shared
    answer = client.post("/v1/admin/route", json=body, headers=bearer("operator"))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_a_promotions_route_is_passed_on(server):
    client, leader = server
    body = {"run": "r-1", "leg": "canary", "share": 0.05, "mirror": None, "sample": 1}
    answer = client.post("/v1/admin/route", json=body, headers=bearer("operator"))
    assert answer.json() == {"version": 17}
    assert leader.asked == [("route", body | {"turn": None})]


def test_a_promotions_webhook_may_be_pointed_at_the_route(server):
    client, leader = server
    route = {"run": "r-1", "leg": "canary", "share": 0.05, "mirror": 0.0, "sample": 1, "turn": 4}
    effect = {"key": "r-1:4", "stage": "canary", "status": "running", "from": "shadow"}
    effect |= {"why": "it holds", "decided": None, "at": 1.0, **route}
    for more in ({"kind": "route"}, {"kind": "page", "to": "oncall", "for": ["x"]}):
        answer = client.post("/v1/admin/route", json={**effect, **more}, headers=bearer("operator"))
        assert answer.json() == {"version": 17}
    assert leader.asked == [("route", route)]


def test_a_webhook_that_is_an_event_and_signed_is_a_route_too(server):
    client, leader = server
    route = {"run": "r-1", "leg": "canary", "share": 0.05, "mirror": 0.0, "sample": 1, "turn": 4}
    effect = {"stage": "canary", "status": "running", "from": "shadow", "why": "it holds"}
    url = str(client.base_url).replace("http://", f"http://promoter:{KEY['operator']}@")
    (hook,) = sinks_of([f"{url}/v1/admin/route"], environ={"SERVANDA_WEBHOOK_SECRET": "A" * 44})
    hook.deliver(Effect("route", "r-1:4:route", {**effect, **route, "decided": None, "at": 1.0}))
    assert leader.asked == [("route", route)]


def test_a_snapshot_is_sent_once_for_each_version(server):
    client, leader = server
    first = client.get("/v1/route/snapshot", headers=bearer("gateway"))
    tag = first.headers["etag"]
    assert tag == '"17"'
    assert snapshot_of(first.json()) == leader.snapshot

    for known in (tag, f"W/{tag}", f'"3", {tag}', "*"):
        headers = {**bearer("gateway"), "if-none-match": known}
        again = client.get("/v1/route/snapshot", headers=headers)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)

    headers = {**bearer("gateway"), "if-none-match": '"16"'}
    assert client.get("/v1/route/snapshot", headers=headers).status_code == 200


def test_somebody_elses_gateway_asks_where_a_request_goes(server):
    client, leader = server
    body = {
        "request": "r-7",
        "sticky": "session-1",
        "labels": {"tenant": "acme"},
        "prompt_tokens": 900,
        "session": "infer",
    }
    answer = client.post("/v1/route/decide", json=body, headers=bearer("gateway")).json()
    assert answer["pool"] == "infer" and answer["reason"] == "session"
    assert answer["version"] == 17
    known = leader.asked[0][1]
    assert (known.request, known.sticky, known.prompt_tokens) == ("r-7", "session-1", 900)

    assert client.post(
        "/v1/route/decide", json={"request": "r-8"}, headers=bearer("gateway")
    ).json()["pool"] in ("infer", "stable")
    assert leader.asked[1][1].sticky == "r-8"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "a request: object missing required field `request`"),
        (
            {"request": "r", "labels": ["a"]},
            'a request: labels is ["a"], expected `object | null`, got `array`',
        ),
        (
            {"request": "r", "labels": {"a": 1}},
            'a request: labels is {"a": 1}, expected `str`, got `int`',
        ),
        (
            {"request": "r", "prompt_tokens": -1},
            "a request: prompt_tokens is -1, expected `int` >= 0",
        ),
        (
            {"request": "r", "prompt_tokens": 1.5},
            "a request: prompt_tokens is 1.5, expected `int | null`, got `float`",
        ),
        (
            {"request": "r", "session": "other"},
            "a request: session is \"other\", invalid enum value 'other'",
        ),
        ({"request": "r", "sticky": "x" * 1025}, None),
    ],
)
def test_a_request_that_cannot_be_decided_is_refused(shared, body, message):
    client, _ = shared
    answer = client.post("/v1/route/decide", json=body, headers=bearer("gateway"))
    assert answer.status_code == 400
    assert message is None or answer.json()["error"]["message"] == message


def test_a_gateway_follows_with_large_rows(server):
    client, leader = server
    rows = [{"text": "x" * 1_000_000}] * 3
    answer = client.post("/v1/follow", json=FOLLOW | {"rows": rows}, headers=bearer("gateway"))
    assert answer.json() == {"taken": 3, "version": 17, "snapshot": None}
    assert leader.asked[0][1]["rows"] == rows


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"nul", b"\xff\xfe", b"[" * 100_000, b'{"gateway": NaN}', b'{"rows": []}']
)
def test_a_message_that_is_none_is_refused(shared, data):
    client, _ = shared
    headers = {**bearer("gateway"), "content-type": "application/json"}
    answer = client.post("/v1/follow", content=data, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_bodies_are_bounded():
    leader = fake.Controller()
    with live(leader, follow_bytes=100_000, act_bytes=1_000) as client:
        for path, size in (("/v1/follow", 100_001), ("/v1/admin/pin", 1_001)):
            role = "gateway" if path == "/v1/follow" else "admin"
            headers = {**bearer(role), "content-type": "application/json"}
            answer = client.post(path, content=b" " * size, headers=headers)
            assert answer.status_code == 413
            assert "at most here" in answer.json()["error"]["message"]

            assert answer.headers["connection"] == "close"
    assert leader.asked == []


def test_a_body_that_never_ends_is_given_up():
    with live(fake.Controller(), act_s=0.2) as client:
        head = f"POST /v1/admin/pin HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY['admin']}\r\n"
        head += 'content-type: application/json\r\ncontent-length: 90\r\n\r\n{"slice"'
        with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
            raw.settimeout(WAIT_S)
            raw.sendall(head.encode())
            said = raw.recv(65_536)
    assert b" 408 " in said.splitlines()[0]


def test_a_busy_leader_holds_up_nobody_else():
    """A store that is locked holds up gateways, and they hold up no person, nor each other's
    memory: those beyond the limit are told to ask again.
    """
    leader = fake.Controller()
    gate, reached = threading.Event(), threading.Semaphore(0)

    def wait():
        reached.release()
        assert gate.wait(WAIT_S)

    leader.wait = wait
    with live(leader, follows=2) as client:
        answers = []

        def follow():
            answers.append(client.post("/v1/follow", json=FOLLOW, headers=bearer("gateway")))

        threads = [threading.Thread(target=follow) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert reached.acquire(timeout=WAIT_S)

        assert client.get("/page", headers=bearer("viewer")).status_code == 200
        more = client.post("/v1/follow", json=FOLLOW, headers=bearer("gateway"))
        assert (more.status_code, more.headers["retry-after"]) == (503, "1")

        gate.set()
        for thread in threads:
            thread.join()
        assert [a.status_code for a in answers] == [200] * 2


def test_requests_beyond_the_limit_are_told_to_ask_again():
    leader = fake.Controller()
    gate, reached = threading.Event(), threading.Event()

    def wait():
        reached.set()
        assert gate.wait(WAIT_S)

    leader.wait = wait
    with live(leader, in_flight=1) as client:
        headers = bearer("gateway")
        thread = threading.Thread(
            target=client.post, args=("/v1/follow",), kwargs={"json": FOLLOW, "headers": headers}
        )
        thread.start()
        assert reached.wait(WAIT_S)
        assert client.get("/v1/status", headers=bearer("viewer")).status_code == 503
        gate.set()
        thread.join()


def test_a_path_that_is_not_there_says_so(shared):
    client, _ = shared
    answer = client.get("/v1/elsewhere", headers=bearer("viewer"))
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "not found")
    assert client.get("/v1/admin/pin", headers=bearer("viewer")).status_code == 405
    for path in ("/assets/..%2fapp.py", "/assets/app.py", "/assets/../app.py"):
        assert client.get(path, headers=bearer("viewer")).status_code == 404


def test_a_client_that_reads_nothing_is_given_up_and_its_place_is_free_again():
    listener = app(fake.Controller(), KEYS, Limits(in_flight=1, idle_s=0.05))
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/status",
        "raw_path": b"/v1/status",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"authorization", f"Bearer {KEY['viewer']}".encode())],
    }

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def stuck(_):
        await asyncio.Event().wait()

    async def asked():
        await listener(dict(scope), receive, stuck)
        told = []

        async def send(message):
            told.append(message)

        await listener(dict(scope), receive, send)
        return told

    assert asyncio.run(asked())[0]["status"] == 200


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def test_every_route_has_a_role_in_every_method(server):
    """Walks the routes of the app itself: one that is not in the tables above fails here."""
    client, leader = server
    known = {path.replace("page.js", "{name}").replace("page.css", "{name}") for path in READS}
    app = ControllerRoutes(leader, Limits(), KEYS).routes()
    routes = {route.path: route.methods for route in app.routes}
    assert set(routes) == {*known, *ROUTE, *ACTS, "/healthz"}

    for path, methods in routes.items():
        at = path.replace("{name}", "page.js")
        for role in ROLES:
            for method in METHODS:
                body = {"json": ACTS[path]} if method in methods and path in ACTS else {}
                answer = client.request(method, at, headers=bearer(role), **body)
                if method not in methods:
                    assert answer.status_code == 405, (method, path, role)
                    assert set(answer.headers["allow"].split(", ")) == methods
                elif path == "/healthz" or at in MAY[role]:
                    assert answer.status_code in (200, 409), (method, path, role, answer.text)
                else:
                    assert answer.status_code == 403, (method, path, role)


@pytest.mark.parametrize(
    "path",
    ["/page/", "/%2e/page", "/v1/admin/pin/", "/v1/admin//pin", "/assets/%2e%2e/app.py"],
)
def test_a_path_has_one_spelling_and_nobody_is_sent_elsewhere(shared, path):
    client, leader = shared
    asked = len(leader.asked)
    for method in ("GET", "POST"):
        headers = {**bearer("admin"), "host": "evil.example"}
        answer = client.request(method, path, json=PIN, headers=headers)
        assert (answer.status_code, "location" in answer.headers) == (404, False)
    assert len(leader.asked) == asked


def test_a_compressed_body_is_refused(shared):
    client, leader = shared
    asked = len(leader.asked)
    data = gzip.compress(json.dumps(PIN).encode())
    for path, role in (("/v1/admin/pin", "operator"), ("/v1/follow", "gateway")):
        headers = {"content-encoding": "gzip", "content-type": "application/json", **bearer(role)}
        answer = client.post(path, content=data, headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["hint"] == "send no content-encoding"
    assert len(leader.asked) == asked


def test_a_reason_is_kept_on_one_line_without_what_a_terminal_obeys(server):
    client, leader = server
    reason = "a new\r\nSet-Cookie: x\x1b[31m \u202edriver\x00"
    answer = client.post(
        "/v1/admin/pin", json={**PIN, "reason": reason}, headers=bearer("operator")
    )
    assert answer.status_code == 200
    assert leader.asked[-1][-1] == "a new Set-Cookie: x [31m driver"

    blank = {**PIN, "reason": "\x00\u202e\r\n"}
    answer = client.post("/v1/admin/pin", json=blank, headers=bearer("operator"))
    assert answer.json()["error"]["message"] == "an act needs a reason"


@pytest.mark.parametrize(
    ("known", "status"),
    [
        ('"17"', 304),
        ('W/"17"', 304),
        ('"16", W/"17"', 304),
        ("*", 304),
        ("17", 200),
        ('"170"', 200),
        ('""', 200),
    ],
)
def test_a_snapshot_that_is_known_is_not_sent_again(shared, known, status):
    client, _ = shared
    headers = {"if-none-match": known, **bearer("gateway")}
    assert client.get("/v1/route/snapshot", headers=headers).status_code == status


def test_every_key_is_compared_whichever_is_right(monkeypatch):
    """So that a clock tells neither whether a key is known nor whose it is."""
    compared = []

    def compare(a, b):
        compared.append(len(a) == len(b))
        return real(a, b)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (*KEY.values(), "wrong", "", "x" * 10_000):
        compared.clear()
        KEYS.who(f"Bearer {key}")
        assert compared == [True] * len(ROLES)
