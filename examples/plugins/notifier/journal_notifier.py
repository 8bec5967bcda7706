# The notifier `journal`: every decision of a promotion, appended to a file as a line of JSON.

import json
from pathlib import Path

from servanda.errors import ContractError, MeasurementError
from servanda.promotion.notify.base import KINDS, NOTIFIERS, message


@NOTIFIERS.register("journal")
class Journal:
    """--notify journal=FILE"""

    kinds = KINDS  # or some of: route, notify, page

    def __init__(self, value: str) -> None:
        if not value:
            raise ContractError("--notify journal=FILE: it names no file")
        self._path = Path(value)
        self.name = f"journal:{self._path.name}"  # in the ledger: stable, unique, and no secret

    def deliver(self, effect) -> None:
        """Return when it is accepted; the same key may come again, after a crash."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(message(effect)) + "\n")
        except OSError as error:
            raise MeasurementError(f"{self._path} cannot be written: {error.strerror}") from None
