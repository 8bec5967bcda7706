# An effect as an event of CloudEvents 1.0, in the binary mode of its HTTP binding: what it is
# stands in headers, and the body is what it was without them.

from __future__ import annotations

import string
from datetime import datetime, timezone
from urllib.parse import quote

from servanda.promotion.state import Effect

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
