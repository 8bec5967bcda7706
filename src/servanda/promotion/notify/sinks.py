# The notifiers, and those that command-line options define.

from __future__ import annotations

import base64
import binascii
import hmac
import json
import logging
import os
import shlex
import shutil
import signal
import string
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import import_module
from pathlib import PurePath
from typing import IO, Any
from urllib.parse import quote

from servanda.contract.identity import digest_of
from servanda.errors import ContractError, MeasurementError
from servanda.promotion.notify.base import KINDS, NOTIFIERS, OWN, Kind, Sink, message
from servanda.promotion.notify.http_post import Busy, Hook
from servanda.promotion.notify.otlp import Otlp
from servanda.promotion.notify.slack import Slack, level_of, lines
from servanda.promotion.state import Effect
from servanda.report.format import line

# Command: a program of the user receives every notification.

LIMIT_S = 60.0
_TAIL = 4096  # bytes at the end of stderr that are searched for its last line


class Command:
    """Run a program for every notification; exit code 0 means that it was accepted.

    It receives the JSON on its standard input, and SERVANDA_EFFECT and SERVANDA_IDEMPOTENCY_KEY in
    its environment.  A failed program is not run again before the next call, because it may have
    done half of its work.

    Args:
        text: program and arguments, split as a shell does; not run by a shell.
        limit_s: time after which it and its children are killed.

    Raises:
        ContractError: it cannot be split, or the program does not exist.
    """

    kinds = KINDS

    def __init__(self, text: str, limit_s: float = LIMIT_S) -> None:
        try:
            self._words = shlex.split(text)
        except ValueError as error:
            raise ContractError(
                f"--command cannot be split into words: {str(error).lower()}",
                hint="it is split as a shell would; quote arguments with spaces",
            ) from None
        if not self._words:
            raise ContractError("--command names no program")
        self._program = PurePath(self._words[0]).name
        if shutil.which(self._words[0]) is None:
            raise ContractError(
                f"--command: there is no program {self._words[0]!r} that can be run",
                hint="no shell runs it: give a program, or 'sh -c \"...\"'",
            )
        self.name = f"command:{self._program}:{digest_of(text)[:8]}"
        self._limit_s = limit_s

    def deliver(self, effect: Effect) -> None:
        with (
            MeasurementError.of_system(f"{self._program}: cannot be run"),
            # files instead of pipes, so that neither a program that reads nothing nor one that
            # leaves a child with open pipes blocks this process
            tempfile.TemporaryFile() as message_file,
            tempfile.TemporaryFile() as errors,
        ):
            message_file.write(json.dumps(message(effect)).encode())
            message_file.seek(0)
            self._run(effect, message_file, errors)

    def _run(self, effect: Effect, message_file: IO[bytes], errors: IO[bytes]) -> None:
        variables = {"SERVANDA_EFFECT": effect.kind, "SERVANDA_IDEMPOTENCY_KEY": effect.key}
        process = subprocess.Popen(
            self._words,
            stdin=message_file,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **variables},
            start_new_session=True,  # a separate process group, which can be killed as a whole
        )
        code = None
        try:
            code = process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:  # the limit, or Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code is None:
            what = f"took longer than {self._limit_s:g} s and was ended"
        else:
            what = f"exit code {code}" if code > 0 else f"ended by signal {-code}"
        if code != 0:
            raise MeasurementError(self._problem(what, errors))

    def _problem(self, what: str, errors: IO[bytes]) -> str:
        """The problem, with the last line of its output."""
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _TAIL))
        rows = [line(row, 200) for row in errors.read().decode(errors="replace").splitlines()]
        return ": ".join([self._program, what, *list(filter(None, rows))[-1:]])


# Webhook: every notification as JSON, as an event of CloudEvents 1.0 in the binary mode of its HTTP
# binding: its attributes are headers, and the body is unchanged.  With a secret it is signed by
# Standard Webhooks 1.0.0: HMAC-SHA256 of id, time and body, so that none of them can be replaced.


