# The notifiers that command-line options define.

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from servanda.promotion.notify.base import Sink
from servanda.promotion.notify.command import Command
from servanda.promotion.notify.slack import Slack
from servanda.promotion.notify.webhook import Webhook, secrets_of


def sinks_of(
    webhook: Iterable[str] = (),
    slack: Iterable[str] = (),
    command: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> tuple[Sink, ...]:
    """The notifiers of command-line options.

    Args:
        environ: contains the signing secret of webhooks.

    Raises:
        ContractError: a value is not an http or https URL or names no program, or the secret is
            invalid.
    """
    urls = (*webhook,)
    secrets = secrets_of(environ) if urls else ()
    hooks = (Webhook(url, secrets) for url in urls)
    return (*hooks, *map(Slack, slack), *map(Command, command))
