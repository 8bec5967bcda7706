# Signatures of webhooks, by the specification Standard Webhooks 1.0.0: HMAC-SHA256 of id, time
# and body, so that none of the three can be another one.

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping, Sequence

from servanda.errors import ContractError

VARIABLE = "SERVANDA_WEBHOOK_SECRET"
_PREFIX = "whsec_"
_LEAST = 24  # bytes of a secret
_NEW = (
    "python -c \"import base64, secrets; print('whsec_' + "
    'base64.b64encode(secrets.token_bytes(32)).decode())" makes one'
)


def secrets_of(environ: Mapping[str, str]) -> tuple[bytes, ...]:
    """What webhooks are signed with; several, with spaces between, while one takes over from
    another; none where the variable is empty.

    Raises:
        ContractError: one is no base64, or is too short.  The text shows none of it.
    """
    return tuple(map(_secret, environ.get(VARIABLE, "").split()))


def _secret(text: str) -> bytes:
    bare = text.removeprefix(_PREFIX)
    try:
        # receivers take them with and without their padding
        secret = base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ContractError(f"the secret in {VARIABLE} is no base64", hint=_NEW) from None
    if len(secret) < _LEAST:
        raise ContractError(
            f"the secret in {VARIABLE} has {len(secret)} bytes, and {_LEAST} are the least",
            hint=_NEW,
        )
    return secret


def signature(name: str, at: float, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """The headers by which a receiver knows who sent a body, and when; none without a secret.

    Args:
        name: of the message, the same at each attempt, and without a full stop, which ends it.
        at: of this attempt, unix seconds.
    """
    if not secrets:
        return {}
    text = f"{name}.{int(at)}.".encode() + body
    signed = (base64.b64encode(hmac.digest(secret, text, "sha256")) for secret in secrets)
    return {
        "webhook-id": name,
        "webhook-timestamp": str(int(at)),
        "webhook-signature": " ".join(f"v1,{digest.decode()}" for digest in signed),
    }
