# The listener: what a stranger may send before anybody looks at it.

import contextlib
import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.engines.server import sockets
from servanda.errors import MeasurementError
from servanda.gateway.http import listener
from servanda.gateway.http.listener import HEAD_BYTES, Listener, bind, head_error

WAIT_S = 60  # for what comes at once, unless the test is red


async def sizes(scope, receive, send):
    """Answers with how many bytes of body came."""
    if scope["type"] == "lifespan":
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})
        return
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def listens(server=None, **more):
    """A connection to a listener in a thread; server: a list for the listener."""
    own = [] if server is None else server
    ready = threading.Event()
    with bind("127.0.0.1", 0, "--port") as taken:
        server = Listener(sizes, taken, grace_s=1, ready=ready.set, **more)
        own.append(server)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            assert ready.wait(WAIT_S)
            with socket.create_connection(taken.getsockname(), timeout=WAIT_S) as connection:
                yield connection
        finally:
            server.end()
            thread.join(WAIT_S)


@pytest.fixture(autouse=True)
def _no_signals(monkeypatch):
    monkeypatch.setattr(sockets.signal, "signal", lambda *_: None)  # a thread has none


@pytest.fixture
def connection():
    with listens() as found:
        yield found


def all_of(connection):
    """Everything until the other side closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def ends(connection, expected):
    """Whether what comes ends so; a head and its body may come apart."""
    parts = b""
    while not parts.endswith(expected) and (part := connection.recv(4096)):
        parts += part
    return parts.endswith(expected)


def test_a_head_in_pieces_is_read_as_one(connection):
    for piece in (b"POST / HT", b"TP/1.1\r\nhost: a\r\ncontent-le", b"ngth: 3\r\n", b"\r\nab"):
        connection.sendall(piece)
    connection.sendall(b"c")
    assert ends(connection, b"\r\n\r\n3")


def test_a_head_without_an_end_is_cut(connection):
    connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n")
    with contextlib.suppress(ConnectionError):
        for n in range(2 * HEAD_BYTES // 1024):
            connection.sendall(b"x-%d: " % n + b"y" * 1015 + b"\r\n")
    assert all_of(connection).startswith(b"HTTP/1.1 431")


def test_a_line_without_an_end_is_cut(connection):
    with contextlib.suppress(ConnectionError):
        connection.sendall(b"GET /")
        for _ in range(2 * HEAD_BYTES // 1024):
            connection.sendall(b"a" * 1024)
    assert all_of(connection)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400")


def test_a_large_body_is_no_large_head(connection):
    body = b"z" * (4 * HEAD_BYTES)
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    for _ in range(3):  # the next head comes with the end of the body before it
        connection.sendall(head + body)
    connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    answers = all_of(connection)
    assert answers.count(b"200 OK") == 4 and answers.count(str(len(body)).encode()) >= 3


def test_what_follows_a_body_in_chunks_is_bounded(connection):
    connection.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    connection.sendall(b"3\r\nabc\r\n0\r\n")
    with contextlib.suppress(ConnectionError):
        for n in range(8 * HEAD_BYTES // 1024):
            connection.sendall(b"x-%d: " % n + b"y" * 1015 + b"\r\n")
    assert all_of(connection).startswith(b"HTTP/1.1 431")


def test_a_short_trailer_is_read_over(connection):
    connection.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    connection.sendall(b"3\r\nabc\r\n0\r\nx-sum: 1\r\n\r\n")
    assert ends(connection, b"\r\n\r\n3")


def test_a_body_of_many_chunks_is_no_trailer(connection):
    connection.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(4 * HEAD_BYTES // 1024):
        connection.sendall(b"400\r\n" + b"z" * 1024 + b"\r\n")
    connection.sendall(b"0\r\n\r\n")
    assert ends(connection, b"\r\n\r\n%d" % (4 * HEAD_BYTES))


def test_a_head_that_takes_too_long_is_cut(monkeypatch):
    monkeypatch.setattr(listener, "HEAD_S", 0.05)
    with listens() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost")
        assert all_of(connection) == b""


def test_who_connects_and_says_nothing_is_cut(monkeypatch):
    monkeypatch.setattr(listener, "HEAD_S", 0.05)
    with listens() as connection:
        assert all_of(connection) == b""


def test_two_do_not_listen_at_one_address():
    taken = r"nothing can be served at 127\.0\.0\.1:"
    with (
        bind("127.0.0.1", 0, "--port") as first,
        pytest.raises(MeasurementError, match=taken) as refused,
    ):
        bind(*first.getsockname(), "--admin")
    assert "--admin takes another address" in str(refused.value)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(MeasurementError, match=r"nothing can be served at 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0, "--port")


def test_where_another_process_goes_on_the_last_connection_is_answered(monkeypatch):
    """Its request comes when no more connections are accepted."""
    monkeypatch.setattr(listener, "_LEAVES_S", 2.0)
    ask, found = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", []
    with listens(leaving=lambda: found[0].sendall(ask), server=found) as connection:
        connection.sendall(ask)  # so it has been accepted
        assert ends(connection, b"\r\n\r\n0")
        server, found[:] = found[0], [connection]
        server.end()
        assert all_of(connection).startswith(b"HTTP/1.1 200 OK")


LINE = b"POST / HTTP/1.1\r\n"
NO_HOST = "the Host header is not a host: send NAME, NAME:PORT or [IPv6]:PORT"


def refused(code, message):
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return {"error": error}


@pytest.mark.parametrize(
    ("head", "status", "error"),
    [
        (LINE, 400, refused("no_host", "there is no Host header, and HTTP/1.1 needs one: send it")),
        (
            LINE + b"Host: a\r\nhost: a\r\n",
            400,
            refused("hosts", "there are 2 Host headers: send one"),
        ),
        *(
            (LINE + b"Host: %s\r\n" % host, 400, refused("bad_host", NO_HOST))
            for host in (b"", b"a b", b"me@a", b"a:99999")
        ),
        (
            b"POST / HTTP/1.0\r\nhost: a\r\nHOST: b\r\nhost: c\r\n",
            400,
            refused("hosts", "there are 3 Host headers: send one"),
        ),
        (
            b"POST / HTTP/2.0\r\nhost: a\r\n",
            505,
            refused("http_version", "HTTP/2.0 is not spoken here: ask by HTTP/1.1"),
        ),
        (
            b"POST / HTTP/0.9\r\nhost: a\r\n",
            505,
            refused("http_version", "HTTP/0.9 is not spoken here: ask by HTTP/1.1"),
        ),
    ],
)
def test_a_head_that_servers_read_differently_is_refused(connection, head, status, error):
    """And ends its connection: what follows it may be no request."""
    connection.sendall(head + b"content-length: 3\r\n\r\nabcPOST / HTTP/1.1\r\nhost: a\r\n\r\n")
    answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.count(b"\r\ndate: ") == 1
    assert b"\r\nconnection: close\r\n" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == error


NAMES = st.text("aZ09._~!$&'()*+,;=-", min_size=1) | st.sampled_from(
    ["xn--bcher-kva.example", "a%2Fb"]
)
HOSTS = NAMES | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map("[{}]".format)
PORTS = st.none() | st.just("") | st.integers(0, 65_535).map("{:04}".format)


@given(host=HOSTS | st.just("[v1.a:b]"), port=PORTS)
def test_a_host_of_rfc_3986_is_taken_with_any_port(host, port):
    value = host if port is None else f"{host}:{port}"
    for blank in ("", " "):
        assert head_error("1.1", [(b"host", f"{value}{blank}".encode())]) is None


OF_NO_HOST = st.sampled_from(' \t"/\\<>?#@[]{}|^`\x01\x7fé')
PORTS_OF_NONE = st.integers(65_536).map(str) | st.sampled_from(
    ["-1", "+1", "1 0", "0x1", "1:2", "a"]
)
BROKEN = ("", ":80", "[]", "[::1", "::1", "[1.2.3.4]", "[::1]a", "[::1%25lo]", "[v1]", "a%", "a%2g")


@given(
    st.builds("{}{}{}".format, NAMES, OF_NO_HOST, NAMES)
    | st.builds("{}:{}".format, HOSTS, PORTS_OF_NONE)
    | st.sampled_from(BROKEN)
)
def test_another_host_is_refused(value):
    refusal = head_error("1.1", [(b"host", value.encode())])
    assert refusal is not None and (refusal.status, refusal.code) == (400, "bad_host")


def test_a_request_without_a_host_is_answered_where_http_1_0_knows_none(connection):
    connection.sendall(b"POST / HTTP/1.0\r\ncontent-length: 3\r\n\r\nabc")
    assert all_of(connection).endswith(b"\r\n\r\n3")


def test_a_refusal_waits_for_the_answer_before_it(connection):
    connection.sendall(LINE + b"host: a\r\ncontent-length: 3\r\n\r\nabc" + LINE + b"\r\n")
    first, _, second = all_of(connection).partition(b"HTTP/1.1 400 ")
    assert first.startswith(b"HTTP/1.1 200 OK") and first.endswith(b"\r\n\r\n3")
    assert b"there is no Host header" in second


H2C = b"host: a\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMA\r\n"
BODIES = [
    (b"content-length: 5\r\n\r\nabcde", b"5"),
    (b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"5"),
    (b"content-length: 0\r\n\r\n", b"0"),
    (b"\r\n", b"0"),
]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("rest", "said"), BODIES)
def test_an_offer_of_http_2_is_declined_and_its_body_kept(connection, rest, said, size):
    """As Java's HttpClient makes one with its first request; however the bytes come."""
    asked = LINE + H2C + rest
    wanted = b"HTTP/1.1 200 OK"
    for data in (asked, asked + LINE + b"host: a\r\nconnection: close\r\n\r\n"):
        for i in range(0, len(data), size):
            connection.sendall(data[i : i + size])
    answer = all_of(connection)
    assert answer.count(wanted) == 3 and b"101" not in answer.partition(b"\r\n")[0]
    assert answer.count(b"\r\n\r\n" + said) >= 2


def test_many_offers_on_one_connection_are_declined_one_by_one(connection):
    connection.sendall((LINE + H2C + BODIES[0][0]) * 300)
    connection.sendall(LINE + b"host: a\r\nconnection: close\r\n\r\n")
    answer = all_of(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 301


def test_a_websocket_that_nobody_offers_is_a_request_like_any_other(connection):
    connection.sendall(
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    )
    connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert all_of(connection).count(b"HTTP/1.1 200 OK") == 2
