# API keys and their rights on a gateway or its controller.  Only digests are stored, and no message
# contains a key or its line.

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args

from servanda.contract import yaml_reader
from servanda.contract.yaml_reader import Marks
from servanda.errors import ContractError, Problem, Where
from servanda.registry import did_you_mean, quoted

Role = Literal["client", "viewer", "operator", "admin", "gateway"]
Right = Literal["ask", "read", "pin", "reload", "follow", "route"]
ROLES: tuple[Role, ...] = get_args(Role)
# right -> roles that have it, the lowest first
RIGHTS: Mapping[Right, tuple[Role, ...]] = {
    "ask": ("client",),
    "read": ("viewer", "operator", "admin"),
    "pin": ("operator", "admin"),
    "reload": ("admin",),
    "follow": ("gateway",),
    "route": ("gateway",),  # snapshot and decide, which reveal the route of a request
}
SHORTEST = 16  # characters of a key
_FIELDS = ("name", "role", "key", "key_env")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,79}")
_KEY = re.compile("[!-~]+")  # characters allowed in a header
_FORM = "write - {name: anna, role: operator, key_env: ANNA_KEY}"
_LARGEST = 1 << 20  # bytes of a file


@dataclass(frozen=True)
class Holder:
    """The holder of a key."""

    name: str
    role: Role

    def may(self, right: Right) -> bool:
        return self.role in RIGHTS[right]


class Keys:
    """The known keys, as keyed digests, with their holders.

    They can be replaced while in use, by `take`.

    Attributes:
        refused: number of keys that were given, and do not open the listener.

    Args:
        held: (name, role, key) of each holder.
        warning: the problem of the file's permissions; "" if none.
    """

    def __init__(self, *held: tuple[str, Role, str], warning: str = "") -> None:
        # one value, so that digests and salt are always of one file
        self._known: tuple[bytes, tuple[tuple[bytes, Holder], ...]] = secrets.token_bytes(32), ()
        self.warning, self.refused = warning, 0
        self._add(held)

    def _add(self, held: Iterable[tuple[str, Role, str]]) -> None:
        salt, before = self._known
        more = ((_digest(salt, key), Holder(name, role)) for name, role, key in held)
        self._known = salt, (*before, *more)

    @classmethod
    def read(cls, path: Path, environ: Mapping[str, str] = os.environ) -> Keys:
        """Read a file: a YAML list of {name, role, key} or {name, role, key_env}.

        Args:
            environ: environment with the variables of key_env.

        Raises:
            ContractError: it cannot be read, or all its problems, each with its place and without
                keys.
        """
        hint = f"give a file of keys: {_FORM}"
        with ContractError.of_system(f"{path} cannot be read", hint=hint), path.open("rb") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise ContractError(f"{path} is larger than {_LARGEST:,} bytes", hint=_FORM)
        data, places = _listed(text.decode("utf-8-sig", "surrogateescape"), str(path))
        problems = sorted(
            _problems(data, places, environ),
            key=lambda p: (p.where.line, p.where.column) if p.where else (0, 0),
        )
        if problems:
            raise ContractError.all(problems)
        held = ((h["name"], h["role"], _key_of(h, environ)) for h in data)
        shared = os.name == "posix" and path.stat().st_mode & 0o077
        warning = f"{path} can be read by others than its owner: chmod 600 {path}" if shared else ""
        return cls(*held, warning=warning)

    def plus(self, *held: tuple[str, Role, str]) -> Keys:
        """These keys plus those of further holders: (name, role, key) of each."""
        keys = copy(self)
        keys._add(held)
        return keys

    def take(self, others: Keys) -> None:
        """Replace all keys.

        Raises:
            ContractError: clients needed a key, and would not any more.
        """
        if self.clients and not others.clients:
            raise ContractError(
                "no key has the role client any more, and without one every user would be served",
                hint="to serve users without keys, start the gateway anew",
            )
        self._known, self.warning = others._known, others.warning

    @property
    def clients(self) -> bool:
        """Whether clients need a key."""
        return any(holder.role == "client" for _, holder in self._known[1])

    @property
    def holders(self) -> tuple[Holder, ...]:
        return tuple(holder for _, holder in self._known[1])

    def who(self, authorization: str | None, right: Right | None = None) -> Holder | None:
        """The holder of the key in a header, if they have the right; in constant time for wrong
        keys.

        Args:
            authorization: the header's value, `Bearer KEY`, or `Basic` with any user and KEY for
                the password, as browsers send it; None: there was none.
        """
        who = None
        salt, held = self._known
        given = _digest(salt, _given(authorization))
        for digest, holder in held:  # no early exit, against timing attacks
            if hmac.compare_digest(given, digest):
                who = holder
        if who is None or (right and not who.may(right)):
            self.refused += authorization is not None
            return None
        return who

    def __repr__(self) -> str:
        return f"Keys of {', '.join(f'{h.name} ({h.role})' for h in self.holders) or 'no one'}"


