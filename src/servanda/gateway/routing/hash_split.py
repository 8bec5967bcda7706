# The split: a keyed hash that puts a request, or anyone who sent it, at a place in [0, 1).
#
# It is deterministic, so that every replica splits alike and a session stays where it is, and
# keyed, so that no one outside can choose where his requests land.

from __future__ import annotations

from hashlib import blake2b


def place(key: bytes, *parts: str) -> float:
    """Uniform in [0, 1), the same for the same key and parts.

    Anyone who lies below a share lies below every larger one: raising it moves no one back.

    Args:
        key: at most 64 bytes.
        parts: what is placed, and for which purpose; each purpose has places of its own.

    >>> place(b"key", "share", "session 7") == place(b"key", "share", "session 7")
    True
    """
    digest = blake2b("\0".join(parts).encode(), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def pseudonym(key: bytes, of: str) -> str:
    """A keyed hash of who asked, 8 bytes in hex: the same for the same one, and no way back."""
    return blake2b(of.encode(), key=key, digest_size=8).hexdigest()
