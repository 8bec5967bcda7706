# Webhook: every effect as JSON, said to be an event, and signed where there is a secret.

from __future__ import annotations

import string
import time
from collections.abc import Callable, Sequence
from urllib.parse import quote

from servanda.promotion.notify.base import KINDS, message
from servanda.promotion.notify.event import attributes
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
