# Effects: telling the world what a promotion decided, once.
#
# At least once, and each time with the same key: who drops repeats by their key was told once.

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from servanda.promotion.notify.base import KINDS, Kind, Sink, message
from servanda.promotion.notify.command import Command
from servanda.promotion.notify.http_post import Busy, insist
from servanda.promotion.notify.signature import secrets_of
from servanda.promotion.notify.slack import Slack
from servanda.promotion.notify.webhook import Webhook

__all__ = [
    "KINDS",
    "Busy",
    "Command",
    "Kind",
    "Sink",
    "Slack",
    "Webhook",
    "insist",
    "message",
    "sinks_of",
]


def sinks_of(
    webhook: Iterable[str] = (),
    slack: Iterable[str] = (),
    command: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> tuple[Sink, ...]:
    """The receivers that were asked for, as `effect_options` of the command line gives them.

    Args:
        environ: where the secret is that webhooks are signed with.

    Raises:
        ContractError: a text is no URL of http or https, or names no program; or the secret is
            none.
    """
    urls = (*webhook,)
    secrets = secrets_of(environ) if urls else ()
    hooks = (Webhook(url, secrets) for url in urls)
    return (*hooks, *map(Slack, slack), *map(Command, command))
