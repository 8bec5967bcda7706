# Webhook: every effect as JSON, signed where there is a secret, and an event of CloudEvents 1.0 in
# the binary mode of its HTTP binding: what it is stands in headers, and the body is unchanged.

from __future__ import annotations

import string
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from urllib.parse import quote

from servanda.promotion.notify.base import KINDS, message
from servanda.promotion.notify.http_post import Hook
from servanda.promotion.notify.signature import signature
from servanda.promotion.state import Effect


class Webhook:
    """POST every effect to a URL, with its key in the header Idempotency-Key.

    Args:
        secrets: that it is signed with; clock: unix seconds.

    Raises:
        ContractError: it is no URL of http or https.
    """

    kinds = KINDS

    def __init__(
        self, url: str, secrets: Sequence[bytes] = (), clock: Callable[[], float] = time.time
    ) -> None:
        self._hook, self._secrets, self._clock = Hook(url, "--webhook"), secrets, clock
        self.name = f"webhook:{self._hook.name}"

    def deliver(self, effect: Effect) -> None:
        # a header holds printable ASCII; what a key has of other characters is percent-encoded
        key = quote(effect.key, safe=string.punctuation + " ")
        headers = {"Idempotency-Key": key, **attributes(effect)}

        def signed(body: bytes) -> dict[str, str]:
            return signature(headers["ce-id"], self._clock(), body, self._secrets)

        self._hook.post(message(effect), headers, signed)


# of what a promotion tells, and of what a gateway tells of one slice
_TYPES = {
    "route": "dev.servanda.promotion.routed",
    "notify": "dev.servanda.promotion.changed",
    "page": "dev.servanda.promotion.paged",
}
_OF_SLICES = {"notify": "dev.servanda.slice.moved", "page": "dev.servanda.slice.paged"}
# what a header of CloudEvents holds as it is; a full stop ends the id of a signed message
_PLAIN = "".join({*string.punctuation} - {'"', "%"})


def attributes(effect: Effect) -> dict[str, str]:
    """The headers of an effect: id, source and type, and time and subject where it has them."""
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
