# Webhook: every effect as JSON.

from __future__ import annotations

import string
from urllib.parse import quote

from servanda.effects.base import KINDS, message
from servanda.effects.posting import Hook
from servanda.promotion.values import Effect


class Webhook:
    """POST every effect to a URL, with its key in the header Idempotency-Key.

    Raises:
        ContractError: it is no URL of http or https.
    """

    kinds = KINDS

    def __init__(self, url: str) -> None:
        self._hook = Hook(url, "--webhook")
        self.name = f"webhook:{self._hook.name}"

    def deliver(self, effect: Effect) -> None:
        # a header holds printable ASCII; what a key has of other characters is percent-encoded
        key = quote(effect.key, safe=string.punctuation + " ")
        self._hook.post(message(effect), {"Idempotency-Key": key})
