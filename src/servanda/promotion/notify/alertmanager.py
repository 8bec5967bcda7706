# Alertmanager of Prometheus: one alert for each promotion, and for each slice of a gateway.

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from servanda.promotion.notify.base import NOTIFIERS, Kind
from servanda.promotion.notify.http_post import Hook
from servanda.promotion.notify.slack import lines
from servanda.promotion.state import Effect

_FIRES_S = 86_400.0  # unless a later decision ends it
_ENDS = ("running", "completed", "active", "suspect")  # statuses in which no one is needed


@NOTIFIERS.register("alertmanager")
class Alertmanager:
    """Alerts by the API v2 of Alertmanager: --notify alertmanager=URL.

    A page fires, and so does a change to a status in which a person may be needed; a change to
    another status ends the alert. Both have the same labels, by which Alertmanager knows it.

    Raises:
        ContractError: not an http or https URL.
    """

    kinds: tuple[Kind, ...] = ("notify", "page")  # a route is for programs

    def __init__(self, url: str) -> None:
        self._hook = Hook(f"{url.rstrip('/')}/api/v2/alerts", "--notify alertmanager=URL")
        self.name = f"alertmanager:{self._hook.name}"

    def deliver(self, effect: Effect) -> None:
        self._hook.post([alert(effect)])


def alert(effect: Effect) -> dict[str, Any]:
    """A notification as a postable alert; times are RFC 3339."""
    body = effect.body
    names = ("contract", "run", "slice")
    labels = {name: str(body[name]) for name in names if body.get(name)}
    kind = "ServandaSlice" if "slice" in body else "ServandaPromotion"
    head, *rest = lines(effect)
    notes = {"summary": head, "description": "\n".join(rest), "status": body.get("status") or ""}
    notes |= {"to": body["to"]} if body.get("to") else {}
    fires = effect.kind == "page" or body.get("status") not in _ENDS
    at = float(body["at"])
    return {
        "labels": {"alertname": kind, **labels},
        "annotations": notes,
        "startsAt": _time(at),
        "endsAt": _time(at + _FIRES_S if fires else at),
    }


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds")
