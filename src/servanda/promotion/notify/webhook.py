# Webhook: every notification as JSON, as an event of CloudEvents 1.0 in the binary mode of its HTTP
# binding: its attributes are headers, and the body is unchanged.  With a secret it is signed by
# Standard Webhooks 1.0.0: HMAC-SHA256 of id, time and body, so that none of them can be replaced.

from __future__ import annotations

import base64
import binascii
import hmac
import string
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from urllib.parse import quote

from servanda.errors import ContractError
from servanda.promotion.notify.base import KINDS, message
from servanda.promotion.notify.http_post import Hook
from servanda.promotion.state import Effect


class Webhook:
    """POST every notification to a URL, with its key in the header Idempotency-Key.

    Args:
        secrets: signing secrets; clock: returns unix seconds.

    Raises:
        ContractError: not an http or https URL.
    """

    kinds = KINDS

    def __init__(
        self, url: str, secrets: Sequence[bytes] = (), clock: Callable[[], float] = time.time
    ) -> None:
        self._hook, self._secrets, self._clock = Hook(url, "--webhook"), secrets, clock
        self.name = f"webhook:{self._hook.name}"

    def deliver(self, effect: Effect) -> None:
        # a header holds printable ASCII; other characters of a key are percent-encoded
        key = quote(effect.key, safe=string.punctuation + " ")
        headers = {"Idempotency-Key": key, **attributes(effect)}

        def signed(body: bytes) -> dict[str, str]:
            return signature(headers["ce-id"], self._clock(), body, self._secrets)

        self._hook.post(message(effect), headers, signed)


# keys of promotions, and of gateways about one slice
_TYPES = {
    "route": "dev.servanda.promotion.routed",
    "notify": "dev.servanda.promotion.changed",
    "page": "dev.servanda.promotion.paged",
}
_OF_SLICES = {"notify": "dev.servanda.slice.moved", "page": "dev.servanda.slice.paged"}
# characters allowed in a CloudEvents header; a full stop ends the id of a signed message
_PLAIN = "".join({*string.punctuation} - {'"', "%"})


def attributes(effect: Effect) -> dict[str, str]:
    """The headers of a notification: id, source, type, and time and subject if present."""
    body = effect.body
    part = body.get("slice") or body.get("leg")
    types = _OF_SLICES if "slice" in body else _TYPES
    source = ["/servanda", *([quote(body["run"], safe="")] if body.get("run") else [])]
    headers = {
        "ce-specversion": "1.0",
        "ce-id": _text(effect.key).replace(".", "%2E"),
        "ce-source": _text("/".join(source)),
        "ce-type": types.get(effect.kind, _TYPES[effect.kind]),
    }
    if body.get("at") is not None:
        time = datetime.fromtimestamp(body["at"], timezone.utc)
        headers["ce-time"] = time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return headers | ({"ce-subject": _text(part)} if part else {})


def _text(value: str) -> str:
    return quote(value, safe=_PLAIN)


VARIABLE = "SERVANDA_WEBHOOK_SECRET"
_PREFIX = "whsec_"
_LEAST = 24  # fewest bytes of a secret
_NEW = (
    "python -c \"import base64, secrets; print('whsec_' + "
    'base64.b64encode(secrets.token_bytes(32)).decode())" makes one'
)


def secrets_of(environ: Mapping[str, str]) -> tuple[bytes, ...]:
    """The signing secrets of webhooks; several, separated by spaces, during a rotation; empty if
    the variable is.

    Raises:
        ContractError: one is not base64 or too short.  The text does not show it.
    """
    return tuple(map(_secret, environ.get(VARIABLE, "").split()))


def _secret(text: str) -> bytes:
    bare = text.removeprefix(_PREFIX)
    try:
        # receivers accept them with and without padding
        secret = base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ContractError(f"the secret in {VARIABLE} is not base64", hint=_NEW) from None
    if len(secret) < _LEAST:
        raise ContractError(
            f"the secret in {VARIABLE} has {len(secret)} bytes, and {_LEAST} are the least",
            hint=_NEW,
        )
    return secret


def signature(name: str, at: float, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """The headers that sign a body and its time; empty without a secret.

    Args:
        name: id of the message, the same at each attempt; without a full stop, which ends it.
        at: time of this attempt, unix seconds.
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