class Webhook:
    """POST every notification to a URL, with its key in the header Idempotency-Key.

    Args:
        secrets: signing secrets; clock: returns unix seconds.

    Raises:
        ContractError: not an http or https URL.
    """

    kinds = KINDS

    def __init__(
        self, url: str, secrets: Sequence[bytes] = (), clock: Callable[[], float] = time.time
    ) -> None:
        self._hook, self._secrets, self._clock = Hook(url, "--webhook"), secrets, clock
        self.name = f"webhook:{self._hook.name}"

    def deliver(self, effect: Effect) -> None:
        # a header holds printable ASCII; other characters of a key are percent-encoded
        key = quote(effect.key, safe=string.punctuation + " ")
        headers = {"Idempotency-Key": key, **attributes(effect)}

        def signed(body: bytes) -> dict[str, str]:
            return signature(headers["ce-id"], self._clock(), body, self._secrets)

        self._hook.post(message(effect), headers, signed)


# keys of promotions, and of gateways about one slice
_TYPES = {
    "route": "dev.servanda.promotion.routed",
    "notify": "dev.servanda.promotion.changed",
    "page": "dev.servanda.promotion.paged",
}
_OF_SLICES = {"notify": "dev.servanda.slice.moved", "page": "dev.servanda.slice.paged"}
# characters allowed in a CloudEvents header; a full stop ends the id of a signed message
_PLAIN = "".join({*string.punctuation} - {'"', "%"})


def attributes(effect: Effect) -> dict[str, str]:
    """The headers of a notification: id, source, type, and time and subject if present."""
    body = effect.body
    part = body.get("slice") or body.get("leg")
    types = _OF_SLICES if "slice" in body else _TYPES
    source = ["/servanda", *([quote(body["run"], safe="")] if body.get("run") else [])]
    headers = {
        "ce-specversion": "1.0",
        "ce-id": _text(effect.key).replace(".", "%2E"),
        "ce-source": _text("/".join(source)),
        "ce-type": types.get(effect.kind, _TYPES[effect.kind]),
    }
    if body.get("at") is not None:
        time = datetime.fromtimestamp(body["at"], timezone.utc)
        headers["ce-time"] = time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return headers | ({"ce-subject": _text(part)} if part else {})


def _text(value: str) -> str:
    return quote(value, safe=_PLAIN)


VARIABLE = "SERVANDA_WEBHOOK_SECRET"
_PREFIX = "whsec_"
_LEAST = 24  # fewest bytes of a secret
_NEW = (
    "python -c \"import base64, secrets; print('whsec_' + "
    'base64.b64encode(secrets.token_bytes(32)).decode())" makes one'
)


def secrets_of(environ: Mapping[str, str]) -> tuple[bytes, ...]:
    """The signing secrets of webhooks; several, separated by spaces, during a rotation; empty if
    the variable is.

    Raises:
        ContractError: one is not base64 or too short.  The text does not show it.
    """
    return tuple(map(_secret, environ.get(VARIABLE, "").split()))


def _secret(text: str) -> bytes:
    bare = text.removeprefix(_PREFIX)
    try:
        # receivers accept them with and without padding
        secret = base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ContractError(f"the secret in {VARIABLE} is not base64", hint=_NEW) from None
    if len(secret) < _LEAST:
        raise ContractError(
            f"the secret in {VARIABLE} has {len(secret)} bytes, and {_LEAST} are the least",
            hint=_NEW,
        )
    return secret


def signature(name: str, at: float, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """The headers that sign a body and its time; empty without a secret.

    Args:
        name: id of the message, the same at each attempt; without a full stop, which ends it.
        at: time of this attempt, unix seconds.
    """
    if not secrets:
        return {}
    text = f"{name}.{int(at)}.".encode() + body
    signed = (base64.b64encode(hmac.digest(secret, text, "sha256")) for secret in secrets)
    return {
        "webhook-id": name,
        "webhook-timestamp": str(int(at)),
        "webhook-signature": " ".join(f"v1,{digest.decode()}" for digest in signed),
    }


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


# Alertmanager of Prometheus: one alert for each promotion, and for each slice of a gateway.

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


# Apprise: notifications for people, to any service that the library Apprise knows.
#
# The URL of a service contains its password or token, so messages contain only its name.

_LEVELS = {"error": "failure", "warning": "warning", "info": "info"}


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
            notify_type=_LEVELS[level_of(effect)],
            body_format="text",
        ):
            raise Busy(f"{self._service}: Apprise could not deliver it")


NOTIFIERS.register("otlp")(Otlp)
