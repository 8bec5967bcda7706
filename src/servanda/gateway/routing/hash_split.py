# The split: a keyed hash that maps a request, or its user, to a place in [0, 1).
#
# It is deterministic, so that all replicas split equally and a session keeps its place, and keyed,
# so that clients cannot choose the pool of their requests.

from __future__ import annotations

from hashlib import blake2b


def place(key: bytes, *parts: str) -> float:
    """A place, uniform in [0, 1), the same for the same key and parts.

    A place below a share is below every larger one, so a larger share moves no one back.

    Args:
        key: at most 64 bytes.
        parts: the object and the purpose; each purpose has independent places.

    >>> place(b"key", "share", "session 7") == place(b"key", "share", "session 7")
    True
    """
    digest = blake2b("\0".join(parts).encode(), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def pseudonym(key: bytes, of: str) -> str:
    """A keyed hash of a user, 8 bytes in hex: deterministic, and not invertible."""
    return blake2b(of.encode(), key=key, digest_size=8).hexdigest()
