# Which paths under /v1 clients may reach at stable, however they write them.

import posixpath
import socket
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.errors import ContractError
from servanda.gateway.http.api_keys import Keys
from servanda.gateway.proxy.config import OPEN, AllowedPaths, Config, Upstream
from tests.gateway.serving import WAIT_S, Fake, Running, config, reply

# what the servers behind a gateway do under /v1 that is no inference
CLOSED = (
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/v1/files"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files/file-7/content"),
    ("POST", "/v1/batches"),
    ("POST", "/v1/fine_tuning/jobs"),
    ("GET", "/v1/chat/completions/chat-7"),
    ("POST", "/v1/completions/render"),
    ("GET", "/v1/a_path_of_tomorrow"),
)
KEYS = Keys(("anna", "client", "anna's-key-0123456789"))
HEADERS = {"authorization": "Bearer anna's-key-0123456789"}


@pytest.fixture(scope="module")
def stable():
    with Fake(reply({"by": "stable"})) as stable:
        yield stable


@pytest.fixture(scope="module")
def port(stable):
    """Of a gateway whose stable asks for a key."""
    own = Config(Upstream("http://127.0.0.1:9"), Upstream(stable.url, key="the operator's"))
    with Running(own) as running:
        yield running.port


def said(port, target, method="POST"):
    """The reply to a request whose target is sent as these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        head = b"%s %s HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        client.sendall(head % (method.encode(), target))
        answer = b""
        while part := client.recv(65_536):
            answer += part
    return answer


@pytest.mark.sampled(4)
@pytest.mark.parametrize("keys", [None, KEYS])
@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_a_path_that_is_not_open_is_refused_with_the_next_move(stable, keys, method, path):
    before = len(stable.requests)
    with Running(config(Upstream("http://127.0.0.1:9").url, stable, keys=keys)) as running:
        answer = running.client.request(method, path, headers=HEADERS)

    assert answer.status_code == 403
    assert answer.json()["error"] == {
        "message": f"{path} is not open to clients of this gateway; if it should be, its operator "
        f"starts it with --allow {path}",
        "type": "permission_error",
        "param": None,
        "code": "path_not_allowed",
    }
    assert len(stable.requests) == before


@pytest.mark.parametrize("rule", OPEN)
def test_inference_and_models_are_open(stable, port, rule):
    method, _, path = rule.partition(" ")
    target = path.replace("*", "a").encode()

    assert said(port, target, method).startswith(b"HTTP/1.1 200 ")
    # models are those of the first pool that answers
    assert stable.last.target.encode() == target


@pytest.mark.parametrize(
    ("method", "path", "takes"),
    [
        ("DELETE", "/v1/models/adapter", "GET"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/responses/r1", "GET"),
        ("GET", "/v1/embeddings", "POST"),
        ("OPTIONS", "/v1/embeddings", "POST"),
    ],
)
def test_an_open_path_takes_the_methods_that_it_has(stable, port, method, path, takes):
    before = len(stable.requests)

    answer = said(port, path.encode(), method)

    assert answer.startswith(b"HTTP/1.1 405 ")
    assert f"{path} takes {takes}".encode() in answer
    assert len(stable.requests) == before


def test_an_operator_opens_a_path_for_a_method_or_with_all_that_lies_below(stable):
    allow = ("GET /v1/files", "/v1/batches/*")
    with Running(config("http://127.0.0.1:9", stable, allow=allow)) as running:
        met = {
            (method, path): running.client.request(method, path).status_code
            for method in ("GET", "POST")
            for path in ("/v1/files", "/v1/files/7", "/v1/batches", "/v1/batches/b/cancel")
        }

    assert {asked for asked, status in met.items() if status == 200} == {
        ("GET", "/v1/files"),
        ("GET", "/v1/batches/b/cancel"),
        ("POST", "/v1/batches/b/cancel"),
    }
    assert met["POST", "/v1/files"] == 405


NO_PATHS = ("", "v1/files", "/v2/files", "/v1", "/v1/", "/v1/*/x", "/v1/a/", "/v1/a//b", "/v1/../x")
NO_PATHS += ("/v1/a?b", "/v1/%61", "get /v1/files", "GET  /v1/files", "/v1/admin/pin", "/v1/status")


@pytest.mark.parametrize("rule", NO_PATHS)
def test_what_is_no_path_is_refused_at_the_start(rule):
    with pytest.raises(ContractError) as refused:
        Config(Upstream("http://a"), Upstream("http://b"), allow=(rule,))

    assert str(refused.value) == (
        f"--allow is {rule!r}\n  hint: write a path of users' own, such as /v1/files, /v1/files/* "
        "for all that lies below, or 'GET /v1/files' for one method"
    )


SEGMENTS = ("v1", "V1", "load_lora_adapter", "LOAD_LORA_ADAPTER", "models", "m", "responses")
SEGMENTS += ("embeddings", "files", "admin", ".", "..", "")
SLASHES = ("/", "/", "/", "//", "%2f", "%2F", "%252f", "\\", "%5c", "/./", "/../", "/%2e%2e/")
SLASHES += (";/", "%00", "%ef%bc%8f", "%c0%af")
ENDS = ("", "/", "?", "?a=/v1/models", "?/../models", ";x", ";/v1/models", "%3f", "%23", "%20")
ENDS += (".", "/.", "/..", "%2f", "#", "#/v1/models")


@st.composite
def targets(draw):
    """Targets that some server may read as another path than it seems."""
    parts = draw(
        st.lists(st.tuples(st.sampled_from(SLASHES), st.sampled_from(SEGMENTS)), max_size=6)
    )
    start = draw(st.sampled_from(("/v1", "/v1/models", "/v1/embeddings", "http://stable/v1", "")))
    text = start + "".join(map("".join, parts)) + draw(st.sampled_from(ENDS))
    escaped = draw(st.sets(st.integers(0, max(0, len(text) - 1)), max_size=4))
    return "".join(
        f"%{ord(c):02x}" if i in escaped and c.isalnum() else c for i, c in enumerate(text)
    )


def readings(target):
    """Every path that a lenient server may take a target for: decoded any number of times, with
    slashes of any kind, dots resolved or not, without parameters, in any case."""
    if target.startswith("http://"):
        target = "/" + target[7:].partition("/")[2]
    found, text = set(), target
    for _ in range(4):
        for path in (text, text.partition("?")[0], text.partition("#")[0], text.partition(";")[0]):
            path = path.partition("?")[0].partition("#")[0]
            plain = path.replace("\\", "/").replace("\uff0f", "/").replace("\x00", "")
            for one in (path, plain, posixpath.normpath("/" + plain.lstrip("/"))):
                found.add(one.rstrip("/").lower())
        text = unquote(text)
    return {one for one in found if "%" not in one}  # what is not decoded is no server's path


@settings(max_examples=300, deadline=None)
@given(targets(), st.sampled_from(("GET", "POST", "DELETE")))
def test_no_spelling_of_a_path_gets_around_the_list(stable, port, target, method):
    """Whatever arrives at stable is open in every way in which stable may read it."""
    before = len(stable.requests)
    said(port, target.encode("latin-1", "replace"), method)

    for request in stable.requests[before:]:
        for path in readings(request.target):
            known = AllowedPaths().methods(path)
            assert request.method in known, (target, request.target, path)


def test_the_search_would_see_a_list_that_is_got_around():
    """Its readings of hostile spellings have the path that is meant."""
    for target in (
        "/v1//load_lora_adapter",
        "/v1/models/%2e%2e/load_lora_adapter",
        "/v1/models/..%2fload_lora_adapter",
        "/v1/models/%252e%252e%252fload_lora_adapter",
        "/v1/LOAD_lora_adapter/",
        "/v1/models\\..\\load_lora_adapter",
        "/v1/load_lora_adapter;x",
        "/v1/load%5flora_adapter?a=/v1/models",
    ):
        assert "/v1/load_lora_adapter" in readings(target)
