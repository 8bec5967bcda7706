# A leader that runs, and a holder of a key who takes all that there is.

import select
import socket

import httpx2
import pytest

from tests.gateway.controller.web.serving import KEY
from tests.gateway.leading import pin
from tests.gateway.running import WAIT_S, Serving
from tests.gateway.serving import Fake, reply

SLOW = 150  # more than a leader answers at a time
PATHS = {"operator": "/v1/admin/pin", "gateway": "/v1/follow"}


@pytest.fixture(scope="module")
def leader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leader")
    rows = (f"- {{name: a-{role}, role: {role}, key: {key}}}\n" for role, key in KEY.items())
    (folder / "keys.yaml").write_text("".join(rows))
    words = ("--leader-only", "--keys", "keys.yaml")
    with (
        Fake(reply({})) as infer,
        Fake(reply({})) as stable,
        Serving(folder, (infer.url, stable.url), *words, keys=False) as leader,
    ):
        leader.line("the leader is running")
        leader.keys = KEY
        yield leader


def status(leader, key):
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.get(f"{leader.page}/v1/status", headers=headers, timeout=WAIT_S).status_code


@pytest.mark.parametrize("role", PATHS)
def test_slow_bodies_of_one_key_hold_up_nobody_else(leader, role):
    at = httpx2.URL(leader.page)
    head = f"POST {PATHS[role]} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY[role]}\r\n"
    head += "content-type: application/json\r\ncontent-length: 500\r\n\r\n{"
    slow = [socket.create_connection((at.host, at.port), WAIT_S) for _ in range(SLOW)]
    try:
        for one in slow:
            one.sendall(head.encode())
        # those beyond the share of the key are refused; a late body ends with 408
        first, *_ = select.select(slow, [], [], WAIT_S)[0]
        assert first.recv(13) in (b"HTTP/1.1 429 ", b"HTTP/1.1 408 ")

        assert [status(leader, KEY["viewer"]) for _ in range(4)] == [200] * 4
        pin(leader, "team=d", "stable")  # an administrator
        assert httpx2.get(f"{leader.page}/healthz", timeout=WAIT_S).status_code == 200
    finally:
        for one in slow:
            one.close()


def test_refused_keys_are_counted_and_not_kept(leader):
    wrong = "a-key-that-nobody-has-0123"

    def counted():
        headers = {"authorization": f"Bearer {KEY['viewer']}"}
        text = httpx2.get(f"{leader.page}/metrics", headers=headers, timeout=WAIT_S).text
        assert wrong not in text and wrong not in leader.text
        name = 'servanda_refused_keys_total{contract="toy",listener="leader"} '
        return float(next(x for x in text.splitlines() if x.startswith(name))[len(name) :])

    before = counted()
    assert [status(leader, wrong) for _ in range(3)] == [401] * 3
    assert httpx2.get(f"{leader.page}/v1/status", timeout=WAIT_S).status_code == 401  # no key
    assert counted() == before + 3
