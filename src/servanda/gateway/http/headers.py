# Headers: which of a client's go to an upstream, and which of an upstream's come back.

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Header = tuple[bytes, bytes]

# of one connection, and no other's business (RFC 9110, 7.6.1)
_HOP = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade http2-settings".split()
)
# which would let a client choose where it lands, or say for the gateway what it is not
_OURS = frozenset(
    b"host content-length expect x-rewrite-url x-http-method x-http-method-override "
    b"x-method-override".split()
)
# of whence a request comes, or for whom: a client may write anything there, and an upstream
# that believes what the gateway sends would believe them
_WHENCE = frozenset(
    b"forwarded x-real-ip x-client-ip x-cluster-client-ip true-client-ip cf-connecting-ip".split()
)
# the date is that of the reply that the client gets; another address would go past us
_NOT_BACK = _HOP | {b"date", b"alt-svc"}
# of a body's very bytes
OF_A_BODY = ("content-md5", "digest", "content-digest", "repr-digest")
_NO_LONGER = frozenset((b"content-length", b"etag", *(name.encode() for name in OF_A_BODY)))
_BEGIN = (b"x-servanda-", b"proxy-", b"x-mirror-", b"x-envoy-")
_BEGIN_SENT = (*_BEGIN, b"x-forwarded-", b"x-original-")
_LEFT_OUT = _HOP | _OURS | _WHENCE
SESSIONS = (b"x-session-id", b"x-user-id", b"x-tenant-id")  # in the order of vLLM's router
_READ = frozenset((b"authorization", b"content-length", b"transfer-encoding", *SESSIONS))
_USUAL = (b"", b"close", b"keep-alive")  # of a connection: no header of its own is named
_NAME_BYTES = 256  # of a session's name


def upstream_headers(headers: Iterable[Header], key: str, keeps: bool) -> list[tuple[str, str]]:
    """A client's headers, as an upstream gets them.

    Args:
        key: the upstream's; keeps: whether the client's own is passed on where there is none.
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
    """An upstream's headers, as the client gets them.

    Args:
        rewritten: whether its body is another one, and no longer has that length or digest.
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
    """Bytes of a head, as aiohttp writes them again: in UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _parts(named: bytes) -> set[bytes]:
    return {part.strip() for part in named.lower().split(b",")}


class Head(NamedTuple):
    """What a gateway itself reads of a request's headers.

    Args:
        size: bytes of all of them.
        length, chunked: of the body; neither where there is none.
        session: what the client calls its session; "" where it names none.
    """

    size: int
    authorization: bytes | None
    length: bytes | None
    chunked: bool
    session: str


def read_head(headers: Iterable[Header]) -> Head:
    """The head, in one pass; of a header that is there twice, the last one."""
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