def _digest(salt: bytes, key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogateescape"), key=salt).digest()


def _given(authorization: str | None) -> str:
    """The key in a header; "" without one."""
    scheme, _, rest = (authorization or "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        text = base64.b64decode(rest.strip(), validate=True).decode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError):
        return ""
    return text.partition(":")[2]


def _listed(text: str, name: str) -> tuple[list[Any], Marks]:
    """The entries of a file.  YAML errors may contain a key, so they are not shown."""
    try:
        data, places, problems = yaml_reader.read(text, name, noun="file of keys", listed=True)
    except ContractError as error:
        problems = error.problems
    else:
        if data and not problems:
            return data, places
        problems = problems or [Problem("", Where(name, 1, 1))]
    message, hint = "this is not a list of keys in YAML", f"{_FORM}; a key is best in quotes"
    raise ContractError.all([Problem(message, _bare(p.where), hint) for p in problems])


def _bare(where: Where | None) -> Where | None:
    """The place without the text of its line, which may contain a key."""
    return where and replace(where, text="")


def _problems(data: list[Any], places: Marks, environ: Mapping[str, str]) -> Iterator[Problem]:
    names: dict[str, int] = {}
    keys: dict[str, int] = {}
    for i, holder in enumerate(data):
        here = _bare(places.near((i,)))
        if not isinstance(holder, dict):
            yield Problem("a holder is a mapping", here, _FORM)
            continue
        for field in holder:
            if field not in _FIELDS:
                hint = did_you_mean(field, _FIELDS)
                hint = hint if hint.startswith("did") else f"keys: {', '.join(_FIELDS)}"
                yield Problem("a holder has no such key", _bare(places.key((i, field))), hint)
        name = holder.get("name")
        at = _bare(places.near((i, "name")))
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            hint = "it begins with a letter or digit and has those, '.', '_' and '-', at most 80"
            yield Problem("a holder needs a name", at, hint)
        elif name in names:
            hint = f"two keys of one person have two names, such as {name}-2"
            yield Problem(f"{name} is there already, in line {names[name]}", at, hint)
        else:
            names[name] = at.line if at else 0
        yield from _role(holder, _bare(places.near((i, "role"))))
        field = "key_env" if "key_env" in holder else "key"
        at = _bare(places.near((i, field)))
        for message, hint in _amiss(holder, environ):
            yield Problem(message, at, hint)
            break
        else:
            key = _key_of(holder, environ)
            if key in keys:
                hint = "each holder has a key of their own"
                yield Problem(f"this is the key of line {keys[key]} again", at, hint)
            keys.setdefault(key, at.line if at else 0)


def _role(holder: dict[str, Any], at: Where | None) -> Iterator[Problem]:
    role = holder.get("role")
    if role in ROLES:
        return
    hint = f"known: {', '.join(ROLES)}"
    if isinstance(role, str) and did_you_mean(role, ROLES).startswith("did"):
        hint = did_you_mean(role, ROLES)
    yield Problem("a holder needs a role", at, hint)


def _amiss(holder: dict[str, Any], environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The problem of a holder's key, and the hint."""
    if ("key" in holder) == ("key_env" in holder):
        yield "a holder needs either key or key_env", "key_env names a variable of the environment"
        return
    key = holder.get("key", holder.get("key_env"))
    if not isinstance(key, str):
        yield "a key is text", "put it in quotes"
        return
    if "key_env" in holder:
        if key not in environ:
            # an invalid variable name may be a misplaced key
            name = quoted(key) if re.fullmatch("[A-Z][A-Z0-9_]{0,59}", key) else "of this name"
            yield f"there is no variable {name}", "export it before the start"
            return
        key = environ[key]
    if len(key) < SHORTEST:
        yield (
            f"a key of {len(key)} characters is too short: {SHORTEST} at least",
            "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one",
        )
    elif not _KEY.fullmatch(key):
        yield "a key has printable characters of ASCII and no blanks", "a header carries no others"


def _key_of(holder: dict[str, Any], environ: Mapping[str, str]) -> str:
    return environ[holder["key_env"]] if "key_env" in holder else holder["key"]
