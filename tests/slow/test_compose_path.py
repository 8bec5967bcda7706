# Who tries deploy/compose.yaml: the commands of docs/how-to/deploy.md in their order, on the
# services of the compose file as processes.  Grafana is not run; Prometheus is asked what its
# panels ask.

import re
from functools import partial

import httpx2
import pytest

from tests.deploy import compose
from tests.deploy.live import Prometheus
from tests.deploy.test_monitoring import queries
from tests.gateway.running import WAIT_S
from tests.gateway.running import until as wait_until

pytestmark = pytest.mark.slow
# of what users, the scorer and the stages of a promotion take; only a red test waits so long
until = partial(wait_until, wait_s=1200)
GATEWAY = "--gateway http://127.0.0.1:8081"
BROKEN = "domain=code"
KEY = (
    r"""(umask 077; printf 'Authorization: Bearer %s\n' "$(cut -d'"' -f2 """
    r"""deploy/demo/keys/users.json)" > deploy/demo/keys/user.header)"""
)
# panels without data as long as every request is served by its pool and can be evidence, no pool
# has replicas, and no promotion judges its split
QUIET = {
    "Requests by replica",
    "Replicas in use",
    "Users of the step",
    "Share of infer in the step",
    "Evidence against the share",
    "Requests without a reply",
    "Replies of the pools that are no 2xx",
    "Failovers to stable",
    "Sampled requests that are no evidence",
}
ASK = (
    "curl -si http://127.0.0.1:8080/v1/completions "
    '-H @deploy/demo/keys/user.header -H "content-type: application/json" '
    """-d '{"prompt": "def f(x):", "max_tokens": 16, "metadata": {"domain": "code"}}'"""
)
BREAK = (
    "curl -sS http://127.0.0.1:8000/servanda/misbehave "
    """-d '{"kind": "kernel", "fault": {"int4": true}, "when": {"domain": "code"}}'"""
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with compose.Stack(tmp_path_factory.mktemp("compose")) as stack:
        stack.sh("sh deploy/demo/keys.sh")
        stack.sh("alias dc='docker compose -f deploy/compose.yaml --env-file deploy/demo/keys/env'")
        for service in stack.services.values():
            if service.name in ("prometheus", "alertmanager"):
                image = service.given["image"]
                if compose.program(image) is None:
                    pytest.skip(f"{service.name} is not installed: apt-get install prometheus-*")
        stack.sh("dc up --build --detach")
        for name in ("leader", "gateway"):
            stack.services[name].healthy()
        stack.sh("dc --profile traffic up --detach")
        stack.sh("export SERVANDA_ADMIN_KEY=$(grep ADMIN deploy/demo/keys/env | cut -d= -f2)")
        stack.sh(KEY)
        yield stack


def test_a_slice_that_breaks_pages_is_pinned_and_returns(stack):
    prometheus = Prometheus(f"http://{stack.at('prometheus', 9090)}")
    until(lambda: sound(stack), "all slices are within their limits")
    assert pools(stack) == {"infer"}

    stack.sh(BREAK)
    until(lambda: state(stack, BROKEN)["status"] == "quarantined", "the slice is diverted")
    until(lambda: pools(stack) == {"stable"}, "stable serves it")
    left = [move["slice"] for move in status(stack)["transitions"]]
    assert {*left} == {BROKEN}

    alert = until(lambda: prometheus.firing().get("ServandaSliceDiverted"), "the alert fires")
    assert alert["labels"]["slice"] == BROKEN
    pages = until(lambda: stack.sh("dc logs pager"), "a page comes")
    assert re.search(
        rf"^firing: ServandaSliceDiverted: {BROKEN} of tiny-int8 violates its limit and is served "
        r"by stable; docs/how-to/runbook\.md#servandaslicediverted$",
        pages,
        re.M,
    )
    empty = {title for title, asked in panels() if not prometheus.query(asked)}
    assert empty <= QUIET

    stack.sh(f'servanda gateway pin {BROKEN} --to stable --ttl 1h --reason "incident 12" {GATEWAY}')
    stack.sh("curl -sS -X DELETE http://127.0.0.1:8000/servanda/misbehave")
    # the kernel passes the return test, and only the pin holds the slice
    held = "not returned: pinned to stable by operator"
    until(lambda: state(stack, BROKEN)["held"] == held, "only the pin holds the slice")
    assert pools(stack) == {"stable"}
    stack.sh(f'servanda gateway pin {BROKEN} --release --reason "incident 12 is over" {GATEWAY}')
    until(lambda: state(stack, BROKEN)["status"] == "active", "the slice returns")
    until(lambda: pools(stack) == {"infer"}, "infer serves it")
    until(lambda: "ServandaSliceDiverted" not in prometheus.firing(), "the alert ends")
    until(lambda: "resolved: ServandaSliceDiverted" in stack.sh("dc logs pager"), "its page ends")
    verified(stack.sh("dc exec leader servanda promotion ledger verify"))


def test_a_promotion_is_approved_and_rolled_back(stack):
    until(lambda: sound(stack), "all slices are within their limits")
    stack.sh("dc --profile promotion up --detach promote")

    def asks():
        promote = stack.services["promote"]
        assert promote.process.poll() is None, promote.log
        return "full-1 needs an approval" in stack.sh("dc logs --follow promote")

    until(asks, "the promotion waits for a person")
    said = stack.sh("dc exec promote servanda promotion status")
    run = re.search(r"^(tiny-int8\S*)", said, re.M)[1]
    stack.sh('dc exec promote servanda promotion approve RUN --reason "the canary held"', RUN=run)
    until(lambda: stack.services["promote"].process.poll() is not None, "the promotion ends")
    assert "COMPLETED" in stack.services["promote"].log
    until(lambda: pools(stack) == {"infer"}, "infer serves everything")
    stack.sh('dc run --rm promote promotion rollback RUN --reason "a drill"', RUN=run)
    until(lambda: pools(stack) == {"stable"}, "stable serves everything")
    verified(stack.sh("dc run --rm promote promotion ledger verify"))
    verified(stack.sh("dc exec leader servanda promotion ledger verify"))


def panels():
    """What Grafana would ask Prometheus, by the title of the panel."""
    for title, expression in queries():
        asked = expression.replace("$__rate_interval", "1m")
        yield title, asked.replace("$contract", "tiny-int8").replace("$slice", ".*")


def status(stack):
    reply = httpx2.get(
        f"http://{stack.at('leader', 8081)}/v1/status",
        headers={"authorization": f"Bearer {stack.keys['SERVANDA_ADMIN_KEY']}"},
        timeout=WAIT_S,
    )
    return reply.raise_for_status().json()


def state(stack, name):
    return next((one for one in status(stack)["slices"] if one["name"] == name), {})


def sound(stack):
    said = stack.sh(f"servanda gateway status {GATEWAY}")
    return re.match(r"✓ \d+ active, within limits$", said, re.M)


def pools(stack, n=8):
    """Who serves a user of the domain that breaks."""
    replies = [stack.sh(ASK) for _ in range(n)]
    assert all(re.match(r"HTTP/1\.1 200 ", reply) for reply in replies), replies
    return {re.search(r"^x-servanda-pool: (\w+)", reply, re.M | re.I)[1] for reply in replies}


def verified(text):
    assert re.search(r"^✓ \d+ (entry|entries)", text, re.M), text
