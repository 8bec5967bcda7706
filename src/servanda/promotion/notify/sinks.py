# The receivers of notifications that the options of a command ask for.

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from servanda.promotion.notify.base import Sink
from servanda.promotion.notify.command import Command
from servanda.promotion.notify.signature import secrets_of
from servanda.promotion.notify.slack import Slack
from servanda.promotion.notify.webhook import Webhook


def sinks_of(
    webhook: Iterable[str] = (),
    slack: Iterable[str] = (),
    command: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> tuple[Sink, ...]:
    """The receivers that were asked for, as options of the command line name them.

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
