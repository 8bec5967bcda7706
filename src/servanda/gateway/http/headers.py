# Headers: those forwarded to an upstream, and those returned to the client.

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Header = tuple[bytes, bytes]

# hop-by-hop headers (RFC 9110, 7.6.1)
_HOP = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade http2-settings".split()
)
# headers by which a client could choose its pool or impersonate the gateway
_OURS = frozenset(
    b"host content-length expect x-rewrite-url x-http-method x-http-method-override "
    b"x-method-override".split()
)
# about the origin of a request: a client may forge them, and an upstream that trusts the gateway
# would trust them
_WHENCE = frozenset(
    b"forwarded x-real-ip x-client-ip x-cluster-client-ip true-client-ip cf-connecting-ip".split()
)
# the date is that of the client's reply; another address would bypass the gateway
_NOT_BACK = _HOP | {b"date", b"alt-svc"}
# headers about the exact bytes of a body
OF_A_BODY = ("content-md5", "digest", "content-digest", "repr-digest")
_NO_LONGER = frozenset((b"content-length", b"etag", *(name.encode() for name in OF_A_BODY)))
_BEGIN = (b"x-servanda-", b"proxy-", b"x-mirror-", b"x-envoy-")
_BEGIN_SENT = (*_BEGIN, b"x-forwarded-", b"x-original-")
_LEFT_OUT = _HOP | _OURS | _WHENCE
SESSIONS = (b"x-session-id", b"x-user-id", b"x-tenant-id")  # in the order of vLLM's router
_READ = frozenset((b"authorization", b"content-length", b"transfer-encoding", *SESSIONS))
_USUAL = (b"", b"close", b"keep-alive")  # values of `connection` that name no header
_NAME_BYTES = 256  # most characters of a session's name


def upstream_headers(headers: Iterable[Header], key: str, keeps: bool) -> list[tuple[str, str]]:
    """The headers for an upstream, from a client's.

    Args:
        key: the upstream's key; keeps: whether the client's own is forwarded without one.
    """
    passed, named = [], b""
    for name, value in headers:
        if name in _LEFT_OUT or name.startswith(_BEGIN_SENT):
            if name == b"connection":
                named = named + b"," + value if named else value
            continue
        if name == b"authorization" and (key or not keeps):
            continue
        passed.append((name.decode("latin-1"), text(value)))
    if named.lower() not in _USUAL:
        more = {part.decode("latin-1") for part in _parts(named)}
        passed = [(name, value) for name, value in passed if name not in more]
    if key:
        passed.append(("authorization", f"Bearer {key}"))
    return passed


def client_headers(headers: Iterable[Header], *, rewritten: bool = False) -> list[Header]:
    """The headers for the client, from an upstream's.

    Args:
        rewritten: whether the body was changed, so that length and digest are invalid.
    """
    passed, named = [], b""
    for raw, value in headers:
        name = raw.lower()
        if name in _NOT_BACK or name.startswith(_BEGIN):
            if name == b"connection":
                named = named + b"," + value if named else value
            continue
        if rewritten and name in _NO_LONGER:
            continue
        passed.append((name, value))
    if named.lower() not in _USUAL:
        more = _parts(named)
        passed = [(name, value) for name, value in passed if name not in more]
    return passed


def text(value: bytes) -> str:
    """Bytes of a head as text in UTF-8, as aiohttp writes it."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _parts(named: bytes) -> set[bytes]:
    return {part.strip() for part in named.lower().split(b",")}


class Head(NamedTuple):
    """The request headers that a gateway uses.

    Args:
        size: total bytes.
        length, chunked: of the body; neither without a body.
        session: the client's session name; "" if none.
    """

    size: int
    authorization: bytes | None
    length: bytes | None
    chunked: bool
    session: str


def read_head(headers: Iterable[Header]) -> Head:
    """The head, in one pass; of repeated headers the last one counts."""
    size, values = 0, {}
    for name, value in headers:
        size += len(name) + len(value) + 4
        if name in _READ:
            values[name] = value
    session = b""
    if values:
        session = next((value for name in SESSIONS if (value := values.get(name))), b"")
    return Head(
        size,
        values.get(b"authorization"),
        values.get(b"content-length"),
        b"transfer-encoding" in values,
        session[:_NAME_BYTES].decode("latin-1"),
    )
