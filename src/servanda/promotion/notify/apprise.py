# Apprise: notifications for people, to any service that the library Apprise knows.
#
# The URL of a service contains its password or token, so messages contain only its name.

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from servanda.contract.identity import digest_of
from servanda.errors import ContractError, MeasurementError
from servanda.promotion.notify.base import NOTIFIERS, Kind
from servanda.promotion.notify.http_post import Busy
from servanda.promotion.notify.slack import level_of, lines
from servanda.promotion.state import Effect

_TYPES = {"error": "failure", "warning": "warning", "info": "info"}


@NOTIFIERS.register("apprise")
class Apprise:
    """Changes and pages as messages of a service: --notify apprise=URL.

    Raises:
        ContractError: no service of Apprise takes the URL.
        MeasurementError: Apprise is not installed.
    """

    kinds: tuple[Kind, ...] = ("notify", "page")  # a route is for programs

    def __init__(self, url: str) -> None:
        try:
            library: Any = import_module("apprise")
        except ImportError:
            raise MeasurementError(
                "--notify apprise=URL needs apprise, which is not installed here",
                hint="pip install 'servanda[apprise]'",
            ) from None
        # its warnings contain the address of a service, in which there may be a token
        logger = logging.getLogger("apprise")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
        service: Any = library.Apprise.instantiate(url)
        if service is None:
            raise ContractError(
                "--notify apprise=URL: no service of Apprise takes this URL",
                hint="such as mailto://USER:PASSWORD@HOST or pagerduty://KEY@KEY; the value is not "
                "shown, because it may be a secret",
            )
        self._service = str(service.service_name or "service")
        self._apprise: Any = library.Apprise()
        self._apprise.add(service)
        self.name = f"apprise:{self._service}:{digest_of(url)[:8]}"

    def deliver(self, effect: Effect) -> None:
        head, *rest = lines(effect)
        body = "\n".join([*rest, effect.body.get("run") or effect.key])
        if not self._apprise.notify(
            title=f"servanda: {head}",
            body=body,
            notify_type=_TYPES[level_of(effect)],
            body_format="text",
        ):
            raise Busy(f"{self._service}: Apprise could not deliver it")
