# Slack: notifications for people, in the format of Slack's incoming webhooks.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from servanda.promotion.notify.base import Kind
from servanda.promotion.notify.http_post import Hook
from servanda.promotion.state import Effect
from servanda.registry import cut
from servanda.report.cell_text import shown, shown_interval, shown_limit, size
from servanda.report.format import exact_percent

Level = Literal["error", "warning", "info"]

LONGEST = 3000  # most characters of a section in Slack
_ICONS = {"error": ":red_circle:", "warning": ":warning:", "info": ":large_green_circle:"}
_LEVELS: Mapping[str, Level] = {
    "running": "info",
    "completed": "info",
    "halted": "error",
    "rolled_back": "error",
}


def section(level: Level, lines: Sequence[str], foot: str) -> dict[str, Any]:
    """A message of one section, in Slack's markup.

    Args:
        lines: the first is the heading, shown alone in notifications.
        foot: the subject.
    """
    head, *rest = map(_escaped, lines)
    text = "\n".join([f"{_ICONS[level]} *{head}*", *rest, f"`{_escaped(foot)}`"])
    block = {"type": "section", "text": {"type": "mrkdwn", "text": cut(text, LONGEST)}}
    return {"text": f"servanda: {head}", "blocks": [block]}


class Slack:
    """POST changes and pages to an incoming webhook of Slack.

    Raises:
        ContractError: not an http or https URL.
    """

    kinds: tuple[Kind, ...] = ("notify", "page")  # a route is for programs

    def __init__(self, url: str) -> None:
        self._hook = Hook(url, "--slack")
        self.name = f"slack:{self._hook.name}"

    def deliver(self, effect: Effect) -> None:
        foot = effect.body.get("run") or effect.key
        self._hook.post(section(level_of(effect), lines(effect), foot))


def level_of(effect: Effect) -> Level:
    """How much a notification matters: error for a page and where nothing goes on by itself."""
    status = effect.body.get("status", "running")
    return "error" if effect.kind == "page" else _LEVELS.get(status, "warning")


def lines(effect: Effect) -> list[str]:
    """A notification for people: the change, its reason, its cell, and the next command."""
    body = effect.body
    lines = [_head(effect)]
    lines += [body["why"]] if body.get("why") else []
    lines += [f"decided by {_cell(body['decided'])}"] if body.get("decided") else []
    if body.get("share") is not None:
        mirrored = f", {exact_percent(body['mirror'])} mirrored" if body.get("mirror") else ""
        lines.append(f"traffic: the infer kernel serves {exact_percent(body['share'])}{mirrored}")
    return lines + ([f"next: {move}" for move in _next(body)] if body.get("run") else [])


def _head(effect: Effect) -> str:
    body = effect.body
    moved = " → ".join(dict.fromkeys(filter(None, [body.get("from"), body.get("leg")])))
    status = body.get("status") or ""
    stands = "" if status == "running" else status.replace("_", " ")
    what = ", ".join(filter(None, [moved, stands]))
    whose = body.get("contract") or body.get("run")
    head = ": ".join(filter(None, [whose, what])) or "a promotion"
    return f"{body.get('to') or 'someone'} is needed: {head}" if effect.kind == "page" else head


def _cell(cell: Mapping[str, Any]) -> str:
    """A cell with its interval, its limit and its n, as far as present."""
    value, low, high, limit = (
        None if cell.get(name) is None else float(cell[name])  # infinite ones are texts in JSON
        for name in ("value", "low", "high", "limit")
    )
    share = bool(cell.get("share"))
    head = [cell.get("cell"), shown(value, share), shown_interval(low, high, share)]
    counted = f"n {size(cell['n'], cell.get('units') or '')}" if cell.get("n") is not None else ""
    most = f"limit {shown_limit(limit, share)}" if limit is not None else ""
    parts = [" ".join(filter(None, head)), most, counted, cell.get("note")]
    return ", ".join(filter(None, parts))


def _next(body: Mapping[str, Any]) -> list[str]:
    run, status = body["run"], body.get("status")
    if status == "awaiting_approval":
        return [f"servanda promotion approve {run} --reason TEXT"]
    if status == "halted":
        override = (
            f"servanda promotion override {run} --clause ID --slice NAME --ttl 24h --reason TEXT"
        )
        return [override, f"servanda promotion rollback {run} --reason TEXT"]
    return [f"servanda promotion status {run}"]


def _escaped(text: str) -> str:
    """Escape the three characters of Slack's markup.

    >>> _escaped("position<16 & more")
    'position&lt;16 &amp; more'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
