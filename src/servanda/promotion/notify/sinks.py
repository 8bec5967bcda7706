# The notifiers that command-line options define.

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from servanda.errors import ContractError
from servanda.promotion.notify import alertmanager, apprise, otlp  # noqa: F401 - they register
from servanda.promotion.notify.base import NOTIFIERS, OWN, Sink
from servanda.promotion.notify.command import Command
from servanda.promotion.notify.slack import Slack
from servanda.promotion.notify.webhook import Webhook, secrets_of


def sinks_of(
    webhook: Iterable[str] = (),
    slack: Iterable[str] = (),
    command: Iterable[str] = (),
    notify: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> tuple[Sink, ...]:
    """The notifiers of command-line options.

    Args:
        notify: NAME=VALUE of the other notifiers, and of those of installed packages.
        environ: contains the signing secret of webhooks.

    Raises:
        ContractError: a value is not an http or https URL, or names no program or notifier, or the
            secret is invalid.
        MeasurementError: the package of a notifier cannot be imported.
    """
    urls = (*webhook,)
    secrets = secrets_of(environ) if urls else ()
    hooks = (Webhook(url, secrets) for url in urls)
    return (*hooks, *map(Slack, slack), *map(Command, command), *map(_of_package, notify))


def _of_package(text: str) -> Sink:
    name, equals, value = text.partition("=")
    if not equals:  # the text is not shown, because a value may be a secret
        known = ", ".join(NOTIFIERS.names())
        raise ContractError("--notify takes NAME=VALUE", hint=f"known: {known}")
    if not NOTIFIERS.load(name):
        hint = f"--{name} VALUE" if name in OWN else NOTIFIERS.hint(name)
        raise ContractError(f"--notify: there is no notifier {name!r}", hint=hint)
    return NOTIFIERS[name](value)
