# The key of a server: sent in a header, and part of nothing that is written or printed.

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from servanda.contract.model import Kernel
from servanda.errors import MeasurementError

_SENT = re.compile("[!-~]+")  # what a header can carry
_UNNAMED = (
    "the server asks for a key: `key_env: NAME` beside the url, or `,key_env=NAME` behind it on a "
    "command line, names the variable that holds it"
)


@dataclass(frozen=True)
class Key:
    """A key, and where it comes from.

    Args:
        value: sent as `Authorization: Bearer VALUE`; "": none is.
        variable: of the environment, that holds it; "": none was named.
    """

    value: str = field(default="", repr=False)
    variable: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.value}"} if self.value else {}

    @property
    def next_move(self) -> str:
        """Where a server does not take it."""
        if self.value:
            return f"the server does not take the key in {self.variable}: export the one it knows"
        return f"the server asks for a key: export {self.variable}" if self.variable else _UNNAMED

    def hidden(self, text: str) -> str:
        """A text without the key: some servers repeat the one that they refuse."""
        return text.replace(self.value, "[key]") if self.value else text


def key_in(variable: str) -> Key:
    """The key that a variable holds; an empty one where it is not set.

    Raises:
        MeasurementError: no header can carry it.
    """
    value = os.environ.get(variable, "")
    if value and _SENT.fullmatch(value) is None:
        raise MeasurementError(
            f"the key in {variable} has a blank, a line end or a character outside ASCII",
            hint=f"export {variable} with the key alone",
        )
    return Key(value, variable)


def key_of(kernel: Kernel) -> Key:
    """The key that a kernel's server is to be shown.

    Raises:
        MeasurementError: the variable that it names holds none.
    """
    if kernel.key_env is None:
        return Key()
    key = key_in(kernel.key_env)
    if not key.value:
        state = "empty" if kernel.key_env in os.environ else "not set"
        raise MeasurementError(
            f"the key of {kernel.url} is in {kernel.key_env}, and this variable is {state}",
            hint=f"export {kernel.key_env}, or take key_env out where the server asks for no key",
        )
    return key
