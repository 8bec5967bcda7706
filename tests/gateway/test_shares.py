# A leader that runs, and a holder of a key who takes all that there is.

import contextlib
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
OWN = 24  # requests that one key may have in flight
COLLUDING = [f"operator-{n}-key-0123456789" for n in range(4)]


@pytest.fixture(scope="module")
def leader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leader")
    rows = (f"- {{name: a-{role}, role: {role}, key: {key}}}\n" for role, key in KEY.items())
    more = (f"- {{name: {key[:10]}, role: operator, key: {key}}}\n" for key in COLLUDING)
    (folder / "keys.yaml").write_text("".join([*rows, *more]))
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


@contextlib.contextmanager
def slow_bodies(leader, path, keys):
    """One request of each key whose body never ends, once the first of them is refused."""
    at = httpx2.URL(leader.page)
    with contextlib.ExitStack() as stack:
        slow = [socket.create_connection((at.host, at.port), WAIT_S) for _ in keys]
        for one, key in zip(slow, keys, strict=True):
            stack.callback(one.close)
            head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n"
            head += "content-type: application/json\r\ncontent-length: 500\r\n\r\n{"
            one.sendall(head.encode())
        # those beyond a share are refused; a late body ends with 408
        first, *_ = select.select(slow, [], [], WAIT_S)[0]
        assert int(first.recv(13).split()[1]) in (408, 429, 503)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("role", PATHS)
def test_slow_bodies_of_one_key_hold_up_nobody_else(leader, role):
    with slow_bodies(leader, PATHS[role], [KEY[role]] * SLOW):
        assert [status(leader, KEY["viewer"]) for _ in range(4)] == [200] * 4
        pin(leader, "team=d", "stable")  # an administrator
        assert httpx2.get(f"{leader.page}/healthz", timeout=WAIT_S).status_code == 200


@pytest.mark.slow
def test_slow_bodies_of_a_few_keys_together_hold_up_nobody_else(leader):
    """Four shares are more than there is."""
    keys = [key for key in COLLUDING for _ in range(OWN)]
    with slow_bodies(leader, PATHS["operator"], keys):
        assert [status(leader, KEY["viewer"]) for _ in range(4)] == [200] * 4
        pin(leader, "team=d", "stable")


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
