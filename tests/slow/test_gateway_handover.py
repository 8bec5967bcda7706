# A gateway whose socket a service manager keeps open: it is restarted under load.

import contextlib
import socket

import httpx2
import pytest

from tests.gateway.running import WAIT_S, Serving, Users, ask, kernels, until

# as systemd does: the socket is descriptor 3, and LISTEN_PID is the process that it starts
HANDS = 'exec 3<&{fd}; [ {fd} = 3 ] || exec {fd}<&-; LISTEN_FDS={n} LISTEN_PID=$$ exec "$@"'


class Handed(Serving):
    """`servanda serve` with a socket that was handed over."""

    def __init__(self, folder, urls, fd, *words, n=1):
        self._hands = HANDS.format(fd=fd, n=n), fd
        super().__init__(folder, urls, *words)

    def command(self, words):
        shell, _ = self._hands
        return ["bash", "-c", shell, "bash", *super().command(words)]

    @property
    def pass_fds(self):
        return (self._hands[1],)


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    with kernels(tmp_path_factory.mktemp("kernels")) as found:
        yield found


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as taken:
        yield taken


class Callers(Users):
    """Several who each open a connection for every request, until the block ends."""

    def __init__(self, url):
        super().__init__(url)
        self.statuses = []

    def _ask(self, number):
        while not self._stop.is_set():
            with httpx2.Client(base_url=self._url, timeout=WAIT_S) as client:
                self.statuses.append(ask(client, "a")[1])


def test_a_restart_under_load_refuses_no_connection_and_loses_no_request(urls, tmp_path, listening):
    at = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Handed(tmp_path, urls, listening.fileno()))
        first.line(f"serving users at {at}/v1")
        callers = stack.enter_context(Callers(at))
        for _ in range(3):
            before = len(callers.statuses)
            until(lambda n=before: len(callers.statuses) > n + 40, "they are answered")
            assert first.end() == 0
            first = stack.enter_context(Handed(tmp_path, urls, listening.fileno()))
        before = len(callers.statuses)
        until(lambda: len(callers.statuses) > before + 40, "they are answered again")
        callers.__exit__()
        assert {*callers.statuses} == {200}
        assert first.end() == 0


@pytest.mark.parametrize(
    ("n", "said"),
    [
        (2, r"2 sockets were handed over \(LISTEN_FDS\), and a gateway has one"),
        (1, r"the socket that was handed over \(LISTEN_FDS\) is no listening TCP socket"),
    ],
)
def test_what_is_no_socket_of_a_gateway_is_refused(urls, tmp_path, n, said):
    with socket.socket() as unbound, Handed(tmp_path, urls, unbound.fileno(), n=n) as serving:
        serving.line(said)
        serving.line("hint: give the .socket unit one ListenStream= with a TCP port")
        assert serving.process.wait(WAIT_S) == 4


def test_a_socket_for_another_process_is_none_of_ours(urls, tmp_path):
    environ = {"LISTEN_FDS": "1", "LISTEN_PID": "1"}
    with Serving(tmp_path, urls, **environ) as serving:
        assert serving.url
        assert serving.end() == 0
